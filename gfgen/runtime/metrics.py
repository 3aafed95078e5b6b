"""What a run was worth: latencies, deadlines, and what the ranks did with their time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gfgen.runtime.durations import in_words
from gfgen.runtime.events import Event, TaskDone
from gfgen.runtime.observer import JobInfo, JobOutcome, Observer


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from arrival to renamed file, over the jobs that are done."""

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many of the jobs with a deadline met it; a failed job has not."""

    num_met: int
    num_jobs: int

    @property
    def fraction(self) -> float:
        return self.num_met / self.num_jobs


@dataclass(frozen=True, slots=True)
class Summary:
    """The run in numbers. Skipped jobs are counted and in nothing else."""

    num_done: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_unfinished: int = 0
    num_tasks: int = 0
    makespan_s: float = 0.0
    """From the first arrival to the last end of a job, or of a task where jobs are unfinished."""
    latency: Latency | None = None
    deadlines: Attainment | None = None
    deadlines_by_tag: Mapping[str, Attainment] = field(default_factory=dict)
    busy_s: tuple[float, ...] = ()
    """By rank: executing tasks."""
    waited_s: tuple[float, ...] = ()
    """By rank: holding a task whose input was not there yet."""
    moved_s: tuple[float, ...] = ()
    """By rank: copying a task's input."""

    @property
    def num_jobs(self) -> int:
        return self.num_done + self.num_failed + self.num_skipped + self.num_unfinished

    @property
    def utilisation(self) -> float:
        """Fraction of all ranks' time in which a task was executing."""
        return self._share(self.busy_s)

    @property
    def moved_share(self) -> float:
        """Fraction of all ranks' time in which a task's input was being moved."""
        return self._share(self.moved_s)

    @property
    def jobs_per_min(self) -> float:
        """Throughput of jobs that are done."""
        return 60 * self.num_done / self.makespan_s if self.makespan_s > 0 else 0.0

    def lines(self) -> list[str]:
        """The block that a person reads at the end of a run."""
        lines = [f"jobs       {self._counts()}"]
        if self.makespan_s > 0:
            lines[0] += f" in {in_words(self.makespan_s)} ({self.jobs_per_min:,.1f} a minute)"
        if self.latency:
            shown = self.latency
            lines.append(
                f"latency    mean {in_words(shown.mean_s)}, median {in_words(shown.p50_s)}, "
                f"p95 {in_words(shown.p95_s)}, p99 {in_words(shown.p99_s)}"
            )
        if self.deadlines:
            lines.append(f"deadlines  {self._deadlines_met()}")
        if self.makespan_s > 0 and self.busy_s:
            waited, moved = self._share(self.waited_s), self._share(self.moved_s)
            lines.append(
                f"ranks      {len(self.busy_s)}, {self.utilisation:.0%} busy, "
                f"{waited:.1%} waiting for input, {moved:.1%} moving it"
            )
        return lines

    def _share(self, by_rank: Sequence[float]) -> float:
        total_s = len(by_rank) * self.makespan_s
        return sum(by_rank) / total_s if total_s > 0 else 0.0

    def _counts(self) -> str:
        counts = {
            "failed": self.num_failed,
            "unfinished": self.num_unfinished,
            "skipped (done before)": self.num_skipped,
        }
        others = [f"{count} {name}" for name, count in counts.items() if count]
        return ", ".join([f"{self.num_done} done", *others])

    def _deadlines_met(self) -> str:
        assert self.deadlines is not None
        text = f"{self.deadlines.num_met} of {self.deadlines.num_jobs} met ({self.deadlines.fraction:.0%})"
        if len(self.deadlines_by_tag) > 1:
            tags = sorted(self.deadlines_by_tag.items())
            text += ": " + ", ".join(f"{tag or 'no tag'} {met.num_met}/{met.num_jobs}" for tag, met in tags)
        return text


class Metrics(Observer):
    """Adds up what happens; `summary` may be asked at any time."""

    def __init__(self) -> None:
        self._num_jobs = 0
        self._num_ranks = 0
        self._num_skipped = 0
        self._dispatches: set[int] = set()
        self._outcomes: list[JobOutcome] = []
        self._busy_s: dict[int, float] = defaultdict(float)
        self._waited_s: dict[int, float] = defaultdict(float)
        self._moved_s: dict[int, float] = defaultdict(float)
        self._last_s = 0.0

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self._num_jobs, self._num_ranks = len(jobs), num_ranks

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        self._num_jobs += len(jobs)

    def applied(self, event: Event) -> None:
        if isinstance(event, TaskDone):
            self._dispatches.add(event.dispatch)
            self._last_s = max(self._last_s, event.ended_s)
            self._busy_s[event.rank] += event.ended_s - event.started_s
            self._waited_s[event.rank] += event.waited_s
            self._moved_s[event.rank] += event.moved_s

    def ended(self, outcome: JobOutcome) -> None:
        if outcome.status == "skipped":
            self._num_skipped += 1
        else:
            self._outcomes.append(outcome)

    def summary(self) -> Summary:
        """The numbers so far."""
        counts = Counter(outcome.status for outcome in self._outcomes)
        ranks = range(max(self._num_ranks, *(rank + 1 for rank in self._busy_s), 0))
        return Summary(
            num_done=counts["done"],
            num_failed=counts["failed"],
            num_skipped=self._num_skipped,
            num_unfinished=max(0, self._num_jobs - len(self._outcomes)),
            num_tasks=len(self._dispatches),
            makespan_s=_makespan_s(self._outcomes, self._last_s),
            latency=_latency(self._outcomes),
            deadlines=_attainment(self._outcomes),
            deadlines_by_tag=_attainment_by_tag(self._outcomes),
            busy_s=tuple(self._busy_s[rank] for rank in ranks),
            waited_s=tuple(self._waited_s[rank] for rank in ranks),
            moved_s=tuple(self._moved_s[rank] for rank in ranks),
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as numpy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _makespan_s(outcomes: Sequence[JobOutcome], last_task_s: float) -> float:
    if not outcomes:
        return 0.0
    end_s = max(last_task_s, *(outcome.ended_s for outcome in outcomes))
    return end_s - min(outcome.arrival_s for outcome in outcomes)


def _latency(outcomes: Sequence[JobOutcome]) -> Latency | None:
    latencies = [outcome.ended_s - outcome.arrival_s for outcome in outcomes if outcome.status == "done"]
    if not latencies:
        return None
    mean_s = sum(latencies) / len(latencies)
    return Latency(mean_s, *(percentile(latencies, percent) for percent in (50, 95, 99)))


def _attainment(outcomes: Sequence[JobOutcome]) -> Attainment | None:
    verdicts = [outcome.met_deadline for outcome in outcomes if outcome.met_deadline is not None]
    return Attainment(sum(verdicts), len(verdicts)) if verdicts else None


def _attainment_by_tag(outcomes: Sequence[JobOutcome]) -> dict[str, Attainment]:
    by_tag: dict[str, list[JobOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_tag[outcome.info.spec.tag or ""].append(outcome)
    attained = {tag: _attainment(members) for tag, members in by_tag.items()}
    return {tag: attainment for tag, attainment in attained.items() if attainment}
