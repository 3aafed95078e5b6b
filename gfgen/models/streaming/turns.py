"""Calls that take turns at the streamed blocks of a transformer, so that they share each block's read.

    predictions = in_turns([conditional, unconditional])

A hook of each streamed block calls `pause` before the block computes. Each call then waits until the others
have come to the same block, or have ended: one read serves all of them. They run one at a time and in their
order, so every rank of a layout launches the same kernels and exchanges in the same order. Each launches what
it launches alone, so the bits are the same. Calls may take turns within a call, in one order for all.

Every call has a thread. A forward keeps what its blocks need in variables of its thread (fused.py,
linears.py, compiled.py), and two forwards of one thread would mix them up. Context variables are inherited
by a copy: what is active around `in_turns` is active in its calls, and what a call enters is its own.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

from gfgen.gfc.cuda.driver import driver
from gfgen.models.parallel import cudnn_attention

T = TypeVar("T")


def streams(transformer: Any) -> bool:
    """Whether blocks of a transformer are read for each forward, so that forwards should take turns."""
    return bool(getattr(transformer, "streams", False))


def in_turns(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What the calls return. They run interleaved if there are several.

    Raises: the first exception of a call, when the others have been stopped and have left.
    """
    if len(calls) < 2:
        return [call() for call in calls]
    outer = _CALL.get()
    cudnn_attention.kept()  # what this thread keeps is found by all calls
    entered: list[_Call[T]] = []
    try:
        for place, call in enumerate(calls):
            entered.append(_Call(call, place))
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


class _StoppedError(BaseException):
    """Another call has raised, so this one is of no use. No handler of exceptions may keep it."""


class _Call(Generic[T]):
    """A call on a thread that runs only inside `resume` and `stop`."""

    result: T

    def __init__(self, function: Callable[[], T], place: int) -> None:
        self.place = place
        self.block: object = None
        """Where it waits."""
        self.has_ended = False
        self._error: BaseException | None = None
        self._is_last = self._is_running = self._is_stopped = False
        self._function = function
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._num_threads = torch.get_num_threads()  # rounding depends on it
        self._stream, self._generators = None, [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.current_stream()
            self._generators.append(torch.cuda.default_generators[self._stream.device_index])
        self._states = [each.get_state() for each in self._generators]
        self._may_run, self._has_paused = threading.Lock(), threading.Lock()
        self._may_run.acquire()
        self._has_paused.acquire()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=[self._run], name=f"turn {place}", daemon=True)
        self._thread.start()

    def resume(self, *, is_last: bool = False) -> None:
        """Run until it comes to a block, or ends. Raises: what the call raises."""
        self._is_last = is_last
        self._switch()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let it leave, if it has not ended."""
        if self._is_running:  # the caller was interrupted
            self._has_paused.acquire()
        if not self.has_ended:
            self._is_stopped = True
            self._switch()
        self._thread.join()

    def pause(self, block: object) -> bool:
        """On its thread: let the caller of `resume` go on."""
        if not self._is_stopped:
            self.block = block
            self._has_paused.release()
            self._may_run.acquire()
        if self._is_stopped:
            raise _StoppedError
        return self._is_last

    def _switch(self) -> None:
        self._exchange_states()
        self._is_running = True
        self._may_run.release()
        self._has_paused.acquire()
        self._is_running = False
        self._exchange_states()

    def _exchange_states(self) -> None:
        """PyTorch's own generators, from which some pipelines draw, have states of their own in each call."""
        for idx, generator in enumerate(self._generators):
            state, self._states[idx] = self._states[idx], generator.get_state()
            generator.set_state(state)

    def _run(self) -> None:
        _CALL.set(self)
        self._may_run.acquire()
        try:
            if not self._is_stopped:
                torch.set_num_threads(self._num_threads)
                if self._stream is not None:  # as GpuDevice.use
                    driver().use(self._stream.device_index)
                    torch.cuda.set_stream(self._stream)
                with torch.inference_mode(self._modes[0]), torch.set_grad_enabled(self._modes[1]):
                    self.result = self._function()
        except _StoppedError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.has_ended = True
            self._has_paused.release()


_CALL: ContextVar[_Call[Any] | None] = ContextVar("call", default=None)
