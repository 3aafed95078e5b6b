"""A1111's API, /sdapi/v1, for clients that know no other: `gfgen serve --a1111`.

Its requests are jobs like those of /v1/images, with ids that begin with `a1111_`.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gfgen.job.spec import RANDOM_SEED, drawn, later_seed
from gfgen.job.weighted import AUTO
from gfgen.server.http.bodies import Body, documented, request_key
from gfgen.server.http.routes_images import AS_PNG, base64_of, done_job
from gfgen.server.http.routes_jobs import Service, log_ignored, results
from gfgen.server.jobs.job_requests import (
    RequestedJob,
    checked_picture,
    chosen_model,
    data_url_content,
    json_object,
    new_id,
    plain_job,
)
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import a1111_schemas as bodies
from gfgen.server.protocol.problems import ApiError, bad, checked, opened, responses
from gfgen.server.protocol.schemas import JobRequest
from gfgen.server.shown.served_job import ServedJob
from gfgen.server.store import StoredJob

router = APIRouter(prefix="/sdapi/v1", tags=["a1111"])
ROUTERS = (router,)

_KIND = "a1111"
_MAX_PIXELS = 2**24
_ERRORS = responses(400, 404, 409, 413, 422, 429, 500, 503, 504, 507)
_TYPE: dict[str, Any] = {"response_model": bodies.A1111Images, "responses": _ERRORS}
_OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}


@router.post(
    "/txt2img", **_TYPE, openapi_extra=documented(bodies.A1111Request), summary="Make pictures from text"
)
async def text_to_image(request: Request, service: Service) -> Response:
    """Waits for the pictures."""
    values = await _values(request, service)
    if values.pop("init_images", None):
        raise bad("init_images", "pictures begin with one at /sdapi/v1/img2img")
    values.pop("denoising_strength", None)  # of the second pass
    return await _images(request, service, values, picture=None)


@router.post(
    "/img2img", **_TYPE, openapi_extra=documented(bodies.A1111Request), summary="Make pictures from one"
)
async def image_to_image(request: Request, service: Service) -> Response:
    """As txt2img, with one picture in `init_images`, as base64 or as a data: URL; masks are not supported."""
    values = await _values(request, service)
    if values.get("mask"):
        raise bad("mask", "not supported; leave it out")
    given = values.pop("init_images", None)
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
        raise bad("init_images", "a list of one picture as base64 is accepted")
    url = given[0] if given[0].startswith("data:") else f"data:image/png;base64,{given[0]}"
    picture = await asyncio.to_thread(data_url_content, url, param="init_images")
    return await _images(request, service, values, picture=picture)


async def _values(request: Request, service: JobService) -> dict[str, Any]:
    values = await asyncio.to_thread(json_object, await request.body())
    rest = {name: value for name, value in values.items() if name != "init_images"}
    if len(json.dumps(rest)) > service.limits.json_bytes:
        raise ApiError(413, f"the request exceeds {service.limits.json_bytes:,} bytes without its picture")
    return values


async def _images(
    request: Request, service: JobService, values: Mapping[str, Any], *, picture: bytes | None
) -> Response:
    known, warnings = bodies.known_values(values, is_strict=service.api.strict)
    asked_for, more = opened(bodies.A1111Request, known, is_strict=service.api.strict)
    asked_for.check()
    warnings += more
    requested = _jobs(request, service, asked_for, with_picture=picture is not None)
    if picture is not None:
        first = requested[0].spec
        picture = await asyncio.to_thread(_resized, picture, first.width, first.height)
        requested = [replace(one, picture=picture) for one in requested]
    key = await request_key(request, Body(values, picture))
    try:
        ids = await service.take(requested, key=key)
    except ApiError as error:
        if picture is None or error.status != 422 or error.param not in ("size", "width", "height"):
            raise
        sized = [replace(one, spec=replace(one.spec, width=None, height=None)) for one in requested]
        ids = await service.take(sized, key=key)  # pipelines that take the picture's own size
    log_ignored(ids, warnings)
    await results(request, service, ids)
    pictures = [done_job(service, job_id) for job_id in ids]
    warnings += dict.fromkeys(text for stored in pictures for text in stored.facts.warnings)
    answer = bodies.A1111Images(
        images=[await base64_of(service, stored, AS_PNG) for stored in pictures],
        parameters=dict(values),
        info=json.dumps(_info(asked_for, pictures)),
        warnings=warnings or None,
    )
    return await asyncio.to_thread(answer.response)


def _jobs(
    request: Request, service: JobService, asked_for: bodies.A1111Request, *, with_picture: bool
) -> list[RequestedJob]:
    """One job per picture; each after the first has the next seed."""
    models, job = service.ready_models(), asked_for.job
    settings = asked_for.override_settings or {}
    named = settings.get(bodies.CHECKPOINT) or _chosen(request, service)
    if named is not None and not isinstance(named, str):
        raise bad("override_settings", f"{bodies.CHECKPOINT}: a name is accepted")
    model = chosen_model(named, models, kind="image", takes_image=with_picture)
    job["prompt"], patches = bodies.with_patches(job["prompt"])
    job |= {"model": model.id, "seed": job.get("seed", RANDOM_SEED), "scheduler": asked_for.sampler}
    job |= {"lora": patches or None, "frames": 1 if model.kind == "video" else None}
    if importlib.util.find_spec("compel") is not None:  # without it weights get a warning
        job["prompt_syntax"] = AUTO
    if with_picture:
        strength = asked_for.denoising_strength
        job["args"] = {"strength": 0.75 if strength is None else strength}
    one = plain_job(checked(JobRequest, job), uploads={}, models=models)
    seed = drawn(one.spec.seed) or 0
    words = {**asked_for.names, "image": "init_images", "scheduler": "sampler_name"}
    return [
        replace(
            one,
            spec=replace(one.spec, id=new_id(_KIND), seed=later_seed(seed, number)),
            must_be="image",
            words=words,
        )
        for number in range(asked_for.num_pictures)
    ]


def _resized(content: bytes, width: int | None, height: int | None) -> bytes:
    """The picture in the size of the job, as A1111's resize mode 0 does."""
    from PIL import Image

    checked_picture(content, param="init_images")
    if width is None or height is None:
        return content
    if width * height > _MAX_PIXELS:
        raise bad("width", f"at most {_MAX_PIXELS:,} pixels are accepted with init_images")
    with Image.open(io.BytesIO(content)) as picture:
        if picture.size == (width, height):
            return content
        file = io.BytesIO()
        picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS).save(file, "PNG")
    return file.getvalue()


def _info(asked_for: bodies.A1111Request, pictures: Sequence[StoredJob]) -> dict[str, Any]:
    facts, job = [stored.facts for stored in pictures], asked_for.job
    width, _, height = facts[0].size.partition("x")
    negative, scale = job.get("negative_prompt", ""), job.get("guidance_scale")
    sampler = asked_for.sampler or "Automatic"
    texts = [
        f"{job['prompt']}\n"
        + (f"Negative prompt: {negative}\n" if negative else "")
        + f"Steps: {each.steps}, Sampler: {sampler}, "
        + (f"CFG scale: {scale:g}, " if scale is not None else "")
        + f"Seed: {each.seed}, Size: {each.size}, Model: {each.model}, Version: gfgen"
        for each in facts
    ]
    return {
        "prompt": job["prompt"],
        "all_prompts": [job["prompt"]] * len(facts),
        "negative_prompt": negative,
        "all_negative_prompts": [negative] * len(facts),
        "seed": facts[0].seed,
        "all_seeds": [each.seed for each in facts],
        "width": int(width),
        "height": int(height),
        "sampler_name": sampler,
        "cfg_scale": scale,
        "steps": facts[0].steps,
        "batch_size": asked_for.batch_size or 1,
        "sd_model_name": facts[0].model,
        "denoising_strength": asked_for.denoising_strength,
        "index_of_first_image": 0,
        "infotexts": texts,
    }


def _choices(request: Request) -> dict[str | None, str]:
    """The models that POST options has chosen, by key."""
    state = request.app.state
    if not hasattr(state, "a1111_models"):
        state.a1111_models = {}
    found: dict[str | None, str] = state.a1111_models
    return found


def _chosen(request: Request, service: JobService) -> str | None:
    return _choices(request).get(service.owner)


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
        _choices(request)[service.owner] = chosen_model(name, service.ready_models(), kind="image").id
    return JSONResponse({"warnings": warnings} if warnings else {})


_LIST = responses(503, **{"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}})


@router.get("/sd-models", responses=_LIST, summary="List models for pictures")
async def list_models(service: Service) -> Response:
    names = [model.id for model in service.ready_models() if model.kind == "image"]
    nothing = dict.fromkeys(("hash", "sha256", "config"))
    return JSONResponse([{"title": name, "model_name": name, "filename": name, **nothing} for name in names])


@router.get("/samplers", responses=_LIST, summary="List samplers")
async def list_samplers(service: Service) -> Response:
    return JSONResponse([{"name": name, "aliases": [], "options": {}} for name in bodies.SAMPLER_NAMES])


@router.get("/schedulers", responses=_LIST, summary="List noise schedules")
async def list_schedulers(service: Service) -> Response:
    names = bodies.SCHEDULE_NAMES
    return JSONResponse([{"name": name.lower().replace(" ", "_"), "label": name} for name in names])


@router.get("/upscalers", responses=_LIST, summary="List upscalers")
async def list_upscalers(service: Service) -> Response:
    return JSONResponse([{"name": "None", "model_name": None, "model_path": None, "scale": 1}])


@router.get("/latent-upscale-modes", responses=_LIST, summary="There are none")
@router.get("/sd-vae", responses=_LIST, summary="There are none", name="list_vaes")
async def list_latent_upscale_modes(service: Service) -> Response:
    return JSONResponse([])


@router.get("/loras", responses=_LIST, summary="List LoRAs of --lora")
async def list_patches(service: Service) -> Response:
    return JSONResponse([{"name": name, "alias": name, "metadata": {}} for name in service.api.patch_names])


def _open_jobs(service: JobService) -> list[ServedJob]:
    records = list(service.mirror.records.values())
    own = [one for one in records if one.facts.id.startswith(f"{_KIND}_")]
    return [one for one in own if service.owner in (None, one.facts.owner)]


@router.get("/progress", response_model=bodies.A1111Progress, summary="Get the progress")
async def progress(service: Service) -> Response:
    """Of the open jobs of this API."""
    jobs = _open_jobs(service)
    running = next((one for one in jobs if one.status == "in_progress"), None)
    preview = None if running is None else await service.previews.picture(running.facts.id, kind="png")
    ends = [one.predicted_end_at - service.now() for one in jobs if one.predicted_end_at]
    found = bodies.A1111Progress(
        progress=sum(one.progress for one in jobs) / (100 * len(jobs)) if jobs else 0.0,
        eta_relative=max(0.0, *ends, 0.0),
        state=bodies.A1111State(
            job="" if running is None else running.facts.id,
            job_count=len(jobs),
            sampling_step=0 if running is None else running.step,
            sampling_steps=0 if running is None else running.facts.steps,
        ),
        current_image=None if preview is None else base64.b64encode(preview).decode(),
    )
    return found.response()


@router.post(
    "/interrupt", responses=responses(503, 507, **_OBJECT), summary="Cancel the open jobs of this API"
)
async def interrupt(service: Service) -> Response:
    await service.cancel([one.facts.id for one in _open_jobs(service)])
    return JSONResponse({})
