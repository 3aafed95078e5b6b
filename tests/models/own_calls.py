"""What a job means as arguments of its pipeline's own call."""

from __future__ import annotations

from typing import Any

from diffusers import QwenImagePipeline
from diffusers.utils import load_image

from gfgen.job.spec import JobSpec


def arguments_of(spec: JobSpec, pipeline: Any, *, output_type: str) -> dict[str, Any]:
    """All but the generator, for a class of pipelines of Wan or Qwen-Image."""
    arguments: dict[str, Any] = {
        **{name: getattr(spec, name) for name in ("prompt", "negative_prompt", "width", "height")},
        "num_inference_steps": spec.steps,
        "output_type": output_type,
        "return_dict": False,
        **(spec.args or {}),
    }
    if pipeline is QwenImagePipeline:
        arguments["true_cfg_scale"] = spec.true_cfg_scale
    else:
        arguments |= {"num_frames": spec.frames, "guidance_scale": spec.guidance_scale}
    if spec.guidance_scale_2 is not None:
        arguments["guidance_scale_2"] = spec.guidance_scale_2
    if spec.image is not None:
        arguments["image"] = load_image(spec.image)
    return arguments
