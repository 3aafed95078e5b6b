"""Whether a pipeline's call in steps gives the bits of its own call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import PIL.Image
import torch

from gfgen.models.families.adapter import Fields
from gfgen.models.stepping.stepper import Stepper, is_finished
from gfgen.models.stepping.values import vars_of


def whole_call(pipeline: Any, args: Mapping[str, Any], *, seed: int) -> Any:
    torch.manual_seed(seed)
    generator = torch.Generator("cpu").manual_seed(seed)
    return pipeline(**args, generator=generator)


def stepped_call(
    pipelines: list[Any], args: Mapping[str, Any], *, seed: int, device: str = "cpu"
) -> tuple[Any, int]:
    """The output of a call whose tasks alternate between pipeline objects, and the number of its steps."""
    steppers = [Stepper(pipeline, device=device) for pipeline in pipelines]
    prompt = moved(steppers[0].encode(args, seed=seed))
    condition, state = map(moved, steppers[-1].prepare(prompt))
    num_steps = 0
    while not is_finished(state):
        state = moved(steppers[num_steps % len(steppers)].step(prompt, condition, state))
        num_steps += 1
    return steppers[num_steps % len(steppers)].decode(state), num_steps


def moved(fields: Fields) -> Fields:
    """An artifact as another process gets it."""
    return Fields({name: tensor.clone() for name, tensor in fields.tensors.items()}, dict(fields.scalars))


def difference(ours: Any, theirs: Any, where: str = "output") -> str | None:
    """Where two outputs first differ in a bit; None if they are equal."""
    if type(ours) is not type(theirs):
        return f"{where}: {type(ours).__name__}, not {type(theirs).__name__}"
    if isinstance(ours, PIL.Image.Image):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
    if isinstance(ours, np.ndarray):
        ours, theirs = torch.from_numpy(ours.copy()), torch.from_numpy(theirs.copy())
    if isinstance(ours, torch.Tensor):
        is_same = ours.shape == theirs.shape and torch.equal(_bits(ours), _bits(theirs))
        return None if is_same else f"{where}: {_how_far(ours, theirs)}"
    if isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} items, not {len(theirs)}"
        pairs = [(f"{where}[{idx}]", *pair) for idx, pair in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, dict):
        pairs = [(f"{where}.{key}", ours[key], theirs[key]) for key in ours]
    elif hasattr(ours, "__dataclass_fields__"):
        pairs = [(f"{where}.{key}", value, vars_of(theirs)[key]) for key, value in vars_of(ours).items()]
    else:
        return None if ours == theirs else f"{where}: {ours!r}, not {theirs!r}"
    return next((found for name, a, b in pairs if (found := difference(a, b, name))), None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _how_far(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    return f"largest difference {(ours.double() - theirs.double()).abs().max().item():.3g}"
