"""The run's side of the link, with a front that only listens and asks."""

from __future__ import annotations

import select
import socket
import threading
import time
from dataclasses import replace

import pytest
from builders import make_job, simulated_control

from gfgen.errors import RunError
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import (
    JobCancelled,
    ModelsChanged,
    PolicyChanged,
    PriorityChanged,
    RankLoaded,
    RankLost,
    RankReady,
    TaskDone,
)
from gfgen.runtime.core.observer import JobOutcome, with_view
from gfgen.runtime.simulate.choosers import ThreadedChooser
from gfgen.server import bridge as run_bridge
from gfgen.server.bridge import MAX_AT_ONCE, Joined, Left, RunBridge
from gfgen.server.protocol.link import (
    CancelJobs,
    MessageSocket,
    OpenJobIds,
    OutcomesStored,
    ProgressUpdate,
    RankStates,
    RunInfo,
    SubmitJobs,
    pack,
)
from gfgen.server.shown.mirror import RunMirror
from gfgen.snapshot import RunningTask

SERVING = RunInfo(max, max, (), "cpu", 2, "srtf", 0.0)


class Front:
    """The other end of a link; keeps all notes."""

    def __init__(self, bridge):
        ours, self.end = socket.socketpair()
        self.notes = []
        self.link = MessageSocket(ours)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        bridge.received(Joined(self.link))

    def _read(self):
        other = MessageSocket(self.end)
        while (notes := other.receive()) is not None:
            self.notes += notes

    def leave(self):
        self.link.close()
        self._reader.join(5)
        self.end.close()

    def of(self, *kinds):
        return [note for note in self.notes if isinstance(note, kinds)]

    def hear(self, kind, count):
        """Wait for so many notes of one kind; the door sends in a thread of its own."""
        deadline_s = time.monotonic() + 60
        while len(self.of(kind)) < count and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return self.of(kind)


@pytest.fixture
def asked():
    return []


@pytest.fixture
def bridge(asked):
    made = RunBridge(on_policy=asked.append)
    made._run_info = SERVING
    yield made
    made.close()


@pytest.fixture
def front(bridge):
    front = Front(bridge)
    yield front
    front.leave()


def say(bridge, *messages, now_s=1.0):
    """What the loop learns of these messages."""
    for message in messages:
        bridge.received(message)
    return list(bridge.take_events(now_s))


def begin(bridge, num_ranks=2):
    for observer in with_view([bridge]):
        observer.began((), num_ranks=num_ranks, policy="srtf")


def tell(bridge, *happened):
    """What the loop tells of these dispatches and events."""
    for each in happened:
        for observer in (bridge.view, bridge):
            (observer.dispatched if isinstance(each, Dispatch) else observer.applied)(each)


def ids(jobs):
    return [job.job_id for job in jobs]


def test_what_the_front_has_accepted_is_taken_once(bridge):
    assert say(bridge, SubmitJobs((make_job("a"),)), SubmitJobs((make_job("b"), make_job("a")))) == []
    assert ids(bridge.take()) == ["a", "b"]
    assert bridge.take() == []
    say(bridge, SubmitJobs((make_job("a"),)))
    assert bridge.take() == []


def test_a_job_is_cancelled_by_an_event_or_dropped_while_it_waits(bridge):
    say(bridge, SubmitJobs((make_job("a"), make_job("b"))))
    assert say(bridge, CancelJobs(("b",))) == []
    assert ids(bridge.take()) == ["a"]
    assert say(bridge, CancelJobs(("a",)), now_s=3.0) == [JobCancelled(3.0, "a")]


def test_a_priority_changes_by_an_event_or_while_the_job_waits(bridge):
    say(bridge, SubmitJobs((make_job("a"),)))
    assert say(bridge, PriorityChanged(0.0, "a", 7)) == []
    assert [job.spec.priority for job in bridge.take()] == [7]
    assert say(bridge, PriorityChanged(0.0, "a", -1), now_s=3.0) == [PriorityChanged(3.0, "a", -1)]


def test_what_is_much_comes_in_parts_and_rings_for_the_rest(bridge):
    names = [f"job-{number}" for number in range(10 * MAX_AT_ONCE)]
    say(bridge, *(SubmitJobs((make_job(name),)) for name in names))
    parts = []
    while jobs := bridge.take():
        parts.append(ids(jobs))
    assert [len(part) for part in parts] == [MAX_AT_ONCE] * 10
    assert [name for part in parts for name in part] == names
    bridge.received(CancelJobs(tuple(names)))
    told = []
    while select.select([bridge], [], [], 0)[0]:
        told.append([event.job_id for event in bridge.take_events(1.0)])
    assert [len(part) for part in told if part] == [MAX_AT_ONCE] * 10
    assert [name for part in told for name in part] == names


def test_another_policy_is_an_event_and_changes_who_chooses(bridge, asked):
    assert say(bridge, PolicyChanged(0.0, "edf", "x"), now_s=2.0) == [PolicyChanged(2.0, "edf", "x")]
    assert asked == ["edf"]


def test_the_run_begins_with_what_the_store_has_open(bridge, front):
    bridge.received(SubmitJobs((make_job("a"),)))
    bridge.received(OpenJobIds(("a",)))
    assert ids(bridge.open(SERVING, is_stopped=lambda: False)) == ["a"]
    bridge.close()
    front.leave()
    assert front.of(RunInfo) == [SERVING]


def test_a_stop_while_it_waits_for_the_front_is_heeded(bridge, monkeypatch):
    assert bridge.open(SERVING, is_stopped=lambda: True) is None
    monkeypatch.setattr(run_bridge, "OPEN_JOBS_S", 0.1)
    with pytest.raises(RunError, match=r"did not send the open jobs within 0\.1 s"):
        bridge.open(SERVING, is_stopped=lambda: False)


def test_a_front_that_dies_too_often_ends_the_run_with_the_reason(bridge):
    bridge.received(RunError("it died five times"))
    with pytest.raises(RunError, match="five times"):
        bridge.take_events(1.0)


def test_everything_that_happens_is_told_in_its_order(bridge, front):
    control, recorder = simulated_control([make_job("a", steps=2), make_job("b", steps=3)])
    control.observers = (*control.observers, *with_view([bridge]))
    control._refresh_s = 0.0
    bridge.take_events(0.0)
    control.run()
    bridge.close()
    front.leave()
    assert [d.number for d in front.of(Dispatch)] == [d.number for d in recorder.dispatches]
    assert front.of(TaskDone) == [e for e in recorder.events if isinstance(e, TaskDone)]
    assert [o.info.job_id for o in front.of(JobOutcome)] == recorder.end_order
    rows = [row for note in front.of(ProgressUpdate) for row in note.rows]
    assert {job_id for job_id, *_ in rows} == {"a", "b"}
    remaining = [remaining_s for job_id, index, remaining_s, *_ in rows if job_id == "b" and index > 3]
    assert remaining == sorted(remaining, reverse=True)


def test_a_new_front_is_told_where_everything_stands(bridge):
    first = Front(bridge)
    bridge.take_events(0.0)
    begin(bridge)
    tell(bridge, RankReady(0.0, 0, 1, 0.0), RankReady(0.0, 1, 3, 0.0))
    say(bridge, SubmitJobs((make_job("a"), make_job("b"))))
    assert ids(bridge.take()) == ["a", "b"]
    control, recorder = simulated_control([make_job("a", steps=1), make_job("done", steps=1)], num_ranks=1)
    control.run()
    dispatch = recorder.dispatches[0]
    tell(bridge, dispatch, PolicyChanged(1.0, "edf", "x"))
    bridge.ended(recorder.outcomes[-1])
    bridge.received(Left(first.link))
    first.leave()
    second = Front(bridge)
    wanted = say(bridge, SubmitJobs((make_job("a"),)), OpenJobIds(("a",)))
    bridge.close()
    second.leave()
    (ranks,) = second.of(RankStates)
    assert [(state.status, state.num_restarts) for state in ranks.states] == [("idle", 0), ("idle", 2)]
    assert second.of(Dispatch) == [dispatch]
    assert second.of(PolicyChanged) == [PolicyChanged(1.0, "edf", "x")]
    assert second.of(JobOutcome) == [recorder.outcomes[-1]]
    assert wanted == [JobCancelled(1.0, "b")], "what the store has not open is not wanted any more"
    assert bridge.take() == []


def test_an_end_that_is_predicted_anew_is_told_once_and_to_whoever_comes_later(bridge):
    first = Front(bridge)
    bridge.take_events(0.0)
    control, recorder = simulated_control([make_job("a", steps=1)], num_ranks=1)
    control.run()
    dispatch = recorder.dispatches[0]
    begin(bridge)
    tell(bridge, dispatch)
    snapshot = control.state.snapshot()
    view = RunningTask(dispatch.task, dispatch.layout, dispatch.predicted_end_s)
    for end_s in (dispatch.predicted_end_s, 70.0, 70.0, 80.0):
        bridge.refreshed(replace(snapshot, running=(replace(view, predicted_end_s=end_s),)))
    heard = first.hear(ProgressUpdate, 4)
    bridge.received(Left(first.link))
    second = Front(bridge)
    bridge.take_events(1.0)
    bridge.refreshed(replace(snapshot, running=(replace(view, predicted_end_s=80.0),)))
    bridge.close()
    for front in (first, second):
        front.leave()
    assert [note.ends for note in heard if note.ends] == [
        ((dispatch.number, end_s),) for end_s in (dispatch.predicted_end_s, 70.0, 80.0)
    ]
    assert second.of(Dispatch) == [dispatch]
    assert [note.ends for note in second.of(ProgressUpdate)] == [((dispatch.number, 80.0),)]


def live_of_a_new_front(bridge):
    """What it shows, by all that it is told when it joins."""
    mirror, front = RunMirror(now=lambda: 7.0, monotonic=lambda: 7.0, max_open=10), Front(bridge)
    bridge.take_events(0.0)
    bridge.close()
    front.leave()
    for note in front.notes:
        mirror.apply(note)
    return mirror


def test_a_new_front_knows_that_a_rank_which_died_over_its_models_is_ready_with_them(bridge):
    begin(bridge)
    tell(
        bridge,
        RankReady(0.0, 0, 1, 0.0),
        RankReady(0.0, 1, 1, 0.0),
        ModelsChanged(1.0, ("wan",), 5.0, "x"),
        RankLost(2.0, 1, 1, "killed while it was loading"),
        RankReady(6.0, 1, 2, 4.0),
    )
    mirror = live_of_a_new_front(bridge)
    assert [rank.status for rank in mirror.run.ranks.values()] == ["loading", "idle"]
    mirror.apply(RankLoaded(8.0, 0, 7.0))
    assert [rank.status for rank in mirror.run.ranks.values()] == ["idle", "idle"]


def test_a_new_front_knows_that_a_rank_with_the_models_of_now_was_lost(bridge):
    begin(bridge)
    tell(
        bridge,
        ModelsChanged(1.0, ("wan",), 5.0, "x"),
        RankLoaded(2.0, 0, 1.0),
        RankLoaded(2.0, 1, 1.0),
        RankLost(3.0, 1, 1, "killed", is_retired=True),
    )
    assert [rank.status for rank in live_of_a_new_front(bridge).run.ranks.values()] == ["idle", "retired"]


def test_an_outcome_is_told_until_it_is_noted(bridge):
    control, recorder = simulated_control([make_job("a")])
    control.run()
    say(bridge, SubmitJobs((make_job("a"),)))
    bridge.take()
    (outcome,) = recorder.outcomes
    bridge.ended(outcome)
    say(bridge, OutcomesStored(("a",)))
    front = Front(bridge)
    bridge.take_events(0.0)
    bridge.close()
    front.leave()
    assert front.of(JobOutcome) == []


def test_a_front_that_never_reads_is_given_up_and_the_loop_does_not_wait(bridge, monkeypatch):
    monkeypatch.setattr(run_bridge, "MAX_UNSENT", 1000)
    ours, theirs = socket.socketpair()
    link = MessageSocket(ours)
    bridge.received(Joined(link))
    bridge.take_events(0.0)
    for number in range(200_000):
        bridge.applied(PolicyChanged(float(number), "edf", "x" * 500))
        if link._socket.fileno() < 0:
            break
    assert link._socket.fileno() < 0
    theirs.close()


def test_messages_arrive_one_by_one():
    ours, theirs = socket.socketpair()
    messages = [CancelJobs(("a",)), OpenJobIds(()), OutcomesStored(tuple("abc"))]
    ours.sendall(b"".join(map(pack, messages)))
    ours.close()
    link = MessageSocket(theirs)
    assert [link.receive() for _ in range(4)] == [*messages, None]
    link.close()


def test_a_chooser_can_be_left_out_and_taken_up_again():
    chooser = ThreadedChooser(None)
    chooser.consider(None)
    assert chooser.take() is None
    chooser.follow(load_policy("auto").choose)
    assert chooser._choose is not None
    chooser.follow(None)
    assert chooser.take() is None
    chooser.close()
