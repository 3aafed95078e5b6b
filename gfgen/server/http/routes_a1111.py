"""A1111's API, /sdapi/v1, for clients that know no other: `gfgen serve --a1111`.

Its requests are jobs like those of /v1/images, with a tag.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gfgen.job.spec import RANDOM_SEED, drawn
from gfgen.server.http.bodies import Body, documented
from gfgen.server.http.routes_images import done_job, take_images
from gfgen.server.http.routes_jobs import Service, results
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import checked_picture, chosen_model, json_object, picture_content
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import a1111_schemas as bodies
from gfgen.server.protocol.problems import ApiError, bad, opened, responses
from gfgen.server.shown.served_job import ServedJob

router = APIRouter(prefix="/sdapi/v1", tags=["a1111"])
ROUTERS = (router,)

_MAX_PIXELS = 2**24
_SIZES = ("size", "width", "height")
_OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_LIST = responses(503, **{"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}})
_TYPE: dict[str, Any] = {
    "response_model": bodies.A1111Images,
    "responses": responses(400, 404, 409, 413, 422, 429, 500, 503, 504, 507),
    "openapi_extra": documented(bodies.A1111Request),
}


@router.post("/txt2img", **_TYPE, summary="Make pictures from text")
async def text_to_image(request: Request, service: Service) -> Response:
    """Waits for the pictures."""
    values = await _values(request, service)
    if values.pop("init_images", None):
        raise bad("init_images", "pictures begin with one at /sdapi/v1/img2img")
    if not values.get("enable_hr"):
        values.pop("denoising_strength", None)  # of the second pass
    return await _images(request, service, values)


@router.post("/img2img", **_TYPE, summary="Make pictures from one")
async def image_to_image(request: Request, service: Service) -> Response:
    """As txt2img, with one picture in `init_images`, which gets the size of the request."""
    values = await _values(request, service)
    given = values.pop("init_images", None)
    if values.get("mask") is not None:
        raise bad("mask", "not supported here; send it to /v1/images/edits")
    if values.get("enable_hr"):
        raise bad("enable_hr", "a second pass belongs to /sdapi/v1/txt2img")
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
        raise bad("init_images", "a list of one picture as base64 is accepted")
    url = given[0] if given[0].startswith("data:") else f"data:image/png;base64,{given[0]}"
    picture = await asyncio.to_thread(picture_content, url, service.uploads.content, param="init_images")
    if values.get("denoising_strength") is None:
        values["denoising_strength"] = 0.75
    return await _images(request, service, values, picture)


async def _values(request: Request, service: JobService) -> dict[str, Any]:
    values = await asyncio.to_thread(json_object, await request.body())
    rest = {name: value for name, value in values.items() if name != "init_images"}
    if len(json.dumps(rest)) > service.limits.json_bytes:
        raise ApiError(413, f"the request exceeds {service.limits.json_bytes:,} bytes without its picture")
    return values


async def _images(
    request: Request, service: JobService, values: dict[str, Any], picture: bytes | None = None
) -> Response:
    is_strict, settings = service.api.strict, values.get("override_settings")
    named = settings.get(bodies.CHECKPOINT) if isinstance(settings, dict) else None
    given = {bodies.CHECKPOINT: named or _chosen(request, service), **values}
    if given.get("seed") in (None, RANDOM_SEED):  # further pictures count up from one that is drawn
        given["seed"] = drawn(RANDOM_SEED)
    asked_for, warnings = opened(bodies.A1111Request, given, is_strict=is_strict)
    unused = asked_for.check()
    if unused and is_strict:
        raise ApiError(400, "; ".join(unused))
    warnings += unused
    job = asked_for.job
    if picture is not None:
        picture = await asyncio.to_thread(_resized, picture, job.get("width"), job.get("height"))
    body = Body(values, [] if picture is None else [picture])
    try:
        ids = await take_images(request, service, body, asked_for, warnings)
    except ApiError as error:
        if picture is None or error.status != 422 or error.param not in _SIZES:
            raise
        rest = {name: value for name, value in given.items() if name not in _SIZES}
        asked_for, _ = opened(bodies.A1111Request, rest, is_strict=is_strict)
        ids = await take_images(request, service, body, asked_for, warnings)  # in the picture's own size
    await results(request, service, ids)
    facts = [done_job(service, job_id).facts for job_id in ids]
    pictures = [await files.base64_as(service.folder.result(each), "png") for each in facts]
    info = {
        "seed": facts[0].seed,
        "all_seeds": [each.seed for each in facts],
        "sd_model_name": facts[0].model,
        "infotexts": await asyncio.to_thread(lambda: list(map(_infotext, pictures))),
    }
    answer = bodies.A1111Images(
        images=pictures, parameters=values, info=json.dumps(info), warnings=warnings or None
    )
    return await asyncio.to_thread(answer.response)


def _resized(content: bytes, width: int | None, height: int | None) -> bytes:
    """The picture in the size of the job, as A1111's resize mode 0 does."""
    from PIL import Image

    checked_picture(content, param="init_images")
    if width is None or height is None:
        return content
    if width * height > _MAX_PIXELS:
        raise bad("width", f"at most {_MAX_PIXELS:,} pixels are accepted with init_images")
    with Image.open(io.BytesIO(content)) as picture:
        file = io.BytesIO()
        picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS).save(file, "PNG")
    return file.getvalue()


def _infotext(picture: str) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(picture))) as file:
        return str(file.info.get("parameters", ""))


def _chosen(request: Request, service: JobService) -> str | None:
    """The model that POST options has chosen."""
    found: str | None = request.app.state.a1111_models.get(service.owner)
    return found


@router.get("/options", responses=responses(503, **_OBJECT), summary="Get the settings")
async def get_options(request: Request, service: Service) -> Response:
    model = chosen_model(_chosen(request, service), service.ready_models(), kind="image")
    return JSONResponse({bodies.CHECKPOINT: model.id, **bodies.OPTIONS})


@router.post(
    "/options",
    responses=responses(400, 404, 413, 503, **_OBJECT),
    openapi_extra={"requestBody": {"required": True, "content": _OBJECT}},
    summary="Choose the model",
)
async def set_options(request: Request, service: Service) -> Response:
    """`sd_model_checkpoint` is the model of later requests of this key that name none, until the server's
    end; other settings are ignored with a warning."""
    values = await _values(request, service)
    warnings = bodies.setting_warnings(values)
    if warnings and service.api.strict:
        raise ApiError(400, "; ".join(warnings))
    if (name := values.get(bodies.CHECKPOINT)) is not None:
        if not isinstance(name, str):
            raise bad(bodies.CHECKPOINT, "a name is accepted")
        found = chosen_model(name, service.ready_models(), kind="image")
        request.app.state.a1111_models[service.owner] = found.id
    return JSONResponse({"warnings": warnings} if warnings else {})


@router.get("/sd-models", responses=_LIST, summary="List models for pictures")
async def list_a1111_models(service: Service) -> Response:
    names = [model.id for model in service.ready_models() if model.kind == "image"]
    return JSONResponse([{"title": name, "model_name": name, "filename": name} for name in names])


@router.get("/samplers", responses=_LIST, summary="List samplers")
async def list_samplers(service: Service) -> Response:
    return JSONResponse([{"name": name, "aliases": [], "options": {}} for name in bodies.SAMPLER_NAMES])


@router.get("/schedulers", responses=_LIST, summary="List noise schedules")
async def list_schedulers(service: Service) -> Response:
    names = bodies.SCHEDULE_NAMES
    return JSONResponse([{"name": name.lower().replace(" ", "_"), "label": name} for name in names])


@router.get("/upscalers", responses=_LIST, summary="List upscalers of the second pass")
async def list_upscalers(service: Service) -> Response:
    rest = {"model_name": None, "model_path": None, "scale": 4}
    return JSONResponse([{"name": name, **rest} for name in bodies.UPSCALER_NAMES])


@router.get("/latent-upscale-modes", responses=_LIST, summary="There is none")
@router.get("/sd-vae", responses=_LIST, summary="There is none", name="list_vaes")
async def list_latent_upscale_modes(service: Service) -> Response:
    return JSONResponse([])


@router.get("/loras", responses=_LIST, summary="List LoRAs of --lora")
async def list_patches(service: Service) -> Response:
    return JSONResponse([{"name": name, "alias": name, "metadata": {}} for name in service.api.patch_names])


def _open_jobs(service: JobService) -> list[ServedJob]:
    own = [one for one in service.mirror.records.values() if one.facts.tag == bodies.TAG]
    return [one for one in own if service.owner in (None, one.facts.owner)]


@router.get("/progress", response_model=bodies.A1111Progress, summary="Get the progress")
async def progress(service: Service) -> Response:
    """Of the open jobs of this API."""
    jobs = _open_jobs(service)
    ends = [one.predicted_end_at - service.now() for one in jobs if one.predicted_end_at is not None]
    share = sum(one.progress for one in jobs) / (100 * len(jobs)) if jobs else 0.0
    found = bodies.A1111Progress(
        progress=share, eta_relative=max(0.0, *ends, 0.0), state={"job_count": len(jobs)}
    )
    return found.response()


@router.post("/interrupt", responses=responses(503, 507, **_OBJECT), summary="Cancel this API's open jobs")
async def interrupt(service: Service) -> Response:
    await service.cancel([one.facts.id for one in _open_jobs(service)])
    return JSONResponse({})
