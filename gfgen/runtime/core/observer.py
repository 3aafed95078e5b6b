"""Observers of a run, which decide nothing; its events keep `RunView`, what it does now, for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from gfgen.errors import Warned
from gfgen.job.spec import JobSpec
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.ipc.content import Content, NamedContent
from gfgen.runtime.ipc.messages import MemoryUse
from gfgen.snapshot import Snapshot

OutcomeStatus = Literal["done", "failed", "cancelled", "skipped"]
RankPhase = Literal["starting", "loading", "ready", "lost", "retired"]
RankStatus = Literal["starting", "loading", "idle", "busy", "lost", "retired"]


@dataclass(frozen=True, slots=True)
class JobInfo:
    asked: JobSpec
    spec: JobSpec  # as run: rounded, with defaults filled in
    num_tasks: int
    file: str
    spec_hash: str
    family: str
    job_file: str | None = None  # as the manifest names it (ownership.py); None for a job without one
    warnings: tuple[Warned, ...] = ()  # what in it does not act as written (admission.py)
    attempt: int = 1  # later ones have other seeds, because a filter wanted them (`--keep-if`)

    @property
    def job_id(self) -> str:
        return self.spec.id

    @property
    def rounding(self) -> str | None:
        """What the model rounded, for example '1280x720 -> 1280x704, 50 -> 49 frames'; None if nothing."""
        asked, spec, notes = self.asked, self.spec, []
        sizes = ((asked.width or spec.width, asked.height or spec.height), (spec.width, spec.height))
        if sizes[0] != sizes[1]:
            notes.append("{}x{} -> {}x{}".format(*sizes[0], *sizes[1]))
        if asked.frames is not None and asked.frames != spec.frames:
            notes.append(f"{asked.frames} -> {spec.frames} frames")
        return ", ".join(notes) or None

    def difference(self, made: tuple[int, int, int]) -> str | None:
        """How frames, height and width of its files differ from those that it ran with; None if equal."""
        frames, height, width = made
        own, number = self.spec.made_size, self.spec.frames or 1
        if number == 1 and self.spec.fps and self.asked.frames is None:
            number = frames  # of a video whose length no field says
        asked = (number, own[1] or height, own[0] or width)
        if (frames, height, width) == asked:
            return None
        wanted = f"{self.spec.size_text} with {number} frames"
        return f"the model made {width}x{height} with {frames} frames, not {wanted}"


@dataclass(slots=True)
class JobOutcome:
    """How a job ended; its record collects this while it runs.

    Times are seconds since the start of the run, or 0 if it never was part of it.
    """

    info: JobInfo
    status: OutcomeStatus
    arrival_s: float = 0.0
    started_s: float | None = None  # start of its first task on a rank
    ended_s: float = 0.0
    deadline_s: float | None = None
    busy_s: float = 0.0
    layouts: tuple[str, ...] = ()
    error: str | None = None
    is_refused: bool = False
    warnings: tuple[str, ...] = ()
    timings: dict[str, Any] = field(default_factory=dict)
    written: Content | None = None  # its file as written, the first of several; None if there is none
    files: tuple[NamedContent, ...] = ()  # all of them, if there are several
    made: tuple[int, int, int] | None = None  # frames, height and width of each, if only the decode knew them
    rank_s: float = 0.0  # seconds of each of its ranks, summed over its tasks: GPU-seconds
    first_uses_s: float = 0.0  # the part of `busy_s` in first tasks of their kind in a process
    peak_bytes: int | None = None  # the most that torch had allocated on one of its GPUs; None on CPU ranks
    num_approximate: int = 0  # steps that ran without the transformer
    why_approximate: str | None = None  # why a policy had steps approximated; None if none did
    entry: dict[str, Any] = field(default_factory=dict)  # its line in the manifest, if it has one
    left: dict[str, Any] | None = None  # if it failed after its last step: what `Backend.save` needs

    @property
    def job_id(self) -> str:
        return self.info.job_id

    @property
    def file_names(self) -> list[str]:
        """Of all its files, from the output folder; the one it would have if there is none."""
        file = self.info.file
        return [str(PurePath(file).with_name(name)) for name, _, _ in self.files] or [file]

    @property
    def met_deadline(self) -> bool | None:
        """Whether it was done in time; None without a deadline, or if it was cancelled."""
        if self.deadline_s is None or self.status == "cancelled":
            return None
        return self.status == "done" and self.ended_s <= self.deadline_s


class Observer:
    """Does nothing; subclasses override what they watch."""

    view: RunView  # set by `with_view`: it has applied what the observer is told
    refresh_s: float | None = None  # interval of `refreshed` in seconds; None for never

    def skipped(self, number: int) -> None:
        """This many jobs were done before the run starts; they are no jobs of it."""

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        """The run starts with these jobs."""

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        """These jobs joined the run after its start."""

    def dispatched(self, dispatch: Dispatch) -> None:
        """A task was submitted to ranks."""

    def applied(self, event: Event) -> None:
        """The state has changed by this event."""

    def ended(self, outcome: JobOutcome) -> None:
        """A job has ended, successfully or not."""

    def node_joined(self, node: str, ranks: range) -> None:
        """A node of a cluster takes jobs with these ranks. On one machine nothing joins."""

    def node_left(self, node: str) -> None:
        """A node is gone with its ranks; their numbers do not come again."""

    def refreshed(self, snapshot: Snapshot) -> None:
        """Called about every `refresh_s`."""

    def measured(self, use: Mapping[int, MemoryUse]) -> None:
        """The run has no more tasks: memory use by rank, as far as ranks report it."""

    def close(self) -> None:
        """Called once at the end of the run, also after an error."""


@dataclass(slots=True, eq=False)
class RankState:
    rank: int
    node: str | None = None
    phase: RankPhase = "starting"
    num_restarts: int = 0
    queue: list[int] = field(default_factory=list)  # numbers of its dispatches; the first one runs
    last: Dispatch | None = None

    @property
    def status(self) -> RankStatus:
        if self.phase != "ready":
            return self.phase
        return "busy" if self.queue else "idle"


class RunView(Observer):
    """What a run does now, by its events alone."""

    def __init__(self) -> None:
        self.policy = ""
        self.policy_change: events.PolicyChanged | None = None  # the last one since that request
        self.is_stopping = False
        self.open: dict[str, JobInfo] = {}
        self.started: dict[str, Dispatch] = {}
        self.backlog: Collection[str] = ()  # ids of jobs that are neither open nor have ended
        self._num_added = 0
        self.num_ended: Counter[str] = Counter()  # by status
        self.num_skipped = 0
        self.num_missed = 0  # jobs that were done after their deadline
        self.ranks: dict[int, RankState] = {}
        self.running: dict[int, Dispatch] = {}

    @property
    def num_jobs(self) -> int:
        return self._num_added + len(self.backlog)

    @property
    def deciding(self) -> str:
        """The active policy: auto selects among others."""
        return self.policy if self.policy_change is None else self.policy_change.policy

    def skipped(self, number: int) -> None:
        self.num_skipped = number

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self.policy = policy
        self.ranks = {rank: RankState(rank) for rank in range(num_ranks)}
        self.added(jobs)

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        self._num_added += len(jobs)
        self.open |= {info.job_id: info for info in jobs}

    def node_joined(self, node: str, ranks: range) -> None:
        self.ranks |= {rank: RankState(rank, node) for rank in ranks}

    def node_left(self, node: str) -> None:
        self.ranks = {rank: state for rank, state in self.ranks.items() if state.node != node}

    def dispatched(self, dispatch: Dispatch) -> None:
        self.running[dispatch.number] = dispatch
        if dispatch.task.job_id in self.open:
            self.started[dispatch.task.job_id] = dispatch
        for rank in dispatch.layout.ranks:
            state = self.ranks[rank]
            state.queue.append(dispatch.number)
            state.last = dispatch

    def applied(self, event: Event) -> None:
        match event:
            case events.TaskDone() | events.TaskFailed():
                if (dispatch := self.running.pop(event.dispatch, None)) is not None:
                    for rank in dispatch.layout.ranks:
                        self.ranks[rank].queue.remove(dispatch.number)
            case events.RankReady():
                self.ranks[event.rank].phase = "ready"
                self.ranks[event.rank].num_restarts = event.incarnation - 1
            case events.RankLoaded():
                self.ranks[event.rank].phase = "ready"
            case events.RankLost():
                self.ranks[event.rank].phase = "retired" if event.is_retired else "lost"
            case events.ModelsChanged():
                for state in self.ranks.values():
                    state.phase = state.phase if state.phase in ("lost", "retired") else "loading"
            case events.PolicyChanged():
                self.policy_change = event
            case events.StopRequested() | events.ClosingTime():
                self.is_stopping = True

    def ended(self, outcome: JobOutcome) -> None:
        self.num_ended[outcome.status] += 1
        self.num_missed += outcome.status == "done" and outcome.met_deadline is False
        self.open.pop(outcome.info.job_id, None)
        self.started.pop(outcome.info.job_id, None)


def with_view(observers: Sequence[Observer], backlog: Collection[str] = ()) -> tuple[Observer, ...]:
    """These observers of one run behind the view that they share."""
    view = RunView()
    view.backlog = backlog
    for observer in observers:
        observer.view = view
    return (view, *observers)
