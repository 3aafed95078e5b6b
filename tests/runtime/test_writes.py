"""Frames that wait for writers, without writers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_job

from gfgen.runtime.core.events import Event, FramesLost, OutputFailed
from gfgen.runtime.ipc.content import temporary_name
from gfgen.runtime.ipc.messages import WriteFailed, WriteRequest
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.processes import writes as writes_module
from gfgen.runtime.processes.child import AwakeClock, Lost, Patience, Phase
from gfgen.runtime.processes.writes import Writes


class Writer:
    """Notes what it is asked to write."""

    name, has_started = "writer 0", True

    def __init__(self, pid: int) -> None:
        self.process = SimpleNamespace(pid=pid)
        self.phase = Phase.SERVING
        self.asked: list[WriteRequest] = []

    def tell(self, message: WriteRequest, fds: tuple[int, ...]) -> None:
        self.asked.append(message)


class Writers:
    """One at a time; each successor has another process."""

    def __init__(self) -> None:
        self.writers = [Writer(1001)]
        self.is_stopping = False
        self.settings = RankSettings(num_ranks=1)
        self.clock, self.patience = AwakeClock(), Patience()
        self.num_added = 0

    def add_writer(self) -> None:
        self.num_added += 1

    def replace(self, *, phase: Phase = Phase.SERVING) -> Writer:
        """The writer that is gone; another is in its place, in this phase."""
        (lost,) = self.writers
        self.writers = [Writer(lost.process.pid + 1)]
        self.writers[0].phase = phase
        return lost


@pytest.fixture
def pool() -> Writers:
    return Writers()


@pytest.fixture
def writes(pool: Any, tmp_path: Path) -> Iterator[Writes]:
    made = Writes(pool, tmp_path, waits_for_space=True)
    yield made
    made.close()


def decode(writes: Writes, name: str) -> None:
    """Its frames are complete."""
    writes.new_frames(make_job(name), 7)
    writes.decoded(name)
    assert list(writes.look(2.0)) == []


def lose(writes: Writes, writer: Any) -> list[Event]:
    return list(writes.events_of(writer, Lost("killed"), 2.0))


def test_what_a_dead_writer_left_of_its_file_is_removed(pool: Any, writes: Writes, tmp_path: Path) -> None:
    decode(writes, "fox")
    path = tmp_path / make_job("fox").info.file
    left, of_another = temporary_name(path, pid=1001), temporary_name(path, pid=999)
    for each in (left, of_another):
        each.write_bytes(b"half")
    assert lose(writes, pool.replace()) == []
    assert (left.exists(), of_another.exists()) == (False, True)
    assert [request.job_id for request in pool.writers[0].asked] == ["fox"]


def test_files_that_wait_for_long_get_another_writer(pool: Any, writes: Writes) -> None:
    for name in ("fox", "hare"):
        decode(writes, name)
    assert pool.num_added == 0, "it may be free in a moment"
    pool.clock.now_s += 1
    assert list(writes.look(2.0)) == []
    assert pool.num_added == 1
    pool.writers.append(Writer(1002))
    assert list(writes.look(2.0)) == []
    assert pool.num_added == 1
    assert [[request.job_id for request in each.asked] for each in pool.writers] == [["fox"], ["hare"]]


def test_a_file_is_given_up_with_its_second_writer_but_for_those_that_could_not_start(
    pool: Any, writes: Writes
) -> None:
    decode(writes, "fox")
    for _ in range(3):
        assert lose(writes, pool.replace(phase=Phase.STARTING)) == []
        assert pool.writers[0].asked == [], "it cannot start"
    pool.writers[0].phase = Phase.SERVING
    list(writes.look(2.0))
    assert lose(writes, pool.replace()) == [OutputFailed(2.0, "fox", "its writer died twice: killed")]
    assert pool.writers[0].asked == []


def test_a_run_that_stops_does_not_wait_for_a_writer_that_cannot_start(pool: Any, writes: Writes) -> None:
    for name in ("fox", "owl"):
        decode(writes, name)
    unstarted = Writer(1002)
    unstarted.has_started = False
    assert lose(writes, unstarted) == []
    pool.is_stopping = True
    assert lose(writes, unstarted) == [FramesLost(2.0, "owl", "writer 0 cannot start: killed", lost=True)]
    writes.release("fox")
    list(writes.look(2.0))
    assert [request.job_id for request in pool.writers[0].asked] == ["fox"]


def test_a_file_is_written_when_its_decode_has_ended_and_the_last_frames_are_stored(
    pool: Any, writes: Writes
) -> None:
    (writer,) = pool.writers
    writes.new_frames(make_job("fox"), 7)
    for rank in (0, 1):
        writes.expect("fox", rank)
    writes.decoded("fox")
    for number, rank in ((7, 0), (7, 0), (6, 1)):  # told again, and of an attempt before
        writes.stored(number, rank)
    list(writes.look(2.0))
    assert (writes.storing(0), writes.storing(1), writer.asked) == (set(), {7}, [])
    writes.stored(7, 1)
    list(writes.look(2.0))
    assert [request.job_id for request in writer.asked] == ["fox"]


def test_frames_that_are_lost_end_a_decode_that_was_done_and_no_other(pool: Any, writes: Writes) -> None:
    for name, number in (("done", 7), ("running", 8)):
        writes.new_frames(make_job(name), number)
        writes.expect(name, 0)
    writes.decoded("done")
    lost = list(writes.lose_frames(writes.storing(0), "killed", 2.0, lost=True))
    assert lost == [FramesLost(2.0, "done", "killed", lost=True)]
    assert writes.storing(0) == {8}


def test_a_writer_or_a_rank_that_takes_too_long_is_killed(pool: Any, writes: Writes) -> None:
    killed: list[str] = []
    pool.writers[0].kill = killed.append
    pool.workers = [SimpleNamespace(kill=killed.append)]
    decode(writes, "fox")
    writes.new_frames(make_job("owl"), 8)
    writes.expect("owl", 0)
    writes.decoded("owl")
    assert list(writes.look(2.0)) == killed == []
    pool.clock.now_s += 1000.0
    assert list(writes.look(2.0)) == []
    assert killed == ["it does not finish a file", "it does not store its frames"]


def test_a_file_without_room_on_the_disk_waits_for_room_or_for_the_end_of_the_run(
    pool: Any, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode(writes, "fox")
    (writer,) = pool.writers
    full = WriteFailed("fox", "no space left", is_full=True)
    assert list(writes.events_of(writer, full, 2.0)) == list(writes.look(2.0)) == []
    assert len(writer.asked) == 1, "it is tried later"
    monkeypatch.setattr(writes_module, "RETRY_S", 0.0)
    for _ in range(5):
        assert list(writes.events_of(writer, full, 2.0)) == list(writes.look(2.0)) == []
    assert [request.job_id for request in writer.asked] == ["fox"] * 6
    pool.is_stopping = True
    lost = FramesLost(2.0, "fox", "the disk was full when the run stopped", lost=True)
    assert [*writes.events_of(writer, full, 2.0), *writes.look(2.0)] == [lost]
