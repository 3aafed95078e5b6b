"""Latencies, deadlines and what ranks did, as sums: a run may have any number of jobs."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gfgen.runtime.core.events import Event, ModelsChanged, RankLoaded, TaskDone
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.ipc.messages import MemoryUse
from gfgen.system.wording import MAX_NAMED, in_words, size_in_words

MAX_LATENCIES = 10_000  # percentiles are those of this many jobs, the last ones
ALL_TAGS = "all"
PERCENTILES_FROM = 100  # jobs; the 99th percentile of fewer is their maximum


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from arrival to renamed file, over the jobs that are done."""

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    is_sampled: bool = False  # the percentiles (not the mean) are those of the last MAX_LATENCIES jobs


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many of the jobs with a deadline met it; a failed job has not."""

    num_met: int
    num_jobs: int

    @property
    def fraction(self) -> float:
        return self.num_met / self.num_jobs


@dataclass(slots=True)
class Summary:
    """The run in numbers. Skipped jobs are counted and in nothing else."""

    num_done: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_unfinished: int = 0
    num_tasks: int = 0
    makespan_s: float = 0.0  # from the first arrival to the last end of a job, or of a task
    latency: Latency | None = None
    deadlines_by_tag: Mapping[str, Attainment] = field(default_factory=dict)
    num_ranks: int = 0
    busy_s: float = 0.0  # of all ranks: executing tasks
    waited_s: float = 0.0  # of all ranks: holding a task whose input was not there yet
    moved_s: float = 0.0  # of all ranks: copying a task's input
    num_model_changes: int = 0
    load_s: float = 0.0  # of a rank's time, on average: loading models at these changes
    memory: Mapping[int, MemoryUse] = field(default_factory=dict)  # by rank; empty where nobody could tell
    policy_fault: str | None = None  # why the policy was given up, if `fcfs` finished the run
    num_cancelled: int = 0
    num_dropped: int = 0
    failures: tuple[str, ...] = ()  # 'id: reason' of the first jobs that failed, MAX_NAMED at most

    @property
    def num_jobs(self) -> int:
        num_ended = self.num_done + self.num_dropped + self.num_failed + self.num_cancelled + self.num_skipped
        return num_ended + self.num_unfinished

    @property
    def deadlines(self) -> Attainment | None:
        """Of the jobs of all tags; None if none had a deadline."""
        tags = self.deadlines_by_tag.values()
        return Attainment(sum(x.num_met for x in tags), sum(x.num_jobs for x in tags)) if tags else None

    @property
    def utilisation(self) -> float:
        """Fraction of all ranks' time in which a task was executing."""
        return self._share(self.busy_s)

    @property
    def waited_share(self) -> float:
        """Fraction of all ranks' time in which a task waited for its input."""
        return self._share(self.waited_s)

    @property
    def moved_share(self) -> float:
        """Fraction of all ranks' time in which a task's input was being moved."""
        return self._share(self.moved_s)

    @property
    def jobs_per_min(self) -> float:
        return 60 * self.num_done / self.makespan_s if self.makespan_s > 0 else 0.0

    def lines(self) -> list[str]:
        """The block that a person reads at the end of a run."""
        counts = [f"{self.num_done} done"]
        for status in ("dropped", "failed", "cancelled", "unfinished", "skipped"):
            if count := getattr(self, f"num_{status}"):
                counts.append(f"{count} {status}{' (done before)' if status == 'skipped' else ''}")
        lines = [f"jobs       {', '.join(counts)}"]
        if self.makespan_s > 0:
            lines[0] += f" in {in_words(self.makespan_s)} ({self.jobs_per_min:,.1f} a minute)"
        if self.latency:
            shown = self.latency
            about = "about " if shown.is_sampled else ""
            line = f"latency    mean {in_words(shown.mean_s)}, median {about}{in_words(shown.p50_s)}"
            if self.num_done >= PERCENTILES_FROM:
                line += f", p95 {about}{in_words(shown.p95_s)}, p99 {about}{in_words(shown.p99_s)}"
            lines.append(line)
        if self.deadlines:
            lines.append(f"deadlines  {self._deadlines_met()}")
        if self.makespan_s > 0 and self.num_ranks:
            lines.append(
                f"ranks      {self.num_ranks}, {self.utilisation:.0%} busy, "
                f"{self.waited_share:.1%} waiting for input, {self.moved_share:.1%} moving it"
            )
        if self.num_model_changes:
            times = "once" if self.num_model_changes == 1 else f"{self.num_model_changes} times"
            lines.append(f"models     changed {times}, {in_words(self.load_s)} of each rank's time")
        if self.memory:
            lines.append(f"memory     {self._memory_taken()}")
        lines += [f"failed     {failure}" for failure in self.failures]
        if (num_more := self.num_failed - len(self.failures)) > 0:
            lines.append(f"failed     {num_more} more; the manifest has the reasons")
        return lines

    @property
    def device_peaks(self) -> Mapping[str, int]:
        """By model: the most that its tasks had in use on a GPU, of all ranks."""
        peaks: Counter[str] = Counter()
        for use in self.memory.values():
            peaks |= Counter(use.device_peaks)
        return dict(sorted(peaks.items()))

    @property
    def attained(self) -> Mapping[str, Attainment]:
        """Overall, and by tag if jobs have tags."""
        if self.deadlines is None:
            return {}
        return {ALL_TAGS: self.deadlines, **{tag: met for tag, met in self.deadlines_by_tag.items() if tag}}

    def as_json(self) -> dict[str, Any]:
        """The numbers; times in seconds, shares from 0 to 1."""
        statuses = ("done", "dropped", "failed", "cancelled", "skipped", "unfinished")
        return {
            "jobs": {status: getattr(self, f"num_{status}") for status in statuses},
            "num_tasks": self.num_tasks,
            "model_changes": {"times": self.num_model_changes, "load_s": self.load_s},
            "makespan_s": self.makespan_s,
            "jobs_per_min": self.jobs_per_min,
            "latency": None if self.latency is None else asdict(self.latency),
            "deadlines": {
                tag: {"met": met.num_met, "jobs": met.num_jobs, "share": met.fraction}
                for tag, met in self.attained.items()
            },
            "num_ranks": self.num_ranks,
            "utilisation": self.utilisation,
            "waited_share": self.waited_share,
            "moved_s": self.moved_s,
            "moved_share": self.moved_share,
            "memory": {
                "host_bytes": max((use.host_bytes for use in self.memory.values()), default=None),
                "device_bytes": dict(self.device_peaks),
            },
            "policy_fault": self.policy_fault,
        }

    def _share(self, seconds: float) -> float:
        total_s = self.num_ranks * self.makespan_s
        return seconds / total_s if total_s > 0 else 0.0

    def _memory_taken(self) -> str:
        host = f"{size_in_words(max(use.host_bytes for use in self.memory.values()))} of main memory a rank"
        peaks = self.device_peaks
        if not peaks:
            return host
        by_model = ", ".join(f"{model} {size_in_words(num_bytes)}" for model, num_bytes in peaks.items())
        reserved = size_in_words(max(use.reserved_bytes for use in self.memory.values()))
        arena = size_in_words(max(use.arena_bytes for use in self.memory.values()))
        return f"{by_model} of a GPU ({reserved} reserved, {arena} arena), {host}"

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
        self._sums = Summary()  # what needs no further computation
        self._num_jobs = 0
        self._num_ended: Counter[str] = Counter()
        self._latency_s = 0.0
        self._latencies_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._num_due: Counter[str] = Counter()
        self._num_met: Counter[str] = Counter()  # by tag: jobs with a deadline, and those of them that met it
        self._first_s, self._last_s = math.inf, 0.0  # the first arrival of an ended job, and the last end

    def skipped(self, number: int) -> None:
        self._sums.num_skipped = number

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self._num_jobs, self._sums.num_ranks = len(jobs), num_ranks

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        self._num_jobs += len(jobs)

    def applied(self, event: Event) -> None:
        sums = self._sums
        if isinstance(event, TaskDone):
            sums.num_tasks += 1
            for times in event.times:
                sums.num_ranks = max(sums.num_ranks, times.rank + 1)
                self._last_s = max(self._last_s, times.ended_s)
                sums.busy_s += times.ended_s - times.started_s
                sums.waited_s += times.waited_s
                sums.moved_s += times.moved_s
        elif isinstance(event, ModelsChanged):
            sums.num_model_changes += 1
        elif isinstance(event, RankLoaded):
            sums.load_s += event.load_s

    def ended(self, outcome: JobOutcome) -> None:
        self._num_ended[outcome.status] += 1
        self._first_s = min(self._first_s, outcome.arrival_s)
        self._last_s = max(self._last_s, outcome.ended_s)
        if outcome.status == "done":
            self._latency_s += outcome.ended_s - outcome.arrival_s
            self._latencies_s.append(outcome.ended_s - outcome.arrival_s)
        elif outcome.status == "failed" and len(self._sums.failures) < MAX_NAMED:
            self._sums.failures += (f"{outcome.info.job_id}: {outcome.error}",)
        if outcome.met_deadline is not None:
            tag = outcome.info.spec.tag or ""
            self._num_due[tag] += 1
            self._num_met[tag] += outcome.met_deadline

    def measured(self, use: Mapping[int, MemoryUse]) -> None:
        self._sums.memory = use

    def summary(self) -> Summary:
        ended, num_ended = self._num_ended, self._num_ended.total()
        return replace(
            self._sums,
            num_done=ended["done"],
            num_failed=ended["failed"],
            num_cancelled=ended["cancelled"],
            num_unfinished=max(0, self._num_jobs - num_ended),
            makespan_s=self._last_s - self._first_s if num_ended else 0.0,
            latency=self._latency(),
            deadlines_by_tag={tag: Attainment(self._num_met[tag], due) for tag, due in self._num_due.items()},
            load_s=self._sums.load_s / max(1, self._sums.num_ranks),
        )

    def _latency(self) -> Latency | None:
        """None where no job is done."""
        if not (num_done := self._num_ended["done"]):
            return None
        p50_s, p95_s, p99_s = (percentile(self._latencies_s, percent) for percent in (50, 95, 99))
        is_sampled = num_done > len(self._latencies_s)
        return Latency(self._latency_s / num_done, p50_s, p95_s, p99_s, is_sampled)


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear between the two nearest values, as numpy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
