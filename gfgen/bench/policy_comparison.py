"""Compare the scores of policies on one workload with a baseline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gfgen.bench.workloads import load_compared
from gfgen.errors import PolicyFault, StalledError
from gfgen.runtime.control.decider import FALLBACK
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.metrics import Metrics, Summary
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.simulation import simulate
from gfgen.system.wording import counted, in_words, named, table_head, table_row

REPLICAS = "legacy,degree=1"
COMPARED = (REPLICAS, "fcfs", "srtf", "edf,rescue=false", "edf", "triage", "makespan", "auto")
"""The default: single-rank replicas, then every policy."""
NONE = "-"
_COLUMNS = (
    "policy | deadlines met | with slack | with slack, by class | mean latency | P95 | jobs a minute",
    "failed | mean latency, x | P95, x | throughput, x | missed with slack, x",
)


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The jobs of one policy, or the reason that there are none."""

    policy: str
    outcomes: Sequence[JobOutcome] = ()
    fault: str | None = None
    """Why the policy was replaced during the run."""
    error: str | None = None
    """Why it cannot run this workload, for example because jobs wait forever."""
    note: str | None = None


def attempt(policy: str, run: Callable[[], tuple[Sequence[JobOutcome], Summary]]) -> PolicyRun:
    """Run the workload; a fault of the policy ends its run, not the comparison."""
    try:
        outcomes, summary = run()
    except (StalledError, PolicyFault) as error:
        return PolicyRun(policy, error=str(error))
    return PolicyRun(policy, outcomes, summary.policy_fault)


def simulated_run(text: str, jobs: Sequence[AdmittedJob], profile: Profile, *, num_ranks: int) -> PolicyRun:
    def run() -> tuple[Sequence[JobOutcome], Summary]:
        policy, _ = load_compared(text)
        found = simulate(jobs, policy=policy, num_ranks=num_ranks, profile=profile)
        return found.outcomes, found.summary

    return attempt(text, run)


@dataclass(slots=True)
class PolicyComparison:
    """The results so far, in the order of `policies`."""

    policies: tuple[str, ...]
    baseline: str
    slack_s: float
    scores: list[Score] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Policies without numbers, with the reason."""
    notes: list[str] = field(default_factory=list)

    @property
    def not_run(self) -> tuple[str, ...]:
        """Policies without a result after an interruption."""
        have_run = {*self.failures, *(found.policy for found in self.scores)}
        return tuple(policy for policy in self.policies if policy not in have_run)

    def add(self, run: PolicyRun) -> None:
        if run.error is not None:
            self.failures[run.policy] = run.error
            return
        replaced_by = None if run.fault is None else FALLBACK
        self.scores.append(score(run.policy, run.outcomes, slack_s=self.slack_s, replaced_by=replaced_by))
        if run.fault is not None:
            self.notes.append(f"{run.policy} failed too often ({run.fault}): {FALLBACK} took over")
        self.notes += [] if run.note is None else [run.note]
        self.notes += _reused(run)
        self.notes += _starved(run)

    def table(self) -> list[str]:
        """A Markdown line per policy; the last columns are ratios to the baseline."""
        baseline = next((found for found in self.scores if found.policy == self.baseline), None)
        rows = [table_row(*_cells(found, baseline)) for found in self.scores]
        return [*table_head(*_COLUMNS).splitlines(), *rows] if rows else []

    def remarks(self) -> list[str]:
        lines = [*self.notes, *(f"{policy}: {error}" for policy, error in self.failures.items())]
        if self.not_run:
            lines.append(f"interrupted; not run: {', '.join(self.not_run)}")
        return lines

    def as_json(self, conditions: dict[str, Any]) -> str:
        """The numbers with their conditions; latencies are null if no job is done."""
        content = {
            **conditions,
            "baseline": self.baseline,
            "slack_s": self.slack_s,
            "runs": [asdict(found) for found in self.scores],
            "failures": self.failures,
            "notes": self.notes,
            "not_run": self.not_run,
        }
        return json.dumps(content, indent=1) + "\n"


def _cells(found: Score, baseline: Score | None) -> list[str]:
    return [
        found.name,
        f"{found.attainment:.0%}",
        f"{found.attainment_client:.0%}",
        ", ".join(f"{tag} {share:.0%}" for tag, share in sorted(found.by_class.items(), key=_size)) or NONE,
        NONE if found.mean_s is None else in_words(found.mean_s),
        NONE if found.p95_s is None else in_words(found.p95_s),
        f"{found.jobs_per_min:.1f}",
        str(found.num_failed),
        *(_ratio(value(found), None if baseline is None else value(baseline)) for value in _RATIOS),
    ]


def _size(entry: tuple[str, float]) -> tuple[int, str]:
    order = "SML".find(entry[0])
    return (order if order >= 0 else 3, entry[0])


_RATIOS: tuple[Callable[[Score], float | None], ...] = (
    lambda found: found.mean_s,
    lambda found: found.p95_s,
    lambda found: found.jobs_per_min,
    lambda found: 1 - found.attainment_client,
)


def _ratio(value: float | None, baseline: float | None) -> str:
    return NONE if value is None or not baseline else f"{value / baseline:.2f}"


def _reused(run: PolicyRun) -> list[str]:
    num_reused = sum(outcome.num_approximate for outcome in run.outcomes)
    num_steps = sum(outcome.info.spec.steps or 0 for outcome in run.outcomes)
    return [f"{run.policy}: {num_reused / num_steps:.1%} of the steps were reused"] if num_reused else []


def _starved(run: PolicyRun) -> list[str]:
    never = [outcome for outcome in run.outcomes if outcome.status == "failed" and outcome.started_s is None]
    if not never:
        return []
    names = named([outcome.info.job_id for outcome in never], "job")
    jobs, error = counted(len(never), "job"), never[0].error
    return [f"{run.policy} gave {jobs} no rank until it was too late ({error}): {names}"]


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

    @property
    def name(self) -> str:
        return self.policy if self.replaced_by is None else f"{self.policy} (replaced by {self.replaced_by})"


def score(
    policy: str,
    outcomes: Sequence[JobOutcome],
    *,
    slack_s: float = 0.0,
    slacks_s: Mapping[str, float] | None = None,
    replaced_by: str | None = None,
) -> Score:
    """slacks_s: by model, in place of `slack_s`."""
    allowed = [_allowed(each, (slacks_s or {}).get(each.info.spec.model or "", slack_s)) for each in outcomes]
    summary, with_slack = summary_of(outcomes), summary_of(allowed)
    latency = summary.latency
    return Score(
        policy=policy,
        num_jobs=len(outcomes),
        num_failed=len(outcomes) - summary.num_done,
        attainment=summary.deadlines.fraction if summary.deadlines else 1.0,
        attainment_client=with_slack.deadlines.fraction if with_slack.deadlines else 1.0,
        mean_s=None if latency is None else latency.mean_s,
        p50_s=None if latency is None else latency.p50_s,
        p95_s=None if latency is None else latency.p95_s,
        jobs_per_min=summary.jobs_per_min,
        makespan_s=summary.makespan_s,
        by_class={tag: met.fraction for tag, met in with_slack.deadlines_by_tag.items() if tag},
        replaced_by=replaced_by,
    )


def summary_of(outcomes: Sequence[JobOutcome]) -> Summary:
    metrics = Metrics()
    for outcome in outcomes:
        metrics.ended(outcome)
    return metrics.summary()


def _allowed(outcome: JobOutcome, slack_s: float) -> JobOutcome:
    due_s = outcome.deadline_s
    return outcome if due_s is None else replace(outcome, deadline_s=due_s + slack_s)
