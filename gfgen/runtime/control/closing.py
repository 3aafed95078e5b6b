"""Closing time and disk room: when a run is to stop by itself, and which jobs no longer fit."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gfgen.errors import InterruptedRunError, OutputError
from gfgen.graph import Stage, Task
from gfgen.layout import ALONE, Degrees
from gfgen.runtime.control.job_record import JobRecord
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import ClosingTime, Event, SpaceLeft
from gfgen.runtime.core.openjobs import JobKind, OpenJobs, kind_of
from gfgen.runtime.files.resume import RunStart, resume_path
from gfgen.runtime.predict.cost import CostClass, CostModel
from gfgen.snapshot import JobView
from gfgen.system.machine import free_bytes
from gfgen.system.wording import counted, size_in_words

logger = logging.getLogger(__name__)

CAUTION = 1.1
SPACE_S = 2.0  # between two looks at the room on the disk
_FIRST_TASK = Task("", 0, Stage.ENCODE)  # of any job: predictions depend on its index alone


def check_room(jobs: Sequence[AdmittedJob], output_dir: Path) -> None:
    """Raises OutputError if no job could begin for lack of room; one that was stopped may go on."""
    sizes, left_bytes = [job.file_bytes for job in jobs], free_bytes(output_dir)
    if min(sizes) > left_bytes and not any(resume_path(output_dir, job.job_id).exists() for job in jobs):
        raise OutputError(f"{_lack(sizes, left_bytes)}, then run the same command again")


def _lack(sizes: Sequence[int], left_bytes: int) -> str:
    return (
        f"the disk of the output folder has {size_in_words(max(0, left_bytes))} left for the files of "
        f"{counted(len(sizes), 'job')}, which may take {size_in_words(sum(sizes))}: "
        f"{size_in_words(sum(sizes) - left_bytes)} is missing; make room"
    )


class Room:
    """What the disk of the output folder has left for the files of jobs that have not begun."""

    def __init__(self, records: Mapping[str, JobRecord]) -> None:
        self._records = records
        self.left_bytes = math.inf
        self.next_look_s = 0.0

    @property
    def is_short(self) -> bool:
        """Whether a file of a job that has not begun lacks room."""
        return max(self._sizes(begun=False), default=0) > self.left_bytes

    @property
    def lack(self) -> str:
        """What the jobs lack that have not begun."""
        return _lack(self._sizes(begun=False), int(self.left_bytes))

    def look(self, free_bytes: Callable[[], int], *, now_s: float) -> SpaceLeft | None:
        """What is free on the disk, if that is to be noted: while it may not hold the files of all jobs."""
        if now_s < self.next_look_s:
            return None
        self.next_look_s, found = now_s + SPACE_S, free_bytes()
        holds_all = found >= sum(record.file_bytes for record in self._records.values())
        return None if holds_all and self.left_bytes == math.inf else SpaceLeft(now_s, found)

    def left_of(self, free_bytes: int) -> int:
        return free_bytes - sum(self._sizes(begun=True))

    def _sizes(self, *, begun: bool) -> list[int]:
        records = self._records.values()
        return [each.file_bytes for each in records if (each.progress.next_index > 0) is begun]


class Closing:
    """When and why a run stops before all jobs have ended, and which jobs may still begin before it closes.

    A prediction counts once a denoising step of the model was measured: until then jobs begin
    as if they fitted, since what has begun is not lost, and a wrong guess could waste the night.
    """

    def __init__(self, start: RunStart, costs: CostModel, records: Mapping[str, JobRecord]) -> None:
        self.closes_s = math.inf if start.closes_s is None else start.closes_s
        self.grace_s = start.grace_s
        self.stop_signal: int | None = None
        self.is_stopping = False  # nothing new is dispatched; what runs is left to end
        self.room = Room(records)
        self._records = records
        self._costs = costs
        self._degrees: dict[str, Degrees] = {}  # by model: of the last step

    def stop(self, signal_number: int) -> None:
        """The first signal lets running tasks end; InterruptedRunError at the second one."""
        if self.stop_signal is not None:
            raise InterruptedRunError("stopped at once; finished jobs are kept", signal_number=signal_number)
        self.stop_signal, self.is_stopping = signal_number, True
        again = "press again" if signal_number == signal.SIGINT else "a second signal"
        if self._records and self.grace_s > 0:
            logger.warning("stopping after the running tasks; %s to stop at once", again)

    def note(self, cost_class: CostClass, degrees: Degrees) -> None:
        """Predict the steps of the next jobs of this model with these degrees."""
        self._degrees[cost_class.model] = degrees

    def going_on(self, jobs: OpenJobs, *, now_s: float) -> dict[str, JobView]:
        """The open jobs that may go on: begun ones, and those with time and room for their files."""
        views, left_bytes, late = jobs.frozen(), self.room.left_bytes, set[JobKind]()
        if self.closes_s < math.inf:
            late = {kind for kind in jobs.unbegun_kinds if self._is_late(*kind, now_s=now_s)}
        if not late and left_bytes == math.inf:  # nearly always: looking at each job would be slow
            return views
        return {
            job_id: view
            for job_id, view in views.items()
            if self._records[job_id].progress.next_index > 0
            or (kind_of(view) not in late and self._records[job_id].file_bytes <= left_bytes)
        }

    def end_early(self, *, free_bytes: int, now_s: float) -> Event:
        """The end of a run in which no job that is left may begin, or that there is room again for a file.

        Raises: OutputError if a file lacks room.
        """
        if not self.room.is_short:
            logger.info("no job that is left can be done by closing time: the run ends now")
            return ClosingTime(now_s)
        if self.room.left_of(free_bytes) <= self.room.left_bytes:
            raise OutputError(f"{self.room.lack}, then run the same command again")
        return SpaceLeft(now_s, free_bytes)

    def _is_late(self, model: str, kind: str, num_tasks: int, num_approximate: int, *, now_s: float) -> bool:
        cost_class = self._costs.classes[model, kind]
        if not self._costs.is_measured(cost_class):
            return False
        degrees = self._degrees.get(cost_class.model, ALONE)
        remaining_s = self._costs.remaining_s(
            cost_class, _FIRST_TASK, num_tasks, degrees, num_approximate=num_approximate
        )
        # A job ends with those that share its steps.
        return now_s + CAUTION * remaining_s * cost_class.num_sharers > self.closes_s

    def check(self) -> None:
        assert self.is_stopping or self.stop_signal is None, "a signal has come, and the run goes on"
