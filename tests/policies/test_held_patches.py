"""Jobs start on ranks that hold their patches."""

from __future__ import annotations

from random import Random

import pytest
from builders import Recorder, make_job, simulate

from gfgen.policies import fair_share
from gfgen.policies.catalog import BUILT_IN
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import TaskDone

NUM_JOBS, NUM_LORAS = 300, 20


def jobs_with_loras(*, spread_s: float = 0.0) -> list[AdmittedJob]:
    rng = Random(0)
    return [
        make_job(
            f"job-{idx}",
            lora=[{"sha256": f"{rng.randrange(NUM_LORAS)}", "scale": 1.0}],
            lora_files=["style.safetensors"],
            arrival_s=idx * spread_s,
        )
        for idx in range(NUM_JOBS)
    ]


def share_of_switches(recorder: Recorder) -> float:
    busy_s = sum(event.rank_s for event in recorder.events if isinstance(event, TaskDone))
    return sum(each.switch_s * each.layout.degree for each in recorder.dispatches) / busy_s


@pytest.mark.parametrize("policy", [*sorted(set(BUILT_IN) - {"legacy"}), "triage,degree=4"])
def test_many_jobs_over_many_loras_spend_little_time_switching(policy: str) -> None:
    recorder = simulate(jobs_with_loras(), policy=policy, num_ranks=4)
    assert len(recorder.outcomes) == NUM_JOBS
    assert share_of_switches(recorder) < 0.05


def test_without_the_preference_they_switch_for_nearly_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "NOTABLE", float("inf"))
    recorder = simulate(jobs_with_loras(), policy="srtf", num_ranks=4)
    assert share_of_switches(recorder) > 0.05


def test_a_job_is_overtaken_only_by_jobs_that_arrived_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "PATIENCE_S", 1.0)
    recorder = simulate(jobs_with_loras(spread_s=0.05), policy="fcfs", num_ranks=2)
    started = [each.task.job_id for each in recorder.dispatches if each.task.index == 0]
    arrivals_s = [0.05 * int(job_id.removeprefix("job-")) for job_id in started]
    latest_s = 0.0
    for arrival_s in arrivals_s:
        assert arrival_s > latest_s - 1.0 - 1e-9
        latest_s = max(latest_s, arrival_s)
