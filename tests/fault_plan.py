"""What goes wrong in a schedule of faults: which fault, where, on which rank, how often.

A plan lies in a folder, where every process of the run reads it. A fault that is done leaves
a file there, made before it is done: a process that dies forgets, its successor must not.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path


class FaultKind(StrEnum):
    """What a process does to itself."""

    KILL = "kill"
    """SIGKILL, as the kernel does when memory is short."""
    STOP = "stop"
    """SIGSTOP: alive, and silent."""
    EXIT = "exit"
    RAISE = "raise"
    HANG = "hang"
    """The thread never goes on; the others do, pings are answered."""
    MUTE = "mute"
    """The task ends and its report is forgotten."""
    DELAY = "delay"
    """No fault: lets others overtake."""


class FaultPoint(StrEnum):
    """Where it does it."""

    LOADING = "loading"
    RECEIVING = "receiving"
    """In the receiver's thread, so that pings are not answered either."""
    BEFORE = "before the task"
    WAITING = "waiting for input"
    MEETING = "among the other ranks"
    SENDING = "sending state"
    PUBLISHED = "before the report"
    BETWEEN = "between tasks"
    WRITING = "before the file"
    WRITTEN = "after the file"


_EVERY = (
    FaultKind.KILL,
    FaultKind.EXIT,
    FaultKind.RAISE,
    FaultKind.STOP,
    FaultKind.HANG,
    FaultKind.DELAY,
)
KINDS = {
    FaultPoint.LOADING: (FaultKind.KILL, FaultKind.EXIT, FaultKind.RAISE, FaultKind.STOP),
    FaultPoint.RECEIVING: (FaultKind.KILL, FaultKind.HANG, FaultKind.DELAY),
    FaultPoint.BEFORE: _EVERY,
    FaultPoint.WAITING: _EVERY,
    FaultPoint.MEETING: _EVERY,
    FaultPoint.SENDING: (FaultKind.KILL, FaultKind.EXIT, FaultKind.STOP, FaultKind.HANG, FaultKind.DELAY),
    FaultPoint.PUBLISHED: (
        FaultKind.KILL,
        FaultKind.EXIT,
        FaultKind.RAISE,
        FaultKind.STOP,
        FaultKind.HANG,
        FaultKind.MUTE,
        FaultKind.DELAY,
    ),
    FaultPoint.BETWEEN: (FaultKind.KILL, FaultKind.EXIT, FaultKind.STOP, FaultKind.DELAY),
    FaultPoint.WRITING: (FaultKind.KILL, FaultKind.EXIT, FaultKind.RAISE, FaultKind.STOP, FaultKind.DELAY),
    FaultPoint.WRITTEN: (FaultKind.KILL, FaultKind.EXIT, FaultKind.STOP, FaultKind.DELAY),
}
"""What can go wrong where."""
_DELAY_S = 0.03
"""Several tasks of others."""
SLOW_KINDS = (FaultKind.STOP, FaultKind.HANG, FaultKind.MUTE)
"""Noticed by silence or slowness alone, and so the dear ones in a test."""


class ScriptedError(Exception):
    """Raised because the plan says so."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Done at the point's visits `after` + 1 to `after` + `times`, counted over those that match.

    None matches every rank, job or task. Visits are counted by each process from its start.
    """

    kind: FaultKind
    point: FaultPoint
    rank: int | None = None
    job_id: str | None = None
    index: int | None = None
    after: int = 0
    times: int = 1

    def matches(self, point: FaultPoint, *, rank: int | None, job_id: str | None, index: int | None) -> bool:
        wanted = (self.rank, self.job_id, self.index)
        there = (rank, job_id, index)
        return point is self.point and all(w in (None, t) for w, t in zip(wanted, there, strict=True))


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was done, and to whom."""

    kind: FaultKind
    point: FaultPoint
    rank: int | None
    job_id: str | None
    index: int | None


class FaultFolder:
    """The plan in force and what was done of it; made by the harness, read by all processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, plan: Sequence[Fault]) -> None:
        """Put a plan in force; nothing of it is done yet."""
        self._put(plan)
        for path in self._folder.iterdir():
            if path.name != "plan":
                path.unlink()

    def disarm(self, point: FaultPoint) -> None:
        """Nothing more happens at this point."""
        self._put([replace(fault, times=0) if fault.point is point else fault for fault in self.plan()])

    def _put(self, plan: Sequence[Fault]) -> None:
        partial = self._folder / "plan.partial"
        partial.write_bytes(pickle.dumps(tuple(plan)))
        partial.rename(self._folder / "plan")

    def plan(self) -> tuple[Fault, ...]:
        return tuple(pickle.loads((self._folder / "plan").read_bytes()))

    def done(self) -> list[Done]:
        """What was done so far."""
        return [pickle.loads(path.read_bytes()) for path in sorted(self._folder.glob("done.*.whole"))]

    def claim(self, idx: int, fault: Fault, done: Done) -> bool:
        """Whether it is to be done once more; then that is noted, for all processes."""
        for count in range(fault.times):
            path = self._folder / f"done.{idx}.{count}"
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            partial = path.with_name(f"{path.name}.partial")
            partial.write_bytes(pickle.dumps(done))
            partial.rename(path.with_name(f"{path.name}.whole"))
            return True
        return False

    def complain(self, text: str) -> None:
        """Note that a promise of the runtime was broken."""
        with (self._folder / "complaints").open("a") as file:
            file.write(f"{text}\n")

    def complaints(self) -> list[str]:
        path = self._folder / "complaints"
        return path.read_text().splitlines() if path.exists() else []


class Faults:
    """One process's share in a plan."""

    def __init__(self, folder: FaultFolder, *, rank: int | None) -> None:
        self.folder = folder
        self._rank = rank
        self._visits: Counter[int] = Counter()
        self._plan: tuple[Fault, ...] = ()
        self.renew()

    def renew(self) -> None:
        """Read the plan that is in force now."""
        self._plan = self.folder.plan()
        self._visits.clear()

    def visit(
        self, point: FaultPoint, *, job_id: str | None = None, index: int | None = None
    ) -> FaultKind | None:
        """Do what the plan has for this point; returns what the caller has to do itself."""
        for idx, fault in enumerate(self._plan):
            if not fault.matches(point, rank=self._rank, job_id=job_id, index=index):
                continue
            self._visits[idx] += 1
            done = Done(fault.kind, point, self._rank, job_id, index)
            if self._visits[idx] > fault.after and self.folder.claim(idx, fault, done):
                return _do(fault.kind)
        return None


def _do(kind: FaultKind) -> FaultKind:
    match kind:
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultKind.EXIT:
            os._exit(7)
        case FaultKind.RAISE:
            raise ScriptedError("as the plan says")
        case FaultKind.HANG:
            while True:
                time.sleep(60)
        case FaultKind.DELAY:
            time.sleep(_DELAY_S)
        case FaultKind.MUTE:
            pass
    return kind
