"""What observers of a cluster see: the ranks of all nodes, and the steps of jobs on them."""

import json
from dataclasses import replace

import pytest
from builders import Recorder, make_job
from fake_cluster import FakeCluster, driver_on

from gfgen.cluster.node import NodeNotes
from gfgen.cluster.watchers import Watchers
from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import RankLost, RankReady, RankTimes, TaskDone, TaskFailed
from gfgen.runtime.core.observer import with_view
from gfgen.runtime.files.trace import TraceWriter
from gfgen.session.live import LiveRun
from gfgen.snapshot import Snapshot

JOB = make_job("fox", steps=4)
STEP = JOB.trajectory.task(3)
PAIR = Layout((0, 1), ulysses=2)


class Run:
    """Watchers of a run with one job, on nodes of two ranks."""

    def __init__(self, *observers):
        self.recorder = Recorder()
        self.watchers = Watchers(with_view([self.recorder, *observers]))
        self.watchers.began((JOB.info,), num_ranks=4, policy="fcfs")

    def join(self, *names):
        for name in names:
            self.watchers.join(name, 2, now_s=0.0)

    def tell(self, name, *notes, begins_s=100.0):
        self.watchers.take(NodeNotes(name, notes, begins_s))


def dispatch(number=1, layout=PAIR):
    return Dispatch(number, STEP, layout, submitted_s=1.0, predicted_start_s=1.0, predicted_end_s=2.0)


def done(number=1):
    return TaskDone(2.0, number, (RankTimes(0, 1.0, 2.0), RankTimes(1, 1.0, 2.0)))


def snapshot(*waiting):
    views = {view.job_id: view for view in waiting}
    return Snapshot(now_s=103.0, open=views, busy={}, running=(), ranks=(), max_degree=1, costs=None)


@pytest.fixture
def view():
    """The job as the driver sees it."""
    driver, _ = driver_on(FakeCluster(num_nodes=0), [JOB])
    driver.begin()
    for event in driver.clock.due():
        driver.record(event)
    return driver.state.snapshot().open[JOB.job_id]


def test_tasks_have_the_ranks_and_times_of_the_whole_cluster():
    run = Run()
    run.join("a", "b")
    run.tell("b", dispatch(number=40), done(number=40))
    (seen,) = run.recorder.dispatches
    assert (seen.number, seen.layout.ranks, seen.submitted_s) == (1, (2, 3), 101.0)
    ended = next(event for event in run.recorder.events if isinstance(event, TaskDone))
    assert ended == TaskDone(102.0, 1, (RankTimes(2, 101.0, 102.0), RankTimes(3, 101.0, 102.0)))


def test_equal_numbers_of_two_nodes_are_two_tasks():
    run = Run()
    run.join("a", "b")
    run.tell("a", dispatch(), done())
    run.tell("b", dispatch())
    assert [each.number for each in run.recorder.dispatches] == [1, 2]


def test_whole_jobs_on_lanes_are_not_seen():
    run = Run()
    run.watchers.applied(TaskDone(1.0, 7, (RankTimes(12, 0.0, 1.0),)))
    run.watchers.applied(RankReady(1.0, 12, 1, 0.0))
    assert run.recorder.events == []


def test_what_runs_on_a_lost_node_fails_and_its_ranks_do_not_come_again():
    run = Run()
    run.join("a")
    run.tell("a", dispatch())
    run.watchers.lose("a", "killed", now_s=5.0)
    assert run.recorder.events[-1] == TaskFailed(5.0, 1, "killed", lost=True)
    run.join("a-2")
    assert run.recorder.events[-1] == RankReady(0.0, 3, 1, 0.0)
    run.tell("a", done())
    assert not isinstance(run.recorder.events[-1], TaskDone), "too late"


def test_tasks_of_jobs_of_an_earlier_run_are_not_seen():
    run = Run()
    run.join("a")
    run.watchers.began((), num_ranks=2, policy="fcfs")
    run.tell("a", dispatch(), done())
    assert run.recorder.dispatches == []


def test_the_live_record_has_the_steps_of_a_node(tmp_path, view):
    live = LiveRun(tmp_path, started_at=0.0)
    run = Run(live)
    run.join("a", "b")
    run.tell("b", dispatch(), replace(view, next_task=STEP, last_layout=PAIR), RankLost(1.0, 0, 1, "killed"))
    run.watchers.refreshed(snapshot())
    record = json.loads((tmp_path / ".gfgen.live.json").read_text())
    (job,) = record["jobs"]
    assert (job["stage"], job["step"], job["ranks"]) == (Stage.DENOISE, 1, [2, 3])
    assert [(rank["node"], rank["state"]) for rank in record["ranks"]] == [
        ("a", "idle"), ("a", "idle"), ("b", "busy"), ("b", "busy"),
    ]  # fmt: skip
    run.watchers.lose("b", "killed", now_s=5.0)
    run.watchers.refreshed(snapshot(view))
    record = json.loads((tmp_path / ".gfgen.live.json").read_text())
    assert record["jobs"][0]["state"] == "waiting"
    assert [rank["node"] for rank in record["ranks"]] == ["a", "a"]
    live.close()


def test_unchanged_views_are_the_same_objects(view):
    run, seen = Run(), []
    run.recorder.refresh_s = 1.0
    run.recorder.refreshed = lambda shown: seen.append(shown.open["fox"])
    run.watchers.refreshed(snapshot(view))
    run.watchers.refreshed(snapshot(view))
    assert seen[0] is seen[1]
    assert seen[0].num_tasks == JOB.info.num_tasks


def test_a_trace_has_a_lane_for_each_rank_of_each_node(tmp_path):
    run = Run(TraceWriter(tmp_path / "t.json"))
    run.join("a", "b")
    run.tell("b", dispatch(), done())
    for observer in run.watchers._observers:
        observer.close()
    entries = json.loads((tmp_path / "t.json").read_text())
    lanes = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name" and e["pid"] == 1}
    assert lanes == {n: f"node {'ab'[n // 2]}, rank {n}" for n in range(4)}
    slices = [(e["tid"], e["ts"]) for e in entries if e["ph"] == "X" and "stage" in e["args"]]
    assert slices == [(2, 101e6), (3, 101e6)]
