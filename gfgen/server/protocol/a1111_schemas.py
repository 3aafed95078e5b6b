"""Bodies of A1111's API (/sdapi/v1), as far as Open WebUI and SillyTavern send and read them.

Source: Open WebUI's backend (routers/images.py), SillyTavern's server (src/endpoints/stable-diffusion.js)
and its extension stable-diffusion, and the documentation of A1111's API.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from gfgen.job.fields import MAX_STEPS
from gfgen.job.samplers import SCHEDULES, known_sampler
from gfgen.job.spec import UPSCALE_FIELDS
from gfgen.job.weighted import AUTO
from gfgen.server.protocol.picture_schemas import AskedPictures
from gfgen.server.protocol.problems import bad
from gfgen.server.protocol.schemas import ResponseModel, Unused

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
_PATCH = re.compile(r"<lora:([^<>:]+)(?::([^<>:]*))?>")
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
        """Raises: ApiError for an unknown sampler, and for a scale of a LoRA that is no number."""
        job = {**super().job, "tag": TAG, "scheduler": self._sampler}
        if patches := _PATCH.findall(job["prompt"]):
            job["lora"] = [{"name": name, "scale": _scale(name, scale)} for name, scale in patches]
            job["prompt"] = " ".join(_PATCH.sub("", job["prompt"]).split())
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


def _scale(name: str, text: str) -> float:
    try:
        return float(text or 1)
    except ValueError:
        raise bad("prompt", f"<lora:{name[:80]}:{text[:20]}>: the scale is no number") from None


class A1111Images(ResponseModel):
    images: list[str] = Field(description="PNG files as base64.")
    parameters: dict[str, Any]
    info: str = Field(description="JSON with `seed`, `all_seeds`, `sd_model_name` and `infotexts`.")
    warnings: list[str] | None = Field(None, description="Fields that were ignored.")


class A1111Progress(ResponseModel):
    progress: float = Field(description="Of all open jobs of this API, from 0 to 1.")
    eta_relative: float = Field(description="Seconds until the last one's predicted end.")
    state: dict[str, int] = Field(description="`job_count` of open jobs.")
