"""The last computed outputs of a job's transformer, as part of its latents, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gfgen.models.families.adapter import Fields
from gfgen.models.geometry.reuse import KEPT_OUTPUTS

_STEPS = "reuse_steps"
"""A scalar of latents: the steps of KEPT_OUTPUTS, -1 for none."""
_NO_STEPS = [-1] * len(KEPT_OUTPUTS)


def keep_outputs(state: Fields, given: Fields, outputs: Sequence[Tensor], *, step: int) -> None:
    """Add the outputs of a computed step to its result, in place of the older ones that it was given."""
    carry_outputs(state, given)
    steps = list(_steps_of(given))
    slot = steps.index(min(steps))
    steps[slot] = step
    state.scalars[_STEPS] = steps
    state.tensors |= {_name(slot, number): output for number, output in enumerate(outputs)}


def carry_outputs(state: Fields, given: Fields) -> None:
    """Add the outputs that a step was given to its result."""
    state.scalars[_STEPS] = list(_steps_of(given))
    kept = {name: x for name, x in given.tensors.items() if name.partition(":")[0] in KEPT_OUTPUTS}
    state.tensors |= kept


def can_extrapolate(given: Fields) -> bool:
    """Whether two steps left outputs of equal shapes."""
    older, newer = _outputs_of(given, 0), _outputs_of(given, 1)
    return bool(older) and [x.shape for x in older] == [x.shape for x in newer]


def extrapolated(given: Fields, *, step: int) -> list[Tensor]:
    """The outputs of a step on the lines through the last two computed ones."""
    (first, second), found = _steps_of(given), []
    weight = (step - second) / (second - first)
    for one, other in zip(_outputs_of(given, 0), _outputs_of(given, 1), strict=True):
        start, end = one.float(), other.float()
        found.append((end + (end - start) * weight).to(one.dtype))
    return found


def _steps_of(given: Fields) -> list[int]:
    steps = given.scalars.get(_STEPS, _NO_STEPS)
    assert isinstance(steps, list)
    return [int(step) for step in steps]


def _outputs_of(given: Fields, slot: int) -> list[Tensor]:
    own = {name: x for name, x in given.tensors.items() if name.partition(":")[0] == KEPT_OUTPUTS[slot]}
    return [own[_name(slot, number)] for number in range(len(own))]


def _name(slot: int, number: int) -> str:
    """A step has several outputs if its pipeline has several schedulers."""
    return KEPT_OUTPUTS[slot] + (f":{number}" if number else "")
