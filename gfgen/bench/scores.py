"""Score a run as in the paper: failed jobs miss their deadline, and latencies are those of done jobs.

The client allows a fixed slack after the deadline, which policies do not see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gfgen.runtime.core.metrics import percentile
from gfgen.runtime.core.observer import JobOutcome

MAX_KEPT = 1000
"""Larger runs store no jobs: 100,000 of them would take 30 MB per policy."""


@dataclass(frozen=True, slots=True)
class JobScore:
    """The result of one job, in seconds since the start of the run."""

    id: str
    tag: str | None
    status: str
    arrival_s: float
    started_s: float | None
    ended_s: float
    due_s: float | None
    """The deadline without slack."""
    busy_s: float
    layouts: Sequence[str]
    num_reused: int = 0
    """Steps without the transformer."""

    def is_in_time(self, slack_s: float = 0.0) -> bool:
        """Whether it is done by its deadline plus slack, or has no deadline."""
        return self.status == "done" and (self.due_s is None or self.ended_s <= self.due_s + slack_s)


@dataclass(frozen=True, slots=True)
class Score:
    policy: str
    num_jobs: int
    num_failed: int
    attainment: float
    """Share of the jobs with a deadline that were done in time."""
    attainment_client: float
    """The same with slack."""
    mean_s: float | None
    """Latencies; None if no job is done."""
    p50_s: float | None
    p95_s: float | None
    jobs_per_min: float
    makespan_s: float
    by_class: Mapping[str, float] = field(default_factory=dict)
    """Share of jobs in time with slack, by tag."""
    replaced_by: str | None = None
    """The policy that finished the run after this one failed too often."""
    jobs: Sequence[JobScore] = ()
    """In the order of their ends; empty with more than MAX_KEPT jobs, or in older files."""

    @property
    def name(self) -> str:
        return self.policy if self.replaced_by is None else f"{self.policy} (replaced by {self.replaced_by})"


def score(
    policy: str,
    outcomes: Sequence[JobOutcome],
    *,
    slack_s: float,
    replaced_by: str | None = None,
) -> Score:
    jobs = [_job_score(outcome) for outcome in outcomes]
    done = [outcome for outcome in outcomes if outcome.status == "done"]
    latencies_s = [outcome.ended_s - outcome.arrival_s for outcome in done]
    end_s = max((outcome.ended_s for outcome in outcomes), default=0.0)
    makespan_s = end_s - min((outcome.arrival_s for outcome in outcomes), default=0.0)
    return Score(
        policy=policy,
        num_jobs=len(outcomes),
        num_failed=len(outcomes) - len(done),
        attainment=_attainment(jobs, 0.0),
        attainment_client=_attainment(jobs, slack_s),
        mean_s=sum(latencies_s) / len(latencies_s) if latencies_s else None,
        p50_s=percentile(latencies_s, 50) if latencies_s else None,
        p95_s=percentile(latencies_s, 95) if latencies_s else None,
        jobs_per_min=60 * len(done) / makespan_s if makespan_s > 0 else 0.0,
        makespan_s=makespan_s,
        by_class={
            tag: _attainment([job for job in jobs if job.tag == tag], slack_s)
            for tag in dict.fromkeys(job.tag for job in jobs)
            if tag is not None
        },
        replaced_by=replaced_by,
        jobs=jobs if len(jobs) <= MAX_KEPT else [],
    )


def _attainment(jobs: Sequence[JobScore], slack_s: float) -> float:
    verdicts = [job.is_in_time(slack_s) for job in jobs if job.due_s is not None]
    return sum(verdicts) / len(verdicts) if verdicts else 1.0


def _job_score(outcome: JobOutcome) -> JobScore:
    return JobScore(
        id=outcome.info.job_id,
        tag=outcome.info.spec.tag,
        status=outcome.status,
        arrival_s=outcome.arrival_s,
        started_s=outcome.started_s,
        ended_s=outcome.ended_s,
        due_s=outcome.deadline_s,
        busy_s=outcome.busy_s,
        layouts=outcome.layouts,
        num_reused=outcome.num_reused,
    )
