"""Batches on real workers: what each job gets, and what a failure costs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from test_elastic import following
from test_stopped_tasks import of_kind, statuses
from test_workers import PICTURE, pixels, run

from gfgen.job.spec import JobSpec
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.devices import choose_devices
from gfgen.runtime.core.events import RankLost, TaskFailed
from gfgen.session.ranks import Ranks
from gfgen.session.session import Session, SessionOptions

NAMES = ("first", "second", "third")


def jobs(order="", *, of="first"):
    return [
        JobSpec(id=name, prompt=f"a {name} fox | {order if name == of else ''}", **PICTURE | {"seed": seed})
        for seed, name in enumerate(NAMES)
    ]


def batch_sizes(recorder):
    """In how large batches steps were dispatched."""
    return sorted({len(each.batch or "1") for each in recorder.dispatches if each.task.step is not None})


@pytest.mark.parametrize("pool_name", ["mortal_pool", "gpu_pool"])
def test_pictures_of_a_batch_are_those_of_their_jobs_but_for_rounding(request, tmp_path, pool_name):
    pool = request.getfixturevalue(pool_name)
    together = run(pool, tmp_path / "together", *jobs(), batch=3, lookahead_s=0.005)
    assert batch_sizes(together) == [3]
    assert batch_sizes(run(pool, tmp_path / "alone", *jobs())) == [1]
    for name in NAMES:
        both = [pixels(tmp_path / folder / f"{name}.png").astype(int) for folder in ("together", "alone")]
        assert np.abs(both[0] - both[1]).max() <= 1


@pytest.mark.parametrize("pool_name", ["mortal_pool", "gpu_pool"])
@pytest.mark.parametrize(
    ("order", "num_failed", "sizes"), [("nan", 1, [1, 2, 3]), ("fail", 3, [1, 3]), ("die", 3, [1, 3])]
)
def test_a_failure_in_a_batch_costs_its_jobs_a_step(request, tmp_path, pool_name, order, num_failed, sizes):
    pool = request.getfixturevalue(pool_name)
    specs = jobs(f"{order} rank=0 step=1 times=1", of="second")
    specs[1] = replace(specs[1], id=f"{order}-{pool_name}")
    recorder = run(pool, tmp_path, *specs, batch=3, policy=following((0,)))
    assert set(statuses(recorder).values()) == {"done"}
    assert len(of_kind(recorder, TaskFailed)) == num_failed
    assert batch_sizes(recorder) == sizes
    assert len(of_kind(recorder, RankLost)) == (order == "die")


def test_a_session_forms_batches_and_its_records_say_so(mortal_pool, tmp_path, caplog):
    ranks, fcfs = Ranks(choose_devices("cpu", 3)), load_policy("fcfs")
    options = SessionOptions(output_dir=tmp_path, ranks=ranks, policy=fcfs, batch=2)
    lines = [{"id": name, "prompt": f"a {name} fox"} | PICTURE for name in NAMES]
    with Session(options, pool=mortal_pool) as session:
        session.run(session.admit(lines))
        session.run(session.admit([lines[0] | {"id": "alone"}]))
    manifest = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert {each["id"]: each.get("batch") for each in manifest} == dict(
        first=2, second=2, third=None, alone=None
    )
    assert "--batch has no effect" in caplog.text
