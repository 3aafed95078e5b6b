"""Messages between the run and the front, and the socket that carries them.

The run (control loop, ranks, signals) and the front (HTTP, job store) are two processes, so a request cannot
delay the loop and a front that dies costs no step. Both run on one machine with the same version of gfgen;
messages are pickled values, each preceded by its length.

    the front starts            run -> front   FrontSettings
    models loaded, ranks up     run -> front   RunInfo
                                front -> run   SubmitJobs for the open jobs of the store; then OpenJobIds
    from then on                run -> front   lists of notes: events, dispatches, outcomes, progress
                                front -> run   SubmitJobs, CancelJobs, OutcomesStored; events that change
                                               a priority or the policy

A new front gets the whole state as the same notes. The run repeats an outcome to each new front until
OutcomesStored confirms it.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gfgen.errors import Problem
from gfgen.job.recipes import Recipes
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import RankState
from gfgen.server.protocol.limits import ApiOptions, NamedKey, ServerLimits
from gfgen.server.protocol.server_schemas import ServedModel

Admit = Callable[[Sequence[JobSpec]], tuple[Sequence[AdmittedJob], Sequence[Problem]]]

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size


# From the run to the front ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontSettings:
    output_dir: Path
    api_key: str | None
    limits: ServerLimits
    version: str
    api: ApiOptions = field(default_factory=ApiOptions)
    log_level: str = "info"
    log_json: bool = False
    log_file: Path | None = None
    commit: str = ""
    keys: Mapping[str, NamedKey] = field(default_factory=dict)
    """Named keys, each of which sees its own jobs; `api_key` sees all."""
    recipes: Recipes = field(default_factory=dict)
    """A user's own, which jobs can name."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The ranks are up; the server accepts jobs from now on."""

    admit: Admit
    admit_again: Admit
    """For jobs that were accepted earlier: ignores temporary shortages."""
    models: tuple[ServedModel, ...]
    device: str
    num_ranks: int
    policy: str
    """As requested on the command line."""
    started_at: float
    """Unix time of second 0 of the run."""
    began_s: float | None = None
    """The machine's monotonic clock at that second."""


@dataclass(frozen=True, slots=True)
class NodeRanks:
    node: str
    ranks: range


@dataclass(frozen=True, slots=True)
class NodeGone:
    node: str


@dataclass(frozen=True, slots=True)
class RankStates:
    """What a new front is told about the ranks, before their dispatches."""

    states: tuple[RankState, ...]


JobProgress = tuple[str, int, float, float, Layout | None]
"""Of an open job: id, next task, predicted work left on one rank and time to write its file, last layout."""


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """What has changed since the last one."""

    rows: tuple[JobProgress, ...] = ()
    ends: tuple[tuple[int, float], ...] = ()
    """Dispatch and predicted end, in seconds of the run, of running tasks."""
    longest_turn_s: float = 0.0
    num_turns: int = 0
    """Of the control loop."""


# From the front to the run ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitJobs:
    """A few accepted jobs: reading a message takes time from the control loop."""

    jobs: tuple[AdmittedJob, ...]


@dataclass(frozen=True, slots=True)
class OpenJobIds:
    """The ids of all open jobs of the store; all of them were submitted."""

    job_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CancelJobs:
    job_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OutcomesStored:
    job_ids: tuple[str, ...]


# The socket ---------------------------------------------------------------------------------------


def pack(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


def message_bytes(header: bytes) -> int:
    """Size of the message that follows a header of HEADER_BYTES."""
    (size,) = _HEADER.unpack(header)
    return int(size)


class MessageSocket:
    """The run's end of the socket; one thread sends, another receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Any) -> None:
        """Blocks until there is room; raises OSError if the other end is closed."""
        self._socket.sendall(pack(message))

    def receive(self) -> Any | None:
        """The next message; None if the other end is closed."""
        try:
            return pickle.loads(self._exactly(message_bytes(self._exactly(HEADER_BYTES))))
        except (OSError, EOFError):
            return None

    def _exactly(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            if not (piece := self._socket.recv(size - len(content))):
                raise EOFError
            content += piece
        return bytes(content)

    def close(self) -> None:
        """Close both directions; wakes threads that wait in them."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
