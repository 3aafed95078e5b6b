"""What passes from the first pass of a job to its second, and between the steps of that.

A step hands on latents alone. In a second pass they hold the prompt and the condition of its own call, too.
"""

from __future__ import annotations

import torch
from PIL import Image

from gfgen.models.families.adapter import Fields

_PARTS = ("prompt", "condition", "")


def enlarged(frames_FHWC: torch.Tensor, size: tuple[int, int]) -> Image.Image:
    """The picture as its PNG would be read, in another size."""
    return Image.fromarray(frames_FHWC[0].cpu().numpy()).resize(size, Image.Resampling.LANCZOS)


def joined(*artifacts: Fields) -> Fields:
    """Prompt, condition and latents as latents; only the names of their own fields are without an @."""
    made = Fields()
    for part, fields in zip(_PARTS, artifacts, strict=True):
        end = part and f"@{part}"
        made.tensors |= {f"{name}{end}": tensor for name, tensor in fields.tensors.items()}
        made.scalars |= {f"{name}{end}": value for name, value in fields.scalars.items()}
    return made


def parted(latents: Fields) -> list[Fields]:
    """What was joined; the first is empty for latents of a first pass."""
    parts = {part: Fields() for part in _PARTS}
    for name, tensor in latents.tensors.items():
        own, _, part = name.partition("@")
        parts[part].tensors[own] = tensor
    for name, value in latents.scalars.items():
        own, _, part = name.partition("@")
        parts[part].scalars[own] = value
    return list(parts.values())
