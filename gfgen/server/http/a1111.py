"""A1111's API, /sdapi/v1, for clients that know no other: `gfgen serve --a1111`.

Its requests are jobs like those of /v1/images, with a tag. Bodies are as Open WebUI and SillyTavern send and
read them.

Source: Open WebUI's backend (routers/images.py), SillyTavern's server (src/endpoints/stable-diffusion.js)
and its extension stable-diffusion, and the documentation of A1111's API.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from gfgen.job.fields import MAX_STEPS
from gfgen.job.inputs import patches_in
from gfgen.job.samplers import SCHEDULES, known_sampler
from gfgen.job.spec import RANDOM_SEED, UPSCALE_FIELDS, drawn
from gfgen.job.weighted import AUTO
from gfgen.server.http.bodies import Body, check_size, documented
from gfgen.server.http.routes_images import finished, take_images
from gfgen.server.http.routes_jobs import Service
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import checked_picture, chosen_model, json_object, picture_content
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol.picture_schemas import AskedPictures
from gfgen.server.protocol.problems import ApiError, bad, opened, responses
from gfgen.server.protocol.schemas import ResponseModel, Unused
from gfgen.server.shown.served_job import ServedJob

SAMPLER_NAMES = (
    *("Euler a", "Euler", "DPM++ 2M", "DPM++ 2M SDE", "DPM++ 2M SDE Heun", "DPM++ 3M SDE", "DPM++ SDE"),
    *("DPM++ 2S a", "DPM2", "DPM2 a", "LMS", "Heun", "DDIM", "PLMS", "UniPC", "LCM"),
)
SCHEDULE_NAMES = (
    *("Automatic", "Karras", "Exponential", "SGM Uniform", "Simple", "Normal", "DDIM Uniform", "Beta"),
)
UPSCALER_NAMES = ("None", "Lanczos")
"""Both are Lanczos, as in A1111."""
TAG = "a1111"
"""That of this API's jobs, by which `progress` and `interrupt` know them."""
CHECKPOINT = "sd_model_checkpoint"
OPTIONS: Mapping[str, Any] = {"sd_vae": "Automatic", "CLIP_stop_at_last_layers": 1, "samples_format": "png"}
"""Settings beside the model; each has this value only."""
_ONLY: Mapping[str, Any] = {"restore_faces": False, "clip_skip": 1, "send_images": True}
"""Fields with one value that has no effect; any other one gets a warning."""
_SECOND_PASS = ("enable_hr", "denoising_strength", "hr_second_pass_steps")
_Free = Annotated[Any, Field(exclude=True)]


class A1111Request(AskedPictures):
    """POST /sdapi/v1/txt2img and img2img; only the latter has `init_images`."""

    names: ClassVar = {
        **{name: name for name in ("prompt", "negative_prompt", "steps", "width", "height", "seed")},
        "guidance_scale": "cfg_scale",
        "model": CHECKPOINT,
        "image": "init_images",
    }
    other_names: ClassVar = dict(zip(UPSCALE_FIELDS, _SECOND_PASS, strict=True))
    required = ("prompt",)
    init_images: list[str] | None = Field(None, description="One picture as base64 or a data: URL.")
    sampler_name: str | None = Field(None, max_length=100, description="One of GET /sdapi/v1/samplers.")
    scheduler: str | None = Field(None, max_length=100, description="One of GET /sdapi/v1/schedulers.")
    batch_size: int | None = Field(None, ge=1, le=100, description="Pictures. [1]")
    n_iter: int | None = Field(None, ge=1, le=100, description="Times `batch_size`. [1]")
    denoising_strength: float | None = Field(None, ge=0, le=1, description="Of img2img or enable_hr. [0.75]")
    enable_hr: bool | None = Field(None, exclude=True, description="Begin a second pass with the picture.")
    hr_scale: float | None = Field(None, ge=1, description="How much larger. [2]")
    hr_resize_x: int | None = Field(None, ge=0, description="Its width, in place of `hr_scale`.")
    hr_resize_y: int | None = Field(None, ge=0, description="Its height, in place of `hr_scale`.")
    hr_second_pass_steps: int | None = Field(None, ge=0, le=MAX_STEPS, description="[`steps`]")
    hr_upscaler: str | None = Field(None, max_length=200, description="One of GET /sdapi/v1/upscalers.")
    override_settings: _Free = None
    script_name: _Free = None
    alwayson_scripts: _Free = None
    restore_faces: _Free = None
    clip_skip: _Free = None
    send_images: _Free = None
    override_settings_restore_afterwards: Unused = None
    save_images: Unused = None
    do_not_save_grid: Unused = None
    do_not_save_samples: Unused = None
    hr_additional_modules: Unused = None

    @property
    def num_pictures(self) -> int:
        return (self.batch_size or 1) * (self.n_iter or 1)

    @property
    def job(self) -> dict[str, Any]:
        """Raises: ApiError for an unknown sampler."""
        job = {**super().job, "tag": TAG, "scheduler": self._sampler}
        job["prompt"], patches = patches_in(job["prompt"])
        if patches:
            job["lora"] = [{"name": name, "scale": scale} for name, scale in patches]
        if importlib.util.find_spec("compel") is not None:  # without it weights get a warning
            job["prompt_syntax"] = AUTO
        if self.enable_hr:
            job |= self._second_pass(job)
        elif self.denoising_strength is not None:
            job["args"] = {"strength": self.denoising_strength}
        return {name: value for name, value in job.items() if value is not None}

    def _second_pass(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """A1111 counts the steps that run, and job files those of which `upscale_strength` is a share."""
        strength = 0.75 if self.denoising_strength is None else self.denoising_strength
        if strength == 0:
            raise bad("denoising_strength", "more than 0 is accepted with enable_hr")
        steps = self.hr_second_pass_steps or job.get("steps")
        sides = ((self.hr_resize_x, job.get("width")), (self.hr_resize_y, job.get("height")))
        scales = {wanted / side for wanted, side in sides if wanted and side}
        if len(scales) > 1 or (not scales and (self.hr_resize_x or self.hr_resize_y)):
            raise bad("hr_resize_x", "a size of the shape of width and height is accepted; or give hr_scale")
        found = {"upscale": min(scales, default=self.hr_scale or 2.0), "upscale_strength": strength}
        return {**found, "upscale_steps": steps and math.ceil(min(MAX_STEPS, steps / strength) - 1e-6)}

    @property
    def _sampler(self) -> str | None:
        """The sampler and its schedule, as in a job file."""
        sampler, schedule = (self.sampler_name or "").strip(), (self.scheduler or "").strip()
        sampler = "" if sampler.lower() == "automatic" else sampler
        if sampler and not (known_sampler(sampler, is_flow=False) or {}).get("class"):
            raise bad("sampler_name", f"{sampler[:80]!r} is unknown; there are {', '.join(SAMPLER_NAMES)}")
        if schedule and schedule.lower().replace(" ", "_") not in SCHEDULES:
            raise bad("scheduler", f"{schedule[:80]!r} is unknown; there are {', '.join(SCHEDULE_NAMES)}")
        is_said = schedule.lower() == "automatic" or sampler.lower().endswith(schedule.lower())
        return (sampler if is_said else f"{sampler} {schedule}".strip()) or None

    def check(self) -> list[str]:
        """Warnings about what has no effect. Raises: ApiError for what no job can do."""
        for name in ("script_name", "alwayson_scripts"):
            if getattr(self, name):
                raise bad(name, "scripts are not supported; leave it out")
        upscaler, warnings = (self.hr_upscaler or "") if self.enable_hr else "", []
        if upscaler.startswith("Latent"):
            warnings = [f"hr_upscaler: {upscaler} is not supported; the picture is enlarged by Lanczos"]
        elif upscaler not in ("", *UPSCALER_NAMES):
            raise bad("hr_upscaler", f"{upscaler[:80]!r} is unknown; there are {', '.join(UPSCALER_NAMES)}")
        if not isinstance(self.override_settings or {}, Mapping):
            raise bad("override_settings", "an object is accepted")
        given = {name: getattr(self, name) for name in _ONLY}
        return warnings + _unused(given, _ONLY) + setting_warnings(self.override_settings or {})


def setting_warnings(settings: Mapping[str, Any]) -> list[str]:
    return _unused({name: value for name, value in settings.items() if name != CHECKPOINT}, OPTIONS)


def _unused(values: Mapping[str, Any], only: Mapping[str, Any]) -> list[str]:
    return [
        f"{name[:80]}: " + (f"only {only[name]} has a meaning" if name in only else "unknown") + ", ignored"
        for name, value in values.items()
        if value is not None and (name not in only or value != only[name])
    ]


class A1111Images(ResponseModel):
    images: list[str] = Field(description="PNG files as base64.")
    parameters: dict[str, Any]
    info: str = Field(description="JSON with `seed`, `all_seeds`, `sd_model_name` and `infotexts`.")
    warnings: list[str] | None = Field(None, description="Fields that were ignored.")


class A1111Progress(ResponseModel):
    progress: float = Field(description="Of all open jobs of this API, from 0 to 1.")
    eta_relative: float = Field(description="Seconds until the last one's predicted end.")
    state: dict[str, int] = Field(description="`job_count` of open jobs.")


router = APIRouter(prefix="/sdapi/v1", tags=["a1111"])
ROUTERS = (router,)

_MAX_PIXELS = 2**24
_SIZES = ("size", "width", "height")
_OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_LIST = responses(503, **{"application/json": {"schema": {"type": "array", "items": {"type": "object"}}}})
_TYPE: dict[str, Any] = {
    "response_model": A1111Images,
    "responses": responses(400, 404, 409, 413, 422, 429, 500, 503, 504, 507),
    "openapi_extra": documented(A1111Request),
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
    check_size(rest, service.limits.json_bytes)
    return values


async def _images(
    request: Request, service: JobService, values: dict[str, Any], picture: bytes | None = None
) -> Response:
    is_strict, settings = service.api.strict, values.get("override_settings")
    named = settings.get(CHECKPOINT) if isinstance(settings, dict) else None
    given = {CHECKPOINT: named or _chosen(request, service), **values}
    if given.get("seed") in (None, RANDOM_SEED):  # further pictures count up from one that is drawn
        given["seed"] = drawn(RANDOM_SEED)
    asked_for, warnings = opened(A1111Request, given, is_strict=is_strict)
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
        asked_for, _ = opened(A1111Request, rest, is_strict=is_strict)
        ids = await take_images(request, service, body, asked_for, warnings)  # in the picture's own size
    facts = [each.facts for each in await finished(request, service, ids)]
    pictures = [await files.base64_as(service.folder.result(each), "png") for each in facts]
    info = {
        "seed": facts[0].seed,
        "all_seeds": [each.seed for each in facts],
        "sd_model_name": facts[0].model,
        "infotexts": await asyncio.to_thread(lambda: list(map(_infotext, pictures))),
    }
    answer = A1111Images(images=pictures, parameters=values, info=json.dumps(info), warnings=warnings or None)
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
    return JSONResponse({CHECKPOINT: model.id, **OPTIONS})


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
    warnings = setting_warnings(values)
    if warnings and service.api.strict:
        raise ApiError(400, "; ".join(warnings))
    if (name := values.get(CHECKPOINT)) is not None:
        if not isinstance(name, str):
            raise bad(CHECKPOINT, "a name is accepted")
        found = chosen_model(name, service.ready_models(), kind="image")
        request.app.state.a1111_models[service.owner] = found.id
    return JSONResponse({"warnings": warnings} if warnings else {})


@router.get("/sd-models", responses=_LIST, summary="List models for pictures")
async def list_a1111_models(service: Service) -> Response:
    names = [model.id for model in service.ready_models() if model.kind == "image"]
    return JSONResponse([{"title": name, "model_name": name, "filename": name} for name in names])


@router.get("/samplers", responses=_LIST, summary="List samplers")
async def list_samplers(service: Service) -> Response:
    return JSONResponse([{"name": name, "aliases": [], "options": {}} for name in SAMPLER_NAMES])


@router.get("/schedulers", responses=_LIST, summary="List noise schedules")
async def list_schedulers(service: Service) -> Response:
    names = SCHEDULE_NAMES
    return JSONResponse([{"name": name.lower().replace(" ", "_"), "label": name} for name in names])


@router.get("/upscalers", responses=_LIST, summary="List upscalers of the second pass")
async def list_upscalers(service: Service) -> Response:
    rest = {"model_name": None, "model_path": None, "scale": 4}
    return JSONResponse([{"name": name, **rest} for name in UPSCALER_NAMES])


@router.get("/latent-upscale-modes", responses=_LIST, summary="There is none")
@router.get("/sd-vae", responses=_LIST, summary="There is none", name="list_vaes")
async def list_latent_upscale_modes(service: Service) -> Response:
    return JSONResponse([])


@router.get("/loras", responses=_LIST, summary="List LoRAs of --lora")
async def list_patches(service: Service) -> Response:
    return JSONResponse([{"name": name, "alias": name, "metadata": {}} for name in service.api.patch_names])


def _open_jobs(service: JobService) -> list[ServedJob]:
    own = [one for one in service.mirror.records.values() if one.facts.tag == TAG]
    return [one for one in own if service.owner in (None, one.facts.owner)]


@router.get("/progress", response_model=A1111Progress, summary="Get the progress")
async def progress(service: Service) -> Response:
    """Of the open jobs of this API."""
    jobs = _open_jobs(service)
    ends = [one.predicted_end_at - service.now() for one in jobs if one.predicted_end_at is not None]
    share = sum(one.progress for one in jobs) / (100 * len(jobs)) if jobs else 0.0
    found = A1111Progress(progress=share, eta_relative=max(0.0, *ends, 0.0), state={"job_count": len(jobs)})
    return found.response()


@router.post("/interrupt", responses=responses(503, 507, **_OBJECT), summary="Cancel this API's open jobs")
async def interrupt(service: Service) -> Response:
    await service.cancel([one.facts.id for one in _open_jobs(service)])
    return JSONResponse({})
