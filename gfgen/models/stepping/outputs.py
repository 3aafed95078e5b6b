"""What a pipeline hands to its scheduler in a step: catch it, or replace it.

A transformer's guided output is the first argument of a scheduler's `step`, whatever the pipeline did to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from gfgen.errors import ModelError

Exchange = Callable[[Tensor], Tensor]
# Per context and so per thread: ranks may be threads with schedulers of one class.
_EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
_NAME = "model_output"


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
            if _NAME in kwargs:
                kwargs[_NAME] = exchange(kwargs[_NAME])
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
