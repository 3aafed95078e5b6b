"""What `gfgen serve` adds to the control loop: turn timing, and a chooser that follows policy changes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gfgen.runtime.control.control import Backend
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.ipc.messages import MemoryUse
from gfgen.runtime.predict.choosers import ThreadedChooser
from gfgen.snapshot import Choice, Choose, Snapshot


class LoopTimer:
    """A backend that notes how long the loop stays away between two waits, and comes back late from one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._left_s: float | None = None
        self._longest_s = 0.0
        self._num_turns = 0

    def take(self) -> tuple[float, int]:
        """(the longest turn in seconds, number of turns) since the last call."""
        taken = (self._longest_s, self._num_turns)
        self._longest_s, self._num_turns = 0.0, 0
        return taken

    def wait(self, until: float | None) -> Sequence[Event]:
        now_s = time.perf_counter()
        if self._left_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._left_s)
            self._num_turns += 1
        events = self._backend.wait(until)
        self._left_s = time.perf_counter()
        return events

    def submit(self, dispatch: Dispatch) -> None:
        self._backend.submit(dispatch)

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        self._backend.stop(dispatches)

    def release(self, job_id: str) -> None:
        self._backend.release(job_id)

    def add(self, jobs: Sequence[AdmittedJob]) -> None:
        self._backend.add(jobs)

    def load(self, models: Mapping[str, Path], *, load_s: float) -> None:
        self._backend.load(models, load_s=load_s)

    def save(self, job_id: str, *, next_index: int, producer: int) -> None:
        self._backend.save(job_id, next_index=next_index, producer=producer)

    def memory_use(self) -> Mapping[int, MemoryUse]:
        return self._backend.memory_use()


class SwitchableChooser:
    """Thinks under policies that hand over to others (`auto`), and does nothing under the rest."""

    def __init__(self, choose: Choose | None) -> None:
        self._inner: ThreadedChooser | None = None
        self.follow(choose)

    def follow(self, choose: Choose | None) -> None:
        """From now on this one chooses, or nobody."""
        if self._inner is not None:
            self._inner.abandon()
        self._inner = None if choose is None else ThreadedChooser(choose)

    def consider(self, snapshot: Snapshot) -> None:
        if self._inner is not None:
            self._inner.consider(snapshot)

    def take(self) -> Choice | None:
        return None if self._inner is None else self._inner.take()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
