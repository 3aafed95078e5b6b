"""In which order a forecast lets jobs follow each other; test_progress.py has what is shown of it."""

from __future__ import annotations

import pytest

from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.simulate.forecast import predict
from gfgen.snapshot import JobView, RunningTask


def view(job_id: str, *, remaining_s: float, deadline_s: float, has_begun: bool = False) -> JobView:
    return JobView(
        job_id=job_id,
        tag=None,
        model="m",
        arrival_s=0.0,
        deadline_s=deadline_s,
        precedence=0,
        next_task=Task(job_id, 2, Stage.DENOISE, 0),
        num_tasks=10,
        remaining_s=remaining_s,
        last_layout=Layout.single(0) if has_begun else None,
    )


@pytest.mark.parametrize("policy", ["legacy", "fcfs", "srtf", "edf", "triage", "auto", "makespan,degree=2"])
def test_what_has_begun_goes_on_before_its_equals(policy: str) -> None:
    fresh = [view(f"fresh-{n}", remaining_s=9.0, deadline_s=50.0) for n in range(3)]
    begun = view("begun", remaining_s=8.0, deadline_s=50.0, has_begun=True)
    views = {job.job_id: job for job in (*fresh, begun)}
    found = predict(views, running=(), ranks=[0], now_s=0.0, policy=policy)
    assert next(iter(found.starts_s)) == "begun"
    assert found.end_s == 35.0


def test_jobs_that_share_steps_end_together_and_then_their_rank_is_free() -> None:
    views = {name: view(name, remaining_s=4.0, deadline_s=50.0, has_begun=True) for name in ("a", "b")}
    running = [
        RunningTask(Task(name, 2, Stage.DENOISE, 0), Layout.single(0), end_s)
        for name, end_s in (("a", 1.0), ("b", 2.0))
    ]
    views["next"] = view("next", remaining_s=3.0, deadline_s=50.0)
    found = predict(views, running=running, ranks=[0], now_s=0.5, policy="fcfs")
    assert found.ends_s == {"a": 10.0, "b": 10.0, "next": 13.0}
