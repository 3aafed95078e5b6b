"""What a rank does besides tasks: warm-ups before a run and between tasks, and changes of its models."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from gfgen.errors import REFUSALS, JobError, ModelError
from gfgen.runtime.ipc import messages
from gfgen.runtime.ipc.messages import Channel
from gfgen.runtime.worker.device import Device
from gfgen.runtime.worker.dispatches import AFTER_ALL, Dispatches, InputVoidError

logger = logging.getLogger(__name__)

_OVER = object()


class Preparation:
    """Prepares tasks and models on a worker's main thread, which runs no task meanwhile."""

    def __init__(self, channel: Channel, rank: int, device: Device, dispatches: Dispatches) -> None:
        self.later: deque[Iterator[None]] = deque()  # what is prepared when no task is here, in parts
        self._channel = channel
        self._rank = rank
        self._device = device
        self._dispatches = dispatches

    def warm_up(self, message: messages.WarmUp, fds: Sequence[int]) -> None:
        """Prepare tasks before a run; report a failure and continue."""
        began_s = time.monotonic()
        with self._failing_softly() as failure, torch.no_grad():
            for _ in self._device.warm_up(message):
                pass
        reason = reason_of(failure[0]) if failure else None
        self._channel.send(messages.WarmedUp(message.number, time.monotonic() - began_s, reason))

    def warm_up_later(self, message: messages.WarmUpLater, fds: Sequence[int]) -> None:
        self.later.extend(map(self._device.warm_up, message.items))

    def go_on(self) -> None:
        """Prepare a part of what comes next; what fails is left to its tasks."""
        is_over = True
        with self._failing_softly() as failure, torch.no_grad():
            is_over = next(self.later[0], _OVER) is _OVER
        if failure:
            logger.debug("a part of the warm-up failed: %s", reason_of(failure[0]))
        if is_over:
            self.later.popleft()

    @contextlib.contextmanager
    def _failing_softly(self) -> Iterator[list[Exception]]:
        """Inside, an exception is added to the list instead of raised; the device is done at the end."""
        failure: list[Exception] = []
        try:
            yield failure
        except Exception as error:
            self._device.exit_if_lost(error)
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            failure.append(error)
        self._device.drain()

    def set_models(self, message: messages.SetModels, fds: Sequence[int]) -> None:
        """Hold other models; a process that cannot ends with its reason."""
        with contextlib.suppress(InputVoidError):  # the control plane is gone
            self._dispatches.await_clear(AFTER_ALL, may_block=True)
            started_s = time.monotonic()
            self.later.clear()
            device, copied = self._device, list[str]()
            try:
                device.release(message.checkpoints, kept=message.kept)
                for path in message.checkpoints:
                    if path not in device.adapters:
                        self._channel.send(messages.Loading(path))
                        copied += [path] if device.load(path) else []
                device.drain()
            except Exception as error:
                resign(self._channel, self._rank, error)
            load_s = time.monotonic() - started_s
            self._channel.send(messages.ModelsSet(load_s, device.read_bytes_per_s, tuple(copied)))


def resign(channel: Channel, rank: int, error: Exception) -> NoReturn:
    """Report why this process cannot work, and end it."""
    if isinstance(error, ConnectionError):
        raise error
    logger.debug("rank %d cannot work", rank, exc_info=error)
    channel.send(messages.WorkerFailed(rank, reason_of(error)))
    sys.stderr.flush()
    os._exit(1)


def reason_of(error: BaseException) -> str:
    """One line with the exception, or its kind of REFUSALS, and its place; what users can mend has none."""
    text = " ".join(str(error).split())[:500] or "no message"
    if isinstance(error, JobError | ModelError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    kind = next((kind for kind in REFUSALS if isinstance(error, kind)), type(error))
    return f"{kind.__name__}: {text}{place}"
