"""Bodies of A1111's API (/sdapi/v1), as far as Open WebUI and SillyTavern send and read them.

Source: Open WebUI's backend (routers/images.py), SillyTavern's server (src/endpoints/stable-diffusion.js)
and its extension stable-diffusion, and the documentation of A1111's API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from gfgen.job.samplers import SCHEDULES, known_sampler
from gfgen.server.protocol.problems import ApiError, bad
from gfgen.server.protocol.schemas import OpenRequest, ResponseModel

SAMPLER_NAMES = (
    *("Euler a", "Euler", "DPM++ 2M", "DPM++ 2M SDE", "DPM++ 2M SDE Heun", "DPM++ 3M SDE", "DPM++ SDE"),
    *("DPM++ 2S a", "DPM2", "DPM2 a", "LMS", "Heun", "DDIM", "PLMS", "UniPC", "LCM"),
)
SCHEDULE_NAMES = (
    *("Automatic", "Karras", "Exponential", "SGM Uniform", "Simple", "Normal", "DDIM Uniform", "Beta"),
)
CHECKPOINT = "sd_model_checkpoint"
OPTIONS: Mapping[str, Any] = {"sd_vae": "Automatic", "CLIP_stop_at_last_layers": 1, "samples_format": "png"}
"""Settings beside the model; each has this value only."""
_FIXED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("restore_faces", "tiling", "do_not_save_samples", "inpainting_mask_invert"), ()),
    **dict.fromkeys(("script_args", "styles", "comments", "mask", "firstphase_width"), ()),
    **dict.fromkeys(("firstphase_height", "subseed_strength", "s_churn", "s_tmin", "resize_mode"), ()),
    **dict.fromkeys(("eta", "s_min_uncond", "include_init_images", "disable_extra_networks"), ()),
    **dict.fromkeys(("subseed", "seed_resize_from_h", "seed_resize_from_w"), (-1,)),
    **dict.fromkeys(("s_noise", "clip_skip"), (1,)),
    "s_tmax": (1e9, float("inf")),
    "send_images": (True,),
}
"""Fields without an effect here, with the values beside empty ones that ask for none."""
_WITHOUT_EFFECT = (
    *("override_settings_restore_afterwards", "save_images", "do_not_save_grid", "hr_additional_modules"),
    *("hr_upscaler", "hr_scale", "hr_second_pass_steps", "hr_resize_x", "hr_resize_y", "force_task_id"),
    *("hr_sampler_name", "hr_scheduler", "hr_checkpoint_name", "hr_prompt", "hr_negative_prompt"),
)
"""Fields of files that only A1111 keeps, and of the second pass, which no request has."""
_PATCH = re.compile(r"<lora:([^<>:]+)(?::([^<>:]*))?>")
Anything = Annotated[Any, Field(exclude=True)]


class A1111Request(OpenRequest):
    """POST /sdapi/v1/txt2img and img2img; the latter also has `init_images`."""

    names: ClassVar = {
        **{name: name for name in ("prompt", "negative_prompt", "steps", "width", "height", "seed")},
        "guidance_scale": "cfg_scale",
    }
    required = ("prompt",)
    sampler_name: str | None = Field(None, max_length=100, description="One of GET /sdapi/v1/samplers.")
    sampler_index: str | None = Field(None, max_length=100, description="The same, of older clients.")
    scheduler: str | None = Field(None, max_length=100, description="One of GET /sdapi/v1/schedulers.")
    batch_size: int | None = Field(None, ge=1, le=100, description="Pictures. [1]")
    n_iter: int | None = Field(None, ge=1, le=100, description="Times `batch_size`. [1]")
    denoising_strength: float | None = Field(None, ge=0, le=1, description="Of img2img. [0.75]")
    override_settings: Anything = None
    enable_hr: Anything = None
    script_name: Anything = None
    alwayson_scripts: Anything = None

    @property
    def num_pictures(self) -> int:
        return (self.batch_size or 1) * (self.n_iter or 1)

    @property
    def sampler(self) -> str | None:
        """The sampler and its schedule, as in a job file. Raises: ApiError for an unknown one."""
        sampler, schedule = (self.sampler_name or self.sampler_index or "").strip(), self.scheduler or ""
        if sampler.lower() == "automatic":
            sampler = ""
        if sampler and not (known_sampler(sampler, is_flow=False) or {}).get("class"):
            raise bad("sampler_name", f"{sampler[:80]!r} is unknown; there are {', '.join(SAMPLER_NAMES)}")
        if schedule and schedule.strip().lower().replace(" ", "_") not in SCHEDULES:
            raise bad("scheduler", f"{schedule[:80]!r} is unknown; there are {', '.join(SCHEDULE_NAMES)}")
        if sampler.lower().endswith(schedule.lower()) or schedule.lower() == "automatic":
            return sampler or None
        return f"{sampler} {schedule}".strip()

    def check(self) -> None:
        """Raises: ApiError for what no job can do."""
        for name in ("script_name", "alwayson_scripts"):
            if getattr(self, name):
                raise bad(name, "scripts are not supported; leave it out")
        if self.enable_hr not in (None, False):
            raise bad("enable_hr", "a second pass is not supported; send its picture to /sdapi/v1/img2img")


def with_patches(prompt: str) -> tuple[str, list[dict[str, Any]]]:
    """The prompt without `<lora:NAME:SCALE>`, and those as `lora` of a job."""
    patches = []
    for name, scale in _PATCH.findall(prompt):
        try:
            patches.append({"name": name, "scale": float(scale or 1)})
        except ValueError:
            raise bad("prompt", f"<lora:{name[:80]}:{scale[:20]}>: the scale is no number") from None
    return (" ".join(_PATCH.sub("", prompt).split()) if patches else prompt), patches


def known_values(values: Mapping[str, Any], *, is_strict: bool) -> tuple[dict[str, Any], list[str]]:
    """The values without fields that act on nothing, and a warning for each that asks for more."""
    fixed = {name for name in values if name in _FIXED}
    warnings = [
        f"{name}: not supported, ignored"
        for name in sorted(fixed)
        if values[name] and values[name] not in _FIXED[name]
    ]
    settings = values.get("override_settings") or {}
    if not isinstance(settings, Mapping):
        raise bad("override_settings", "an object is accepted")
    warnings += setting_warnings(settings)
    if warnings and is_strict:
        raise ApiError(400, "; ".join(warnings))
    return {
        name: value for name, value in values.items() if name not in fixed and name not in _WITHOUT_EFFECT
    }, warnings


def setting_warnings(settings: Mapping[str, Any]) -> list[str]:
    return [
        f"{str(name)[:80]}: only {OPTIONS[name]} is supported, ignored"
        if name in OPTIONS
        else f"{str(name)[:80]}: not a setting, ignored"
        for name, value in settings.items()
        if name != CHECKPOINT and value is not None and not (name in OPTIONS and value == OPTIONS[name])
    ]


class A1111Images(ResponseModel):
    images: list[str] = Field(description="PNG files as base64.")
    parameters: dict[str, Any]
    info: str = Field(description="JSON with `seed`, `all_seeds`, `infotexts` and more.")
    warnings: list[str] | None = Field(None, description="Fields that were ignored.")


class A1111State(ResponseModel):
    job: str = ""
    job_count: int = 0
    job_no: int = 0
    sampling_step: int = 0
    sampling_steps: int = 0
    skipped: bool = False
    interrupted: bool = False


class A1111Progress(ResponseModel):
    progress: float = Field(description="Of all open jobs of this API, from 0 to 1.")
    eta_relative: float = Field(description="Seconds until the last one's predicted end.")
    state: A1111State
    current_image: str | None = Field(None, description="A preview as base64, if the model has them.")
    textinfo: str | None = None
