"""The live state, from what a run that is only acted would tell."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from acted_run import ActedRun, Part, job_info

from gfgen.layout import Layout
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.observer import Observer
from gfgen.server.http.streams import MAX_CHANGES, StateFeed, _job_events, change_between
from gfgen.server.protocol.link import ProgressUpdate, RunInfo
from gfgen.server.shown.mirror import RunMirror
from gfgen.server.shown.prometheus import ServerMetrics
from gfgen.server.shown.served_job import ServedJob
from gfgen.server.store import Ending, JobFacts

START = 1_000_000.0


class Clock:
    """Unix time of the play."""

    def __init__(self):
        self.now_s = 0.0
        self.start = START

    def __call__(self):
        return self.start + self.now_s


def facts_of(info, *, deadline_at=None):
    return JobFacts(
        id=info.job_id,
        kind="video",
        model="tiny-wan",
        prompt=info.spec.prompt,
        size="96x64",
        steps=info.spec.steps,
        seed=7,
        created_at=START,
        arrives_at=START,
        file=info.file,
        num_tasks=info.num_tasks,
        deadline_at=deadline_at,
    )


class Audience(Observer):
    """Tells a live state what a run tells its observers, as the door does."""

    def __init__(self, mirror, clock):
        self.mirror, self.clock = mirror, clock
        self.shown = []

    def dispatched(self, dispatch):
        self.mirror.apply(dispatch)
        self.shown.append(self.mirror.state())

    def applied(self, event):
        self.clock.now_s = event.time_s
        self.mirror.apply(event)

    def ended(self, outcome):
        status = {"done": "completed"}.get(outcome.status, outcome.status)
        ending = Ending(
            outcome.info.job_id, status, START + outcome.ended_s, met_deadline=outcome.met_deadline
        )
        self.mirror.end(outcome.info.job_id, ending, expires_at=None)

    def refreshed(self, snapshot):
        views = {**snapshot.open, **snapshot.busy}.values()
        rows = tuple((v.job_id, v.next_task.index, v.remaining_s, v.write_s, v.last_layout) for v in views)
        self.mirror.apply(ProgressUpdate(rows))
        self.mirror.forecast()


class Counted(ServerMetrics):
    def __init__(self):
        super().__init__()
        self.tasks, self.moves, self.ends = [], 0, []

    def dispatched(self, dispatch, model):
        self.moves += dispatch.source not in (None, dispatch.layout)

    def task_done(self, dispatch, model, busy_s):
        self.tasks.append((str(dispatch.task), busy_s))

    def ended(self, record):
        self.ends.append(record.facts.id)


@pytest.fixture
def mirror():
    clock = Clock()
    mirror = RunMirror(now=clock, monotonic=lambda: clock.now_s, max_open=10, metrics=Counted())
    mirror.clock = clock
    return mirror


def serve(mirror, *parts, num_ranks=2):
    """The live state of a server that has accepted these jobs."""
    mirror.apply(RunInfo(max, max, (), "cpu", num_ranks, "srtf", START, began_s=0.0))
    for rank in range(num_ranks):
        mirror.apply(events.RankReady(0.0, rank, 1, 0.0))
    records = []
    for part in parts:
        deadline_s = part.info.spec.deadline_s
        facts = facts_of(part.info, deadline_at=None if deadline_s is None else START + deadline_s)
        records.append(ServedJob(facts))
    mirror.add(records)
    return records


def play(mirror, *parts, num_ranks=2):
    records = serve(mirror, *parts, num_ranks=num_ranks)
    audience = Audience(mirror, mirror.clock)
    ActedRun(list(parts), num_ranks=num_ranks, observers=[audience]).play()
    return records, audience


def told(record, *kinds):
    bodies = [json.loads(each.body) for each in record.events]
    return [body for body in bodies if not kinds or body["type"] in kinds]


def test_a_job_goes_from_the_queue_through_its_stages_to_its_end(mirror):
    (record,), audience = play(mirror, Part(job_info("a", steps=3)), num_ranks=1)
    assert [e.kind for e in record.events] == (
        ["queued", "started", "stage", "stage", "step", "step", "step", "stage", "stage", "completed"]
    )
    assert [body["progress"] for body in told(record, "step")] == [42, 57, 71]
    assert record.job().status == "completed"
    assert mirror.records == {}
    assert [job.id for job in mirror.state().finished] == ["a"]
    statuses = [state.ranks[0].status for state in audience.shown]
    assert set(statuses) == {"busy"}
    assert mirror.state().ranks[0].status == "idle"


def test_ranks_that_share_a_step_are_one_task_of_one_job(mirror):
    part = Part(job_info("a", steps=2), degree=2)
    _, audience = play(mirror, part)
    shared = [state for state in audience.shown if state.ranks[1].task is not None]
    assert len(shared) == 2
    for state in shared:
        first, second = state.ranks
        assert first.task == second.task
        assert first.task.layout.ranks == [0, 1]
    bars = [bar for bar in mirror.state().timeline if bar.stage == "denoise"]
    assert [(bar.rank, bar.first_step, bar.last_step) for bar in bars] == [(0, 0, 1), (1, 0, 1)]


def test_the_queue_has_places_and_predictions_that_come_true(mirror):
    parts = [Part(job_info(name, steps=4)) for name in "abc"]
    records, audience = play(mirror, *parts, num_ranks=1)
    first = {job.id: job for job in audience.shown[1].open}
    assert [first[name].position for name in "abc"] == [None, 1, 2]
    assert first["b"].predicted_start_at == pytest.approx(first["a"].predicted_completion_at, abs=0.6)
    assert first["c"].predicted_completion_at == pytest.approx(records[2].ending.completed_at, rel=1e-5)
    assert [job.id for job in audience.shown[1].open] == ["a", "b", "c"]


def test_predictions_follow_a_clock_that_is_set(mirror):
    info = job_info("a", steps=4)
    (record,) = serve(mirror, Part(info), num_ranks=1)
    dispatch = Dispatch(1, record.task(0), Layout.single(0), 1.0, 1.0, 3.0)
    mirror.clock.now_s = 1.0
    mirror.apply(dispatch)
    mirror.apply(ProgressUpdate((("a", 1, 10.0, 0.0, Layout.single(0)),)))
    mirror.forecast()
    left_s = record.predicted_end_at - mirror.now()
    assert left_s == pytest.approx(12.0)
    for jump_s in (-3600.0, 90.0):
        mirror.now.start += jump_s
        mirror.forecast()
        state = mirror.state()
        assert state.open[0].predicted_completion_at - state.server_time == pytest.approx(left_s, abs=0.01)
        assert state.ranks[0].task.predicted_end_at - state.server_time == pytest.approx(2.0, abs=0.01)


def test_a_deadline_that_cannot_be_met_is_foreseen(mirror):
    parts = [Part(job_info("soon", deadline_s=99.0)), Part(job_info("late", deadline_s=8.0))]
    records, audience = play(mirror, *parts, num_ranks=1)
    middle = {job.id: job.will_meet_deadline for job in audience.shown[2].open}
    assert middle == {"soon": True, "late": False}
    assert [record.job().will_meet_deadline for record in records] == [True, False]


def test_the_meter_counts_tasks_once_and_moves(mirror):
    play(mirror, Part(job_info("a", steps=2), degree=2))
    counted = mirror.metrics
    assert [name for name, _ in counted.tasks] == ["encode", "prepare", "denoise 0", "denoise 1", "decode"]
    assert all(busy_s > 0 for _, busy_s in counted.tasks)
    assert counted.moves == 2
    assert counted.ends == ["a"]


def test_a_rank_that_dies_and_comes_back_is_seen(mirror):
    serve(mirror)
    mirror.apply(events.RankLost(1.0, 1, 1, "killed"))
    assert [rank.status for rank in mirror.state().ranks] == ["idle", "lost"]
    mirror.apply(events.RankReady(2.0, 1, 2, 0.5))
    state = mirror.state()
    assert [(rank.status, rank.restarts) for rank in state.ranks] == [("idle", 0), ("idle", 1)]
    mirror.apply(events.RankLost(3.0, 1, 2, "killed", is_retired=True))
    assert mirror.state().ranks[1].status == "retired"


def test_utilisation_is_the_share_of_the_last_minute(mirror):
    play(mirror, Part(job_info("a", steps=10)))
    mirror.clock.now_s = 50.0
    busy_s = 12.2  # ten steps of 1 s, and the rest
    state = mirror.state()
    assert sum(rank.utilisation for rank in state.ranks) == pytest.approx(busy_s / 50, abs=0.01)
    mirror.clock.now_s = 200.0
    assert [rank.utilisation for rank in mirror.state().ranks] == [0.0, 0.0]
    assert mirror.state().timeline == []


def test_a_running_task_is_shown_with_the_end_that_was_predicted_last(mirror):
    (record,) = serve(mirror, Part(job_info("a")), num_ranks=1)
    mirror.apply(ProgressUpdate((("a", 3, 10.0, 2.0, None),)))
    mirror.apply(Dispatch(7, record.task(2), Layout.single(0), 1.0, 1.0, 5.0))
    seen = mirror.state()
    mirror.apply(ProgressUpdate(ends=((7, 25.0), (6, 99.0))))
    mirror.forecast()
    (rank,) = change_between(seen, mirror.state()).ranks
    assert rank.task.predicted_end_at == START + 25.0
    assert record.job().predicted_completion_at == START + 37.0


def test_a_front_that_comes_later_learns_where_a_job_stands(mirror):
    (record,) = serve(mirror, Part(job_info("a", steps=5)))
    mirror.apply(ProgressUpdate((("a", 4, 3.0, 0.0, None),)))
    mirror.forecast()
    job = record.job()
    assert (job.status, job.step, job.stage, job.position) == ("in_progress", 2, "denoise", None)
    assert job.predicted_completion_at == pytest.approx(START + 3.0)


def test_a_policy_that_was_just_asked_for_is_the_one_that_decides(mirror):
    serve(mirror)
    mirror.apply(events.PolicyChanged(1.0, "edf", "deadlines are near"))
    mirror.policy_asked("fcfs")
    state = mirror.policy
    assert (state.policy, state.deciding, state.reason) == ("fcfs", "fcfs", None)
    mirror.apply(events.PolicyChanged(2.0, "fcfs", "asked for over HTTP"))
    assert mirror.policy.reason == "asked for over HTTP"


def test_stopping_is_told_to_whoever_follows_a_job(mirror):
    (record,) = serve(mirror, Part(job_info("a")))
    mirror.apply(events.StopRequested(1.0, 15))
    assert mirror.status == "draining"
    assert told(record)[-1]["type"] == "stopping"


def test_a_change_has_what_is_new_and_nothing_else(mirror):
    serve(mirror, Part(job_info("a")), Part(job_info("b")))
    seen = mirror.state()
    assert change_between(seen, mirror.state()) is None
    mirror.apply(ProgressUpdate((("a", 0, 5.0, 0.0, None),)))
    mirror.forecast()
    change = change_between(seen, mirror.state())
    assert [job.id for job in change.open] == ["a"]
    assert change.order == ["a", "b"]
    assert change.model_fields_set == {"server_time", "open", "order", "num_open"}
    seen = mirror.state()
    mirror.end("a", Ending("a", "cancelled", START + 1), expires_at=None)
    change = change_between(seen, mirror.state())
    assert (change.order, [job.id for job in change.finished]) == (["b"], ["a"])
    seen = mirror.state()
    mirror.remove(["a"])
    assert change_between(seen, mirror.state()).removed == ["a"]
    assert list(mirror.state().finished) == []


def test_frames_are_made_for_readers_alone_and_those_who_lag_start_anew(mirror):
    frames = StateFeed(mirror)
    serve(mirror, Part(job_info("a")))
    frames.tick()
    assert frames.number == 0
    frames.num_readers = 1
    assert frames.whole().startswith(b"event: state")
    for turn in range(MAX_CHANGES + 5):
        mirror.apply(events.PolicyChanged(float(turn), f"fcfs,degree={turn}", "x"))
        frames.tick()
        frames.tick()
    assert frames.number == MAX_CHANGES + 5
    assert frames.after(3) is None
    assert [number for number, _ in frames.after(frames.number - 2)] == [frames.number - 1, frames.number]
    assert frames.after(frames.number) == []


def test_prompts_in_the_live_state_are_short_and_in_answers_whole(mirror):
    (record,) = serve(mirror, Part(job_info("a", prompt="x" * 5000)))
    assert len(mirror.state().open[0].prompt) == 300
    assert len(record.job().prompt) == 5000


def test_who_follows_a_job_is_told_of_the_stop_that_comes_while_a_step_is_sent():
    mirror = RunMirror(now=Clock(), monotonic=lambda: 0.0)
    record = ServedJob(facts_of(job_info("a")))
    mirror.add([record])
    service = SimpleNamespace(mirror=mirror, store=SimpleNamespace(epoch=1))

    async def follow():
        kinds = []
        record.event("step", START, step=1, steps=4)
        async for chunk in _job_events(service, record, 0):
            kinds += re.findall(rb"event: (\w+)", chunk)
            if kinds == [b"queued", b"step"] or kinds == [b"step"]:
                mirror.drain()
                record.event("step", START, step=2, steps=4)
        return kinds

    kinds = asyncio.run(asyncio.wait_for(follow(), 5))
    assert kinds[-2:] == [b"step", b"stopping"]


def test_a_job_has_the_size_of_its_file_once_that_is_known():
    record = ServedJob(replace(facts_of(job_info("a")), frames=9, fps=8))
    assert (record.job().size, record.job().frames, record.job().seconds) == ("96x64", 9, "1.125")
    shape = {"width": 128, "height": 256, "frames": 4, "fps": 8}
    entry = {"timings": {"stages_s": {"denoise": 2.0}, "rank_s": 4.0}, "shape": shape}
    entry |= {"peak_memory_mb": 512.5, "steps_reused": 2}
    record.end(Ending("a", "completed", START + 5.0, manifest=entry), expires_at=None)
    job = record.job()
    assert (job.size, job.frames, job.seconds) == ("128x256", 4, "0.5")
    assert (job.rank_s, job.peak_memory_mb, job.steps_reused) == (4.0, 512.5, 2)


def test_what_waits_for_the_end_of_a_job_is_not_woken_by_its_steps():
    async def play():
        record = ServedJob(facts_of(job_info("a")))
        waiting = asyncio.create_task(record.ends.wait(5.0))
        await asyncio.sleep(0)
        for _ in range(3):
            record.event("step", START)
            await asyncio.sleep(0)
        assert not waiting.done()
        record.end(Ending("a", "completed", START), expires_at=None)
        record.end_event()
        return await waiting

    assert asyncio.run(play())
