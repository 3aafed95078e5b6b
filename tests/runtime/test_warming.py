"""What is got ready before a run, and by whom."""

from __future__ import annotations

import pickle
import selectors
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_job, with_limits

from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.gfc.arena import ArenaPlan
from gfgen.graph import Stage
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.ipc import messages
from gfgen.runtime.ipc.messages import (
    MAX_MESSAGE_BYTES,
    Channel,
    ModelsSet,
    SetModels,
    WarmedUp,
    WarmUp,
    WarmUpLater,
)
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.processes.child import AwakeClock, Patience, Phase, RankProcess
from gfgen.runtime.processes.pool import MAX_DEATHS, HeldModels, Meeting, WorkerPool
from gfgen.runtime.processes.starting import warm_up
from gfgen.session import warming
from gfgen.session.warming import degrees_at_hand, warm_ups


def test_steps_may_run_on_as_many_ranks_as_the_policy_gives() -> None:
    assert degrees_at_hand("srtf", {}, 4) == (1,)
    assert degrees_at_hand("srtf,degree=2", {"degree": 2}, 4) == (2,)
    assert degrees_at_hand("legacy", {}, 4) == (4,)
    assert degrees_at_hand("auto", {}, 4) == (1, 2, 4)
    assert degrees_at_hand("edf", {}, 3) == (1, 2, 3)
    assert degrees_at_hand("mine.py", {}, 8) == (1, 2, 4, 8)


def test_kinds_are_prepared_in_the_order_in_which_jobs_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        make_job("late", shape="late", arrival_s=9.0),
        make_job("small", shape="small"),
        make_job("urgent", shape="large", deadline_s=9.0),
        make_job("another small", shape="small"),
    ]
    items = warm_ups(jobs, (1,))
    assert [(item.number, item.spec.id) for item in items] == [
        (0, "urgent"), (1, "small"), (2, "late"), (3, "urgent"),
    ]  # fmt: skip
    assert [item.has_texts for item in items] == [False, False, False, True]
    monkeypatch.setattr(warming, "MAX_KINDS", 2)
    assert [item.spec.id for item in warm_ups(jobs, (1,))] == ["urgent", "small", "urgent"]


def test_jobs_with_an_image_guidance_or_reuse_are_kinds_of_their_own() -> None:
    jobs = [
        make_job("plain"),
        make_job("like it"),
        make_job("guided", uses_cfg=True),
        make_job("from a picture", image="a.png"),
        make_job("with reuse", reuse="if-late"),
    ]
    prepared = [item.spec.id for item in warm_ups(jobs, (1,)) if item.degrees]
    assert prepared == ["plain", "guided", "from a picture", "with reuse"]


def test_messages_for_later_are_short_and_merge_no_loras() -> None:
    """All of them are sent at once."""
    long = "x" * 20_000
    jobs = [
        make_job(f"{idx}", shape=f"{idx}", prompt=long, lora=({"path": "a", "scale": 1.0},))
        for idx in range(30)
    ]
    first, *later = warm_ups(jobs, (1, 2, 4, 8))
    assert (first.spec.prompt, bool(first.spec.lora)) == (long, True)
    assert len(pickle.dumps(WarmUpLater(tuple(later)))) < 150_000
    assert not any(item.spec.lora for item in later)


def test_layouts_are_all_that_a_task_may_get() -> None:
    def layouts(job: AdmittedJob) -> list[object]:
        items = [item for item in warm_ups([job], (1, 2, 4)) if not item.has_texts]
        return [(item.degrees, item.decodes, item.in_own_slot) for item in items]

    job = make_job("guided", uses_cfg=True)
    assert layouts(with_limits(job, max_decode_degree=3)) == [
        (((1, 1, 1),), (1,), True),
        (((2, 1, 1), (1, 2, 1)), (2,), False),
        (((2, 2, 1), (1, 4, 1)), (), False),
    ]
    assert layouts(make_job("plain"))[1:] == [(((1, 2, 1),), (), False), (((1, 4, 1),), (), False)]
    one_degree = [item.degrees for item in warm_ups([job], (4,))]
    assert one_degree == [((2, 2, 1),), (), ((2, 2, 1), (1, 4, 1))]


def test_steps_that_compute_for_seconds_are_not_run_before() -> None:
    """Those of a large video, on one rank of a slow GPU, would take longer than many a run."""

    def job_of(shape: str, times: float) -> AdmittedJob:
        flops = dict.fromkeys(Stage, times * warming.MAX_FLOPS)
        return replace(make_job(shape, shape=shape), flops=flops)

    items = warm_ups([job_of("huge", 5), job_of("large", 2.5)], (1, 2, 4))
    assert [(item.spec.id, item.degrees, item.decodes) for item in items if not item.has_texts] == [
        ("huge", (), (1,)),
        ("large", (), (1,)),
        ("large", ((1, 4, 1),), ()),
    ]


# --- warming workers up

ENDS: list[Channel | selectors.BaseSelector] = []
ITEMS = warm_ups([make_job(f"job {idx}", shape=f"{idx}") for idx in range(3)], (1,))[:3]


@pytest.fixture(autouse=True)
def closed_ends() -> Iterator[None]:
    yield
    while ENDS:
        ENDS.pop().close()


def channel_pair() -> tuple[Channel, Channel]:
    ours, theirs = map(Channel, Channel.pair())
    ENDS.extend((ours, theirs))
    return ours, theirs


class Rank(RankProcess):
    """A worker that answers at once."""

    def __init__(self, rank: int, *, fails: bool = False) -> None:
        ours, self._theirs = channel_pair()
        process: Any = None
        super().__init__(
            name=f"rank {rank}",
            process=process,
            channel=ours,
            phase=Phase.SERVING,
            has_started=True,
            rank=rank,
            has_arenas=True,
        )
        self._fails = fails

    def tell(self, message: WarmUp, fds: tuple[int, ...] = ()) -> None:
        self._theirs.send(WarmedUp(message.number, 0.1, "no memory" if self._fails else None))

    def die(self) -> None:
        self._theirs.close()

    def reap(self, *, patience_s: float) -> str:
        self.enter(Phase.ENDED)
        return "killed by signal 9"


class Silent(Rank):
    def tell(self, message: WarmUp, fds: tuple[int, ...] = ()) -> None: ...


class Slow(Rank):
    """Reads what it was told when the test lets it, from a socket like any other."""

    def tell(self, message: WarmUp, fds: tuple[int, ...] = ()) -> None:
        RankProcess.tell(self, message, fds)

    def kill(self, why: str | None = None) -> None:
        raise AssertionError("it is not stuck")

    def answer(self) -> int | None:
        """The number of what it has now got ready; None when it was told of nothing."""
        try:
            received = self._theirs._socket.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        message = pickle.loads(received)
        self._theirs.send(WarmedUp(message.number, 0.1))
        number: int = message.number
        return number


class Arenas:
    """Of ranks that exchange nothing."""

    plan = ArenaPlan()

    def known_to(self, rank: int, *, among: Collection[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    def arena(self, rank: int, *, source: int) -> int:
        return 0


def pool_of(*ranks: Rank, are_all_needed: bool = False) -> WorkerPool:
    pool: Any = WorkerPool.__new__(WorkerPool)
    pool.workers, pool.writers, pool._left_out, pool._waiting = list(ranks), [], set(), set()
    pool.settings = RankSettings(num_ranks=len(ranks), are_all_needed=are_all_needed)
    pool.models, pool.patience, pool.islands = HeldModels([]), Patience(), [range(len(ranks))]
    pool.meeting = Meeting(Arenas(), pool.workers, pool.islands)  # type: ignore[arg-type]
    pool._launcher, pool.needed = SimpleNamespace(host_copies={}), None
    pool.is_stopping, pool.steps_at_hand, pool.clock = False, tuple, AwakeClock()
    pool.deaths = {rank.rank: [time.monotonic()] * (MAX_DEATHS - 1) for rank in ranks}
    pool._selector = selectors.DefaultSelector()
    ENDS.append(pool._selector)
    for rank in ranks:
        pool._selector.register(rank.channel, selectors.EVENT_READ, rank)
    made: WorkerPool = pool
    return made


def test_item_is_ready_when_all_ranks_have_answered() -> None:
    found = list(warm_up(pool_of(Rank(0), Rank(1)), ITEMS))
    assert sorted(item.number for item, _ in found) == [0, 1, 2]
    assert all(answer.reason is None for _, answer in found)
    pool = pool_of(Rank(0), Silent(1))
    pool.patience = Patience(warm_up_s=0.01)
    with pytest.raises(WorkerError, match=r"within 0\.01 s"):
        list(warm_up(pool, ITEMS))


def test_what_one_rank_cannot_run_is_told_once() -> None:
    found = [answer.reason for _, answer in warm_up(pool_of(Rank(0, fails=True), Rank(1)), ITEMS)]
    assert found == ["no memory"] * 3


def test_a_rank_that_dies_too_often_is_not_waited_for() -> None:
    dead = Silent(0)
    dead.die()
    pool = pool_of(dead, Rank(1))
    assert [item.number for item, _ in warm_up(pool, ITEMS)] == [0, 1, 2]
    assert pool.retired == {0}


@pytest.mark.parametrize("others", [[], [1]], ids=["the last one", "one that is needed"])
def test_death_of_such_a_rank_ends_the_warm_up_where_none_can_do_without(others: list[int]) -> None:
    dead = Silent(0)
    dead.die()
    pool = pool_of(dead, *map(Rank, others), are_all_needed=bool(others))
    with pytest.raises(WorkerError, match="rank 0: killed by signal 9"):
        list(warm_up(pool, ITEMS))


def test_signal_ends_the_warm_up() -> None:
    class Signals:
        def __init__(self) -> None:
            self._ours, theirs = channel_pair()
            theirs.send("a signal")

        def fileno(self) -> int:
            return self._ours.fileno()

        def take(self) -> list[int]:
            return [2]

    signals: Any = Signals()
    with pytest.raises(InterruptedRunError, match="nothing was started"):
        list(warm_up(pool_of(Silent(0)), ITEMS, signals))


@pytest.mark.parametrize("could", [(True, True), (True, False)], ids=str)
def test_texts_are_padded_on_all_ranks_or_on_none_and_that_is_settled_once(could: tuple[bool, ...]) -> None:
    ranks = [Rank(number) for number in range(len(could))]
    meeting = pool_of(*ranks).meeting
    told: list[Any] = []
    for rank, counts_tokens in zip(ranks, could, strict=True):
        rank.counts_tokens = counts_tokens
        rank.tell = lambda message, fds: told.append(message)  # type: ignore
    for rank in ranks:
        rank.phase, rank.has_arenas = Phase.INTRODUCING, False
    assert meeting.introduce() == ranks
    for rank in ranks:
        rank.join(())
    # A new process, after a package was installed or removed:
    ranks[1].counts_tokens, ranks[1].phase, ranks[1].has_arenas = not could[1], Phase.INTRODUCING, False
    meeting.introduce()
    counts = [message.counts_tokens for message in told if isinstance(message, messages.Arenas)]
    assert counts == [all(could)] * 3


def long_items(count: int) -> list[WarmUp]:
    """With the longest prompts that a job may have."""
    spec = replace(ITEMS[0].spec, prompt="x" * 20_000, negative_prompt="y" * 20_000)
    return [replace(ITEMS[0], number=number, spec=spec) for number in range(count)]


def test_long_prompts_do_not_overflow_the_socket_of_a_rank_that_is_busy() -> None:
    rank, items = Slow(0), long_items(16)
    pool = pool_of(rank)
    for number in range(16):
        if number == 0:
            rank.prepare(items)
        assert (rank.answer(), rank.answer()) == (number, None)
        list(pool.turn(0.0))
    assert rank.answer() is None


def test_a_rank_is_told_what_to_prepare_later_when_it_serves() -> None:
    rank = Slow(0)
    pool = pool_of(rank)
    told: list[Any] = []
    rank.tell = lambda message, fds=(): told.append(message)  # type: ignore[method-assign, misc]
    rank.has_joined = True
    pool.steps_at_hand = lambda: ITEMS[:1]
    pool.set_models([Path("/a")])
    pool.steps_at_hand = lambda: ITEMS[1:2]
    pool.set_models([Path("/b")])
    pool.prepare_later(ITEMS[2:])
    for _ in range(2):
        rank._theirs.send(ModelsSet(1.0))
        list(pool.turn(0.0))
    pool.prepare_later(ITEMS[:1])
    assert told == [
        SetModels(("/a",)), SetModels(("/b",)), WarmUpLater(ITEMS[1:]), WarmUpLater(ITEMS[:1]),
    ]  # fmt: skip


def test_some_of_it_is_prepared_now_and_the_rest_between_tasks() -> None:
    ranks = [Rank(0), Rank(1)]
    later: list[Any] = []
    for rank in ranks:
        rank.has_joined = True
        rank.prepare_later = later.append  # type: ignore[method-assign]
    warming.warm_up(pool_of(*ranks), ITEMS[:2], ITEMS[2:])
    assert [items for items in later if items] == [ITEMS[2:]] * 2


def test_nothing_to_warm_up_takes_no_time() -> None:
    assert list(warm_up(pool_of(Rank(0)), ())) == []
