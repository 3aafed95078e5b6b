"""A run that is only acted: observers see what a real one would show them, in virtual time.

Shortest remaining work first, one step after the other, without processes and models. For
tests of those who watch a run, and for looking at their pictures.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gfgen.graph import Stage, Task, Trajectory
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer, with_view
from gfgen.runtime.ipc.content import Content
from gfgen.snapshot import Costs, JobView, RankView, RunningTask, Snapshot

WRITE_S = 0.4
WRITTEN = Content(1000, "hash")
MOVE_S = 0.05
STAGE_COST = {Stage.ENCODE: 0.5, Stage.PREPARE: 0.2, Stage.DENOISE: 1.0, Stage.DECODE: 1.5}
"""In steps of the job."""


class NoCosts(Costs):
    def task_s(self, task: Task, layout: Layout) -> float:
        return 1.0

    def remaining_s(self, task: Task, layout: Layout) -> float:
        return 1.0

    def first_use_s(self, task: Task, layout: Layout) -> float:
        return 0.0

    def move_s(self, job_id: str, source: Layout | None, layout: Layout) -> float:
        return 0.0


@dataclass(slots=True)
class Part:
    """What a job does in the play."""

    info: JobInfo
    step_s: float = 1.0
    degree: int = 1
    fails: bool = False
    index: int = 0
    layout: Layout | None = None
    flight: RunningTask | None = None
    started_s: float | None = None
    busy_s: float = 0.0
    layouts: list[str] = field(default_factory=list)

    @property
    def trajectory(self) -> Trajectory:
        return Trajectory(self.info.job_id, self.info.num_tasks - 3)

    def cost_s(self, task: Task) -> float:
        return STAGE_COST[task.stage] * self.step_s / self.degree

    @property
    def remaining_s(self) -> float:
        tasks = (self.trajectory.task(index) for index in range(self.index, self.info.num_tasks))
        return sum(self.cost_s(task) for task in tasks)


def job_info(
    job_id: str,
    *,
    prompt: str = "a fox in the snow",
    steps: int = 4,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    tag: str | None = None,
    asked_height: int | None = None,
) -> JobInfo:
    """A job with plausible values everywhere."""
    spec = JobSpec(
        id=job_id,
        prompt=prompt,
        model="tiny-wan",
        width=96,
        height=64,
        frames=9,
        fps=8,
        steps=steps,
        guidance_scale=5.0,
        seed=7,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        tag=tag,
    )
    asked = JobSpec(id=job_id, prompt=prompt, height=asked_height, steps=steps)
    return JobInfo(
        asked=asked, spec=spec, num_tasks=steps + 3, file=f"{job_id}.mp4", spec_hash="ab12", family="wan"
    )


class ActedRun:
    """Plays a run to observers; `pace` is called with every moment before it is played."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        num_ranks: int,
        observers: Sequence[Observer],
        policy: str = "srtf",
        pace: Callable[[float], None] = lambda now_s: None,
    ) -> None:
        self.parts = {part.info.job_id: part for part in parts}
        self.num_ranks = num_ranks
        self.observers = with_view(observers)
        self.policy = policy
        self.pace = pace
        self.now_s = 0.0
        self.waiting: dict[str, Part] = {}
        self.free = set(range(num_ranks))
        self._numbers = itertools.count(1)
        self._ties = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    def play(self) -> None:
        """From the first arrival to `close`."""
        for observer in self.observers:
            observer.began(
                tuple(part.info for part in self.parts.values()),
                num_ranks=self.num_ranks,
                policy=self.policy,
            )
        for part in self.parts.values():
            self._at(part.info.spec.arrival_s, lambda part=part: self._arrive(part))  # type: ignore[misc]
        while self._agenda:
            time_s, _, happen = heapq.heappop(self._agenda)
            self.pace(time_s)
            self.now_s = time_s
            happen()
            self._start_tasks()
            snapshot = self.snapshot()
            for observer in self.observers:
                observer.refreshed(snapshot)
        for observer in self.observers:
            observer.close()

    def snapshot(self) -> Snapshot:
        views = {name: self._view(part) for name, part in self.parts.items() if self._is_seen(part)}
        return Snapshot(
            now_s=self.now_s,
            open={name: view for name, view in views.items() if self.parts[name].flight is None},
            busy={name: view for name, view in views.items() if self.parts[name].flight is not None},
            running=tuple(part.flight for part in self.parts.values() if part.flight is not None),
            ranks=tuple(
                RankView(rank, self.now_s, rank in self.free, frozenset()) for rank in range(self.num_ranks)
            ),
            max_degree=self.num_ranks,
            costs=NoCosts(),
        )

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._ties), happen))

    def _apply(self, event: events.Event) -> None:
        for observer in self.observers:
            observer.applied(event)

    def _arrive(self, part: Part) -> None:
        self.waiting[part.info.job_id] = part
        self._apply(events.JobArrived(self.now_s, part.info.job_id))

    def _start_tasks(self) -> None:
        for part in sorted(self.waiting.values(), key=lambda part: part.remaining_s):
            task = part.trajectory.task(part.index)
            degree = part.degree if task.stage is Stage.DENOISE else 1
            if len(self.free) >= degree:
                self._start(part, task, self._layout(part, degree))

    def _layout(self, part: Part, degree: int) -> Layout:
        kept = [rank for rank in (part.layout.ranks if part.layout else ()) if rank in self.free]
        others = sorted(self.free.difference(kept))
        return Layout(tuple((kept + others)[:degree]), ulysses=degree)

    def _start(self, part: Part, task: Task, layout: Layout) -> None:
        moved_s = MOVE_S if part.layout not in (None, layout) else 0.0
        start_s, task_s = self.now_s + moved_s, part.cost_s(task)
        dispatch = Dispatch(
            number=next(self._numbers),
            task=task,
            layout=layout,
            submitted_s=self.now_s,
            predicted_start_s=start_s,
            predicted_end_s=start_s + task_s,
            source=part.layout,
        )
        del self.waiting[part.info.job_id]
        self.free -= set(layout.ranks)
        part.layout, part.index = layout, part.index + 1
        part.started_s = start_s if part.started_s is None else part.started_s
        part.flight = RunningTask(task, layout, dispatch.predicted_end_s)
        if str(layout) not in part.layouts[-1:]:
            part.layouts.append(str(layout))
        for observer in self.observers:
            observer.dispatched(dispatch)
        self._at(start_s + task_s, lambda: self._end(part, dispatch, start_s, moved_s))

    def _end(self, part: Part, dispatch: Dispatch, start_s: float, moved_s: float) -> None:
        self.free |= set(dispatch.layout.ranks)
        part.flight = None
        part.busy_s += self.now_s - start_s
        fails = part.fails and part.index == 4
        if fails:
            self._apply(events.TaskFailed(self.now_s, dispatch.number, "out of memory"))
        else:
            times = [
                events.RankTimes(rank, start_s, self.now_s, moved_s=moved_s) for rank in dispatch.layout.ranks
            ]
            self._apply(events.TaskDone(self.now_s, dispatch.number, tuple(times)))
        if fails:
            self._conclude(part, error="denoise 1: out of memory")
        elif part.index < part.info.num_tasks:
            self.waiting[part.info.job_id] = part
        else:
            self._at(self.now_s + WRITE_S, lambda: self._written(part))

    def _written(self, part: Part) -> None:
        info, size_bytes = part.info, WRITTEN.size_bytes
        self._apply(events.OutputWritten(self.now_s, info.job_id, info.file, size_bytes, WRITE_S))
        self._conclude(part, error=None)

    def _conclude(self, part: Part, *, error: str | None) -> None:
        spec = part.info.spec
        outcome = JobOutcome(
            info=part.info,
            status="failed" if error else "done",
            arrival_s=spec.arrival_s,
            started_s=part.started_s,
            ended_s=self.now_s,
            deadline_s=None if spec.deadline_s is None else spec.arrival_s + spec.deadline_s,
            busy_s=part.busy_s,
            layouts=tuple(part.layouts),
            error=error,
            timings={"encode": 0.5, "denoise": part.busy_s},
            written=None if error else WRITTEN,
        )
        for observer in self.observers:
            observer.ended(outcome)
        del self.parts[part.info.job_id]

    def _is_seen(self, part: Part) -> bool:
        return part.info.spec.arrival_s <= self.now_s and part.index < part.info.num_tasks

    def _view(self, part: Part) -> JobView:
        spec = part.info.spec
        return JobView(
            job_id=spec.id,
            tag=spec.tag,
            model=spec.model or "",
            arrival_s=spec.arrival_s,
            deadline_s=math.inf if spec.deadline_s is None else spec.arrival_s + spec.deadline_s,
            precedence=-spec.priority,
            next_task=part.trajectory.task(part.index),
            num_tasks=part.info.num_tasks,
            remaining_s=part.remaining_s,
            last_layout=part.layout,
        )


PROMPTS = (
    "a red fox trotting through fresh snow at dawn",
    "waves breaking on black basalt, slow motion",
    "an old tram climbing a hill in Lisbon",
    "a paper boat drifting down a gutter in the rain",
    "a lighthouse beam sweeping over fog",
    "a potter's hands shaping wet clay",
    "neon koi swimming under a glass street",
    "a hot air balloon over lavender fields",
)


def batch(num_jobs: int, *, max_degree: int = 1, seed: int = 0) -> list[Part]:
    """Jobs of mixed sizes, arrivals and deadlines; the same for the same arguments."""
    values = _random(seed)
    parts = []
    for idx in range(num_jobs):
        steps = 4 + int(next(values) * 10)
        step_s = 0.4 + next(values) * 1.2
        deadline_s = (steps + 3) * step_s * (0.8 + 3 * next(values)) if idx % 2 else None
        word = PROMPTS[idx % len(PROMPTS)].split()[1]
        info = job_info(
            f"{word}-{idx:02d}",
            prompt=PROMPTS[idx % len(PROMPTS)],
            steps=steps,
            arrival_s=0.0 if idx < num_jobs // 2 else next(values) * num_jobs,
            deadline_s=deadline_s,
            tag="express" if deadline_s else "bulk",
        )
        degree = min(max_degree, 1 << int(next(values) * 4))
        parts.append(Part(info, step_s=step_s, degree=degree, fails=num_jobs > 5 and idx == 5))
    return parts


def _random(seed: int) -> Iterator[float]:
    """Numbers in [0, 1) without the random module's version-dependent streams."""
    state = seed * 2654435761 + 12345
    while True:
        state = (state * 1103515245 + 12345) % 2**31
        yield state / 2**31
