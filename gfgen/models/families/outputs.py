"""The last computed outputs of a job's transformer, as part of its latents, and what follows from them.

A transformer's guided output is the first argument of a scheduler's `step`, whatever a pipeline did to it. So
outputs of any pipeline are caught, or replaced, on their way to its scheduler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from gfgen.errors import ModelError
from gfgen.models.families.adapter import Fields
from gfgen.models.geometry.reuse import KEPT_OUTPUTS

_STEPS = "reuse_steps"
"""A scalar of latents: the steps of KEPT_OUTPUTS, -1 for none."""
_NO_STEPS = [-1] * len(KEPT_OUTPUTS)
Exchange = Callable[[Tensor], Tensor]
# Per context and so per thread: ranks may be threads with schedulers of one class.
_EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
_ARGUMENT = "model_output"


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


def watch_scheduler(scheduler: Any) -> None:
    """Let `catching` and `giving` see the steps of all schedulers of a class, permanently.

    Of the class, because pipelines copy their schedulers.
    """
    kind = type(scheduler)
    step = kind.step
    if hasattr(step, "__wrapped_by_gfgen__"):
        return

    @functools.wraps(step)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = _EXCHANGE.get()
        if exchange is None:
            return step(self, *args, **kwargs)
        with _exchanging(None):  # a step may call that of its base class
            if _ARGUMENT in kwargs:
                kwargs[_ARGUMENT] = exchange(kwargs[_ARGUMENT])
            else:
                args = (exchange(args[0]), *args[1:])
            return step(self, *args, **kwargs)

    watched.__wrapped_by_gfgen__ = True  # type: ignore[attr-defined]
    kind.step = watched


@contextmanager
def catching(caught: list[Tensor]) -> Iterator[None]:
    """Inside, append copies of the outputs that schedulers get."""

    def catch(output: Tensor) -> Tensor:
        caught.append(output.clone())
        return output

    with _exchanging(catch):
        yield


@contextmanager
def giving(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Inside, schedulers get these outputs, one for each of their steps.

    Raises: ModelError if there are fewer or more steps.
    """
    left = list(outputs)

    def give(output: Tensor) -> Tensor:
        if not left:
            raise ModelError(f"reuse: a step has more than {len(outputs)} outputs; leave reuse out")
        return left.pop(0)

    with _exchanging(give):
        yield
    if left:
        raise ModelError(f"reuse: a step has fewer than {len(outputs)} outputs; leave reuse out")


@contextmanager
def _exchanging(exchange: Exchange | None) -> Iterator[None]:
    token = _EXCHANGE.set(exchange)
    try:
        yield
    finally:
        _EXCHANGE.reset(token)
