"""Calls that take turns at the streamed blocks of a transformer, so that they share each block's read.

    predictions = in_turns([conditional, unconditional])

A hook of each streamed block calls `pause` before the block computes. Each call then waits until the others
have come to the same block, or have ended: one read serves all of them. They run one at a time and in their
order, so every rank of a layout launches the same kernels and exchanges in the same order. Each launches what
it launches alone, so the bits are the same. Calls may take turns within a call, in one order for all.

Every call is a greenlet, all of them on one thread: libraries keep handles and plans of kernels by thread,
and cuDNN takes some 30 ms for that of an attention. A forward keeps what its blocks need in a `CallLocal`.
Context variables are inherited by a copy: what is active around `in_turns` is active in its calls, and what a
call enters is its own.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from greenlet import getcurrent, greenlet
from torch.backends import cuda

from gfgen.models.parallel import cudnn_attention

T = TypeVar("T")


def in_turns(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What the calls return. They run interleaved if there are several.

    Raises: the first exception of a call, when the others have been stopped and have left.
    """
    if len(calls) < 2:
        return [call() for call in calls]
    outer = _CALL.get()
    cudnn_attention.kept()  # what this thread keeps is found by all calls
    entered = [_Call(call, place) for place, call in enumerate(calls)]
    try:
        for each in entered:
            each.resume()
        while waiting := [each for each in entered if not each.has_ended]:
            block = waiting[0].block
            is_last = True if outer is None else outer.pause(block)
            sharing = [each for each in waiting if each.block == block]
            for each in sharing:
                each.resume(is_last=is_last and each is sharing[-1])
    finally:
        for each in entered:
            each.stop()
    return [each.result for each in entered]


def pause(block: object = None) -> bool:
    """Let the other calls come to this block; whether the caller is the last one that needs it now.

    Calls at other blocks wait: those at the block of the first call go on together. A lone call never waits.
    """
    call = _CALL.get()
    return True if call is None else call.pause(block)


def present_place() -> int:
    """The number of the present call among those that take turns; 0 for one alone."""
    call = _CALL.get()
    return 0 if call is None else call.place


class CallLocal:
    """Variables of each call, and of each thread outside of calls."""

    def __init__(self) -> None:
        vars(self)["_values"] = WeakKeyDictionary[greenlet, dict[str, Any]]()

    def __setattr__(self, name: str, value: Any) -> None:
        self._values.setdefault(getcurrent(), {})[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[getcurrent()][name]
        except KeyError:
            raise AttributeError(name) from None


class _StoppedError(BaseException):
    """Another call has raised, so this one is of no use. No handler of exceptions may keep it."""


class _Call(Generic[T]):
    """A call that runs only inside `resume` and `stop`."""

    result: T

    def __init__(self, function: Callable[[], T], place: int) -> None:
        self.place = place
        self.block: object = None
        """Where it waits."""
        self._is_last = self._is_stopped = False
        self._function = function
        self._greenlet = greenlet(self._run)
        self._greenlet.gr_context = contextvars.copy_context()
        self._generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._states = [each.get_state() for each in self._generators]
        self._switches = [is_enabled() for is_enabled, _ in _SWITCHES]

    @property
    def has_ended(self) -> bool:
        return bool(self._greenlet.dead)

    def resume(self, *, is_last: bool = False) -> None:
        """Run until it comes to a block, or ends. Raises: what the call raises."""
        self._is_last = is_last
        self._exchange_states()
        try:
            self._greenlet.switch()
        finally:
            self._exchange_states()

    def stop(self) -> None:
        """Let it leave, if it has not ended."""
        self._is_stopped = True
        while self._greenlet:
            with contextlib.suppress(_StoppedError, Exception):
                self.resume()

    def pause(self, block: object) -> bool:
        """Let the caller of `resume` go on."""
        if not self._is_stopped:
            self.block = block
            self._greenlet.parent.switch()
        if self._is_stopped:
            raise _StoppedError
        return self._is_last

    def _exchange_states(self) -> None:
        """Each call has states of PyTorch's own generators, from which some pipelines draw, its mode, and a
        choice of attentions (`sdpa_kernel`)."""
        for idx, generator in enumerate(self._generators):
            state, self._states[idx] = self._states[idx], generator.get_state()
            generator.set_state(state)
        for idx, (is_enabled, enable) in enumerate(_SWITCHES):
            own, self._switches[idx] = self._switches[idx], is_enabled()
            if own != self._switches[idx]:
                enable(own)

    def _run(self) -> None:
        _CALL.set(self)
        self.result = self._function()


_SWITCHES = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
_CALL: ContextVar[_Call[Any] | None] = ContextVar("call", default=None)
