"""The process of a node and the way of its files, without Ray and without a session."""

import queue
from dataclasses import replace
from multiprocessing import Pipe

import pytest
from builders import make_job, simulate

from gfgen.cluster.member import JobFeed, Start
from gfgen.cluster.ray_node import FileDelivery
from gfgen.errors import OutputError, Problem
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import JobCancelled, RankReady, StopRequested, TaskDone
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.ipc.content import content_of
from gfgen.runtime.simulate.choosers import ThreadedChooser
from gfgen.session.feed import Cancel, Ended


class Wire:
    """A feed, and the driver's end of its connection."""

    def __init__(self, admission):
        self.end, theirs = Pipe()
        self.feed = JobFeed(theirs, admission, ThreadedChooser(None))

    def send(self, *messages):
        """Events that the control loop gets after these messages."""
        for message in messages:
            self.end.send(message)
        found, seen = [], 0
        while seen < len(messages):
            size = self.feed._inbox.qsize()
            if size:
                found += self.feed.take_events(1.0)
                seen += size
        return found


@pytest.fixture
def wire():
    return Wire(lambda specs: ([make_job(spec.id) for spec in specs], ()))


def test_jobs_come_with_their_attempts_and_end_with_them(wire):
    job = make_job("fox")
    wire.send(Start(job.info, 7))
    (taken,) = wire.feed.take()
    assert taken.info.file == "attempt-7/fox.png"
    assert taken.spec == job.spec
    wire.feed.ended(JobOutcome(taken.info, "done"))
    assert wire.end.recv() == Ended(7, JobOutcome(taken.info, "done"))


def test_a_running_job_is_cancelled_by_an_event_and_a_waiting_one_at_once(wire):
    wire.send(Start(make_job("runs").info, 1))
    wire.feed.take()
    assert wire.send(Cancel(1)) == [JobCancelled(1.0, "runs")]
    assert wire.send(Start(make_job("waits").info, 2), Cancel(2)) == []
    assert wire.end.recv().outcome.status == "cancelled"
    assert wire.feed.take() == []


def test_an_attempt_that_was_cancelled_before_it_came_does_not_start(wire):
    wire.send(Cancel(3), Start(make_job("late").info, 3))
    ended = wire.end.recv()
    assert (ended.attempt, ended.outcome.status) == (3, "cancelled")
    assert wire.feed.take() == []


def test_a_job_that_does_not_fit_the_node_fails_with_the_reason():
    wire = Wire(lambda specs: ((), [Problem(4, "size", "9x9", "16 at least")]))
    wire.send(Start(make_job("tiny").info, 5))
    assert wire.end.recv().outcome.error == "size = 9x9: 16 at least"


def test_the_tasks_of_a_job_are_told_before_its_end(wire):
    recorder = simulate([make_job("fox", steps=1)])
    wire.send(Start(make_job("fox").info, 7))
    (job,) = wire.feed.take()
    wire.feed.dispatched(recorder.dispatches[0])
    for event in recorder.events:
        wire.feed.applied(event)
    wire.feed.ended(JobOutcome(job.info, "done"))
    noted = wire.end.recv()
    assert noted.notes[0] == recorder.dispatches[0]
    assert {type(note) for note in noted.notes} == {Dispatch, RankReady, TaskDone}, "and none of jobs"
    assert isinstance(wire.end.recv(), Ended)


def test_a_closed_connection_stops_the_run(wire):
    wire.end.close()
    found: list = []
    while not found:
        found = list(wire.feed.take_events(2.0))
    assert isinstance(found[0], StopRequested)


@pytest.fixture
def delivery(tmp_path):
    """A fetched file of five bytes, and its path in the driver's folder."""

    def deliver(job, content=b"hello"):
        made = tmp_path / "node.png"
        made.write_bytes(b"hello")
        outcome = JobOutcome(job.info, "done", written=content_of(made))
        found = FileDelivery(job, outcome, attempt=3, output_dir=tmp_path / "out")
        asked = queue.SimpleQueue()

        def read(file, offset, size):
            asked.put(file)
            return content[offset : offset + 2]

        found.fetch(read)
        assert asked.get() == f"attempt-3/{job.info.file}"
        return found, tmp_path / "out" / job.info.file

    return deliver


def test_a_file_comes_in_chunks_and_gets_its_name_when_it_counts(delivery):
    found, path = delivery(make_job("fox"))
    assert not path.exists()
    assert found.publish().status == "done"
    assert path.read_bytes() == b"hello"
    assert [each.name for each in path.parent.iterdir()] == ["fox.png"]


def test_frames_of_a_video_come_as_they_are_named_and_replace_a_longer_one(tmp_path):
    job, folder = make_job("fox"), tmp_path / "out" / "fox"
    folder.mkdir(parents=True)
    for number in (1, 2, 3):
        (folder / f"000{number}.png").write_bytes(b"old")
    earlier = {f"000{number}.png": content_of(folder / "0001.png") for number in (1, 2, 3)}
    info = replace(job.info, file="fox/{frame}.png")
    job = replace(job, info=info, replaces_numbered=earlier)
    (tmp_path / "made").write_bytes(b"new")
    new = content_of(tmp_path / "made")
    made = tuple((name, new.size_bytes, new.sha256) for name in ("0001.png", "0002.png"))
    outcome = JobOutcome(info, "done", written=new, files=made)
    found = FileDelivery(job, outcome, attempt=3, output_dir=tmp_path / "out")
    found.fetch(lambda file, offset, size: b"new"[offset : offset + size])
    assert found.publish().file_names == ["fox/0001.png", "fox/0002.png"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "0001.png": b"new", "0002.png": b"new",
    }  # fmt: skip


def test_a_late_file_leaves_nothing(delivery):
    found, path = delivery(make_job("fox"))
    found.drop()
    assert list(path.parent.iterdir()) == []


def test_a_file_never_replaces_one_that_is_not_its_predecessor(delivery):
    found, path = delivery(make_job("fox"))
    path.write_bytes(b"mine")
    with pytest.raises(OutputError, match="another file got this name during the run"):
        found.publish()
    assert path.read_bytes() == b"mine"


def test_a_torn_file_is_not_published(delivery):
    found, path = delivery(make_job("fox"), content=b"hell")
    with pytest.raises(OutputError, match="only a part of the file came"):
        found.publish()
    assert list(path.parent.iterdir()) == []
