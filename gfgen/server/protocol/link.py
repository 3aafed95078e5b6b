"""What the run and the front tell each other, and the socket between them.

The run (control loop, ranks, signals) is one process, the front (HTTP, the store of jobs) another: so no
request can hold up the loop, and a front that dies costs no step. Both are of one machine and one
version of gfgen; messages are pickled values, framed by their length.

    the front starts            run -> front   Settings
    models loaded, ranks up     run -> front   Serving
                                front -> run   Submit: the jobs of the store that are open; then Hello
    from then on                run -> front   lists of notes: events, dispatches, outcomes, rows
                                front -> run   Submit, Cancel, SetPolicy, Noted

A front that is started anew is told where everything stands by the same notes. An outcome is told until the
front has noted it in the store.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfgen.errors import Problem
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.server.protocol.limits import ServerLimits
from gfgen.server.protocol.schemas import ServedModel

Admit = Callable[[Sequence[JobSpec]], tuple[Sequence[AdmittedJob], Sequence[Problem]]]

_HEADER = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16


# From the run to the front ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """What a front needs before anything is loaded."""

    output_dir: Path
    api_key: str | None
    is_loopback: bool
    """Only this machine can connect: then a name that leads here from elsewhere is refused."""
    limits: ServerLimits
    version: str
    log_level: str = "info"
    log_json: bool = False
    log_file: Path | None = None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The ranks are up: from now on jobs are taken."""

    admit: Admit
    """For jobs that are asked for."""
    admit_again: Admit
    """For jobs that were accepted before: what is short in this moment alone is no reason against them."""
    models: tuple[ServedModel, ...]
    device: str
    num_ranks: int
    policy: str
    """As asked for."""
    started_at: float
    """Unix time of the run's second 0."""


JobProgress = tuple[str, int, float, Layout | None]
"""Where an open job stands: its id, next task, predicted work on one rank, and last layout."""


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """The open jobs that stand elsewhere than they were last said to."""

    rows: tuple[JobProgress, ...]


@dataclass(frozen=True, slots=True)
class PredictedEnds:
    """(dispatch, predicted end in seconds of the run) of running tasks whose prediction has been renewed."""

    ends: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class LoopTimings:
    """How long the turns of the control loop took since this was told last."""

    longest_s: float
    num_turns: int


# From the front to the run ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitJobs:
    """Jobs that were accepted: a few, since reading a message keeps the loop from its work."""

    jobs: tuple[AdmittedJob, ...]


@dataclass(frozen=True, slots=True)
class OpenJobs:
    """All that the store has open was submitted; these are the ids."""

    job_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CancelJobs:
    job_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetPolicy:
    policy: str


@dataclass(frozen=True, slots=True)
class OutcomesStored:
    """How these jobs have ended is in the store."""

    job_ids: tuple[str, ...]


# The socket ---------------------------------------------------------------------------------------


def pack(message: Any) -> bytes:
    """One message as it goes through the socket."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class MessageDecoder:
    """Bytes as they come, to messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, content: bytes) -> list[Any]:
        """The messages that are complete now."""
        self._pending += content
        messages = []
        while len(self._pending) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._pending)
            end = _HEADER.size + length
            if len(self._pending) < end:
                break
            messages.append(pickle.loads(bytes(self._pending[_HEADER.size : end])))
            del self._pending[:end]
        return messages


class MessageSocket:
    """The run's end, for threads: one sends, another receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._framing = MessageDecoder()

    def send(self, message: Any) -> None:
        """Send a message; waits while the other end does not read.

        Raises: OSError when the other end is gone.
        """
        self._socket.sendall(pack(message))

    def receive(self) -> list[Any]:
        """The next messages; empty when the other end is gone."""
        while True:
            try:
                content = self._socket.recv(_CHUNK_BYTES)
            except OSError:
                return []
            if not content:
                return []
            if messages := self._framing.feed(content):
                return messages

    def close(self) -> None:
        """Let both directions end, whoever is waiting in them."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
