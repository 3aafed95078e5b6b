"""What a run learns does not depend on whether it was the first one on its machine."""

import json
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
from builders import make_job
from journal_reader import read_runs
from test_state import Cluster

from gfgen.graph import Stage, Task, Trajectory
from gfgen.layout import Layout
from gfgen.policies.allotment import makespan
from gfgen.runtime.control.state import State
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock
from gfgen.runtime.files.journal import JOURNAL_NAME, Journal
from gfgen.runtime.files.manifest import MANIFEST_NAME, read_manifest
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import OVERHEAD_S, CostModel

ONE = (1, 1, 1)
RECORDED = Path(__file__).parents[1] / "data" / "first_and_second_run"
"""Folders `first` and `second`, each with the journal and the manifest of a run on GPUs."""
STAGES = {Stage.ENCODE: 0.05, Stage.PREPARE: 0.01, Stage.DENOISE: 0.2, Stage.DECODE: 1.0}


def learned(folder):
    """Predictions after the run of a folder, by model, shape, stage and degrees; of measured tasks alone."""
    kinds = {
        job_id: (str(line["model"]), json.dumps([line["shape"], line["scales"]]), line["steps"])
        for job_id, line in read_manifest(folder / MANIFEST_NAME).items()
    }
    costs, flops = CostModel(), dict.fromkeys(Stage, 1e12)
    (run,) = read_runs(folder / JOURNAL_NAME)
    dispatches = {}
    for turn in run.turns:
        for event in turn.events:
            if isinstance(event, events.TaskDone):
                _, job_id, index, _, degrees, *_ = dispatches[event.dispatch]
                model, shape, steps = kinds[job_id]
                cost_class = costs.cost_class(model, shape, flops=flops, state_bytes=1)
                kind = cost_class, Trajectory(job_id, steps).task(index).stage, tuple(degrees)
                if event.is_first_use:
                    prepared_s = max(each.prepared_s for each in event.times)
                    costs.observe_first_use(*kind, event.busy_s, prepared_s=prepared_s)
                else:
                    costs.observe(*kind, event.busy_s)
        dispatches |= {each[0]: each for each in turn.dispatches or ()}
    return {
        (each.model, each.shape, *key): recent.value
        for each in costs.classes.values()
        for key, recent in each.measured.items()
    }


def assert_as_good(first, second, *, least_s=OVERHEAD_S):
    """Within 10%, or `least_s`."""
    both = first.keys() & second.keys()
    assert {stage for *_, stage, _ in both} >= {Stage.DENOISE, Stage.DECODE}
    off = {key: (first[key], second[key]) for key in both}
    off = {key: (a, b) for key, (a, b) in off.items() if abs(a - b) > max(0.1 * b, least_s)}
    assert not off


def write_run(folder, random, *, is_first):
    """Jobs of two shapes on two ranks, whose first uses take 5 to 100 times as long in the first run."""
    folder.mkdir()
    journal, used = Journal(folder / JOURNAL_NAME, header={"started_at": 0.0}), defaultdict(set)
    now_s, number, lines = 0.0, 0, []
    for place in range(12):
        job_id, shape, rank = f"job{place}", place % 2, random.randrange(2)
        shown = {"width": 64 << shape, "height": 64, "frames": 1}
        lines.append({"version": 1, "id": job_id, "status": "done", "model": "m", "shape": shown,
                      "scales": {}, "steps": 6})  # fmt: skip
        trajectory = Trajectory(job_id, 6)
        for task in map(trajectory.task, range(trajectory.num_tasks)):
            kind = (task.stage, shape, min(2, task.step or 0))
            is_new, number = is_first and kind not in used[rank], number + 1
            used[rank].add(kind)
            took_s = STAGES[task.stage] * (1 + shape) * random.uniform(0.97, 1.03)
            took_s *= random.uniform(5, 100) if is_new else 1.0
            dispatch = Dispatch(number, task, Layout.single(rank), now_s, now_s, now_s + took_s)
            journal.end_turn(now_s, [dispatch])
            times = events.RankTimes(rank, now_s, now_s + took_s, is_first_use=is_new)
            now_s += took_s
            journal.append(events.TaskDone(now_s, number, (times,)))
    journal.close()
    (folder / MANIFEST_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("seed", range(3))
def test_a_first_run_predicts_as_well_as_a_second_one(tmp_path, seed):
    random = Random(seed)
    for name in ("first", "second"):
        write_run(tmp_path / name, random, is_first=name == "first")
    assert_as_good(learned(tmp_path / "first"), learned(tmp_path / "second"))


@pytest.mark.skipif(not RECORDED.is_dir(), reason="no runs were recorded")
def test_a_first_run_on_gpus_predicted_as_well_as_the_second_one():
    """Encodes, and decodes of small pictures, differ by some milliseconds between any two runs."""
    assert_as_good(learned(RECORDED / "first"), learned(RECORDED / "second"), least_s=0.01)


def test_an_event_that_is_marked_on_one_rank_is_a_first_use_and_counts_in_its_job():
    cluster = Cluster(make_job("a"))
    cost_class = cluster.state.jobs.records["a"].cost_class
    for index in (0, 1):
        cluster.done(cluster.begin("a", index, 0))
    dispatch = cluster.begin("a", 2, 0, 1)
    cluster.clock.advance(9.0)
    times = (events.RankTimes(0, 1.0, 9.0), events.RankTimes(1, 1.0, 8.5, is_first_use=True, prepared_s=0.5))
    cluster.state.apply(events.TaskDone(9.0, dispatch.number, times))
    key = (Stage.DENOISE, (1, 2, 1))
    assert key not in cost_class.measured
    assert cost_class.first_uses == {key: (8.0, 0.5)}
    assert cluster.state.jobs.records["a"].outcome.first_uses_s == 8.0


def priced(job, *, warm=()):
    """A state of one job on two ranks, of which only rank 0 has run something, and policies know prices."""
    costs, clock = CostModel(), Clock(virtual=True)
    start = RunStart(num_ranks=2, first_use_s=0.5, warm=[("fake", job.shape, way) for way in warm])
    state = State([job], start, clock=clock, costs=costs)
    for rank in range(2):
        state.apply(events.RankReady(0.0, rank, 1, 0.0))
    state.apply(events.JobArrived(0.0, job.job_id))
    return state, costs, costs.class_of(job)


@pytest.mark.parametrize(("step_s", "warm", "degree"), [(0.1, (), 1), (1.0, (), 2), (0.1, [(1, 2, 1)], 2)])
def test_a_job_is_not_spread_to_save_less_than_the_first_step_there_costs(step_s, warm, degree):
    state, costs, cost_class = priced(make_job("a"), warm=warm)
    for stage in (Stage.ENCODE, Stage.PREPARE, Stage.DECODE, Stage.DENOISE):
        costs.observe(cost_class, stage, ONE, step_s)
    for index in range(2):
        (dispatch,) = state.begin(makespan(state.choice())[0])
        time_s = 1.0 + index
        state.clock.advance(time_s)
        times = (events.RankTimes(0, time_s - step_s, time_s),)
        state.apply(events.TaskDone(time_s, dispatch.number, times))
    (decision,) = makespan(state.choice())
    assert decision.layout.degree == degree


def test_a_first_use_changes_what_policies_see_at_their_next_decision():
    state, costs, cost_class = priced(make_job("a"))
    before = state.choice().open["a"].remaining_s
    costs.observe_first_use(cost_class, Stage.DECODE, ONE, 0.1, prepared_s=0.0)
    after = state.choice().open["a"].remaining_s
    assert before - after > 0.4
    task = Task("a", 2, Stage.DENOISE, 0)
    assert state.choice().costs.first_use_s(task, Layout.single(0)) == 0.5
