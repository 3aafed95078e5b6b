"""Folders that gfgen wrote when a journal had an entry for each rank of a dispatch (journal version 1).

`tests/data/one_event_per_rank` has the output folder of `gfgen run jobs.jsonl --ranks 2`, stopped after some
steps under `fcfs,degree=1` and again under `legacy`, and the journal of a simulated run.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

from builders import make_job, read_jobs
from journal_reader import read_runs
from replay import replay
from test_workers import find_model

from gfgen.runtime.core.admission import admit
from gfgen.runtime.core.events import RankTimes, TaskDone, TaskFailed
from gfgen.runtime.files import resume
from gfgen.runtime.files.journal import Journal, first_arrivals, first_job_file
from gfgen.runtime.ipc.slab import Slab, SlabPlan

DATA = Path(__file__).parent.parent / "data" / "one_event_per_rank"


def ends_of(run):
    events = [event for turn in run.turns for event in turn.events]
    return [event for event in events if isinstance(event, TaskDone | TaskFailed)]


def test_a_journal_with_an_entry_per_rank_has_one_event_per_dispatch():
    for run in read_runs(DATA / "simulated.jsonl"):
        dispatches = {d[0]: d for turn in run.turns for d in turn.dispatches or ()}
        ends = ends_of(run)
        assert sorted(end.dispatch for end in ends) == sorted(dispatches)
        for end in ends:
            if isinstance(end, TaskDone):
                assert [times.rank for times in end.times] == dispatches[end.dispatch][3]
        assert any(len(end.times) == 2 for end in ends if isinstance(end, TaskDone))
        assert any(isinstance(end, TaskFailed) and len(dispatches[end.dispatch][3]) == 2 for end in ends)


def test_a_journal_with_an_entry_per_rank_is_replayed_until_a_task_is_predicted_otherwise():
    """The version that wrote it predicted means, and so decided at other moments from turn 50 on."""
    jobs = [make_job(f"job-{idx}", steps=2 + idx, arrival_s=0.2 * idx) for idx in range(5)]
    (run,) = read_runs(DATA / "simulated.jsonl")
    outcome = replay(run, jobs)
    assert str(outcome.difference).startswith("turn 50, at 1.176088 s: ")
    assert (outcome.num_turns, outcome.num_dispatches) == (49, 22)


def test_a_run_goes_on_with_an_old_journal(tmp_path):
    path = tmp_path / "journal.jsonl"
    shutil.copy(DATA / "journal.jsonl", path)
    before = first_arrivals(path)
    assert {job_id for job_id, _ in before} == {"fox", "owl", "elk"}
    journal = Journal(path, header={"policy": "srtf", "started_at": 5.0})
    journal.append(TaskDone(1.0, 90, (RankTimes(1, 0.0, 1.0, idle_s=0.5), RankTimes(0, 0.0, 0.9))))
    journal.close()
    assert list(tmp_path.iterdir()) == [path], "it was not moved away"
    assert (first_arrivals(path), first_job_file(path)) == (before, "../jobs.jsonl")
    first, second, new = read_runs(path)
    assert [len(end.times) for end in ends_of(first)] == [1] * 29
    assert {len(end.times) for end in ends_of(second)} == {2}
    assert ends_of(new) == [TaskDone(1.0, 90, (RankTimes(1, 0.0, 1.0, idle_s=0.5), RankTimes(0, 0.0, 0.9)))]


def test_a_stopped_job_of_an_old_folder_goes_on(tmp_path):
    specs = read_jobs(DATA / "jobs.jsonl").specs
    jobs, problems = admit(specs, default_model="shapes", find_model=find_model)
    assert not problems
    path = resume.resume_path(tmp_path, "owl")
    path.parent.mkdir()
    path.write_bytes(gzip.decompress((DATA / "owl.state.gz").read_bytes()))
    header = json.loads(path.read_bytes().partition(b"\n")[0])
    points = resume.find(
        tmp_path,
        jobs,
        weights_mark=lambda _: header["weights"],  # it names the times of the files of that checkout
        computed_with={"device": "cpu", "vae_dtype": "auto", "has_random_weights": False},
    )
    assert {job_id: (p.next_index, p.producer, p.last_number) for job_id, p in points.items()} == {
        "owl": (40, 56, 56)
    }
    (owl,) = [job for job in jobs if job.job_id == "owl"]
    fd = resume.restore(points["owl"], owl)
    slab = Slab(fd, SlabPlan.of(owl.trajectory))
    assert slab.producer("latents", 40) == 56
    os.close(fd)
