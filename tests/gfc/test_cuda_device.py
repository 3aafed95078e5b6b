"""The collectives on real GPUs: exactness under random groups, graphs, transfers, faults.

pytest tests/gfc/test_cuda_device.py            # needs two ranks, better four (gpu_ranks.py)
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator

import cuda_programs as programs
import pytest
from gpu_ranks import NUM_GPUS, NUM_RANKS, RANKS_PER_GPU, needs_two_ranks

from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.layout import Layout

TIMEOUT_S = 2.0
PLAN = ArenaPlan(data_bytes=64 << 20, post_bytes=4 << 20, first_sequence=2**32 - 500)
NUM_DISPATCHES = 2000 // RANKS_PER_GPU
"""On a shared GPU each exchange takes milliseconds."""
pytestmark = [pytest.mark.gpu, needs_two_ranks]


@pytest.fixture(params=[False, True], ids=("peer", "host"))
def ranks(request: pytest.FixtureRequest) -> Iterator[CudaRanks]:
    """Over peer memory, and over main memory."""
    near = [[rank] for rank in range(NUM_RANKS)] if request.param else None
    started = CudaRanks(NUM_RANKS, PLAN, timeout_s=TIMEOUT_S, num_devices=NUM_GPUS, near=near)
    yield started
    started.close()


@pytest.fixture
def pairs() -> Iterator[CudaRanks]:
    """Over peer memory in two pairs, and over main memory between them."""
    if NUM_RANKS < 4:
        pytest.skip("needs four ranks: GFGEN_TEST_RANKS_PER_GPU=2 on two GPUs")
    near = [[0, 1], [2, 3]]
    started = CudaRanks(4, PLAN, timeout_s=TIMEOUT_S, num_devices=NUM_GPUS, near=near)
    yield started
    started.close()


def gather(ranks: CudaRanks, members: tuple[int, ...], num_items: int = 5000) -> list[tuple[str, str, int]]:
    incarnations = tuple(ranks.incarnations[rank] for rank in members)
    layout = Layout(members, ulysses=len(members))
    return ranks.run(
        members, programs.gather_once, layout, incarnations, ranks.next_dispatch(), num_items, 0.0
    )


def all_work(ranks: CudaRanks, members: tuple[int, ...]) -> bool:
    return gather(ranks, members) == [("", "", 0)] * len(members)


def test_random_overlapping_groups_give_exact_bytes(ranks: CudaRanks) -> None:
    first = ranks.next_dispatch(NUM_DISPATCHES)
    found = ranks.run(range(NUM_RANKS), programs.stress, NUM_RANKS, 7, NUM_DISPATCHES, first)
    assert [result["errors"] for result in found] == [0] * NUM_RANKS


def test_one_capture_replays_on_every_ordered_subset(ranks: CudaRanks) -> None:
    prepared = [(0, 1), (2, 3), (0, 1, 2), (3, 0, 1), (0, 1, 2, 3)]
    members = [group for group in prepared if max(group) < NUM_RANKS]
    num_prepared = len(members)
    for size in range(2, NUM_RANKS + 1):
        members += itertools.permutations(range(NUM_RANKS), size)
    layouts = [(Layout(group, ulysses=len(group)), ranks.next_dispatch()) for group in members]
    found = ranks.run(range(NUM_RANKS), programs.replay_everywhere, layouts, 40, num_prepared)
    assert [wrong for _, wrong in found] == [0] * NUM_RANKS
    assert sum(num_replays for num_replays, _ in found) == sum(len(m) for m in members[num_prepared:])


def test_transfers_of_any_size_arrive(ranks: CudaRanks) -> None:
    assert programs.transfer(ranks, [1, 100, 16384, (3 << 20) + 1, 40 << 20, 8 << 20]) == [0, 0]


def test_transfers_go_on_with_the_successor_of_a_killed_rank(ranks: CudaRanks) -> None:
    assert programs.transfer_after_death(ranks) == [0, 0]


@pytest.mark.parametrize("num_items", [20_000_000, 9_999_991])
def test_exchanges_larger_than_a_bank_go_in_rounds(ranks: CudaRanks, num_items: int) -> None:
    members = tuple(reversed(range(NUM_RANKS)))
    layout = Layout(members, ulysses=NUM_RANKS)
    for result in ranks.run(members, programs.larger_than_a_bank, layout, ranks.next_dispatch(), num_items):
        assert set(result.values()) == {0}, result


def survives(ranks: CudaRanks, failed: list[tuple[str, str, int]], dead: int) -> None:
    """Survivors named the edge, and work on: without the dead rank, then with its successor."""
    for name, text, wrong in failed:
        assert (name, wrong) == ("PeerTimeoutError", 0), text
        assert f"of rank {dead}" in text
    others = tuple(rank for rank in range(NUM_RANKS) if rank != dead)
    ranks.run(others, programs.restart, list(others))
    if len(others) > 1:
        assert all_work(ranks, others)
    programs.revive(ranks, dead)
    assert all_work(ranks, tuple(range(NUM_RANKS)))


def kill_between_gathers(ranks: CudaRanks, *, waiting: int, dead: int) -> None:
    """One rank waits in its second gather for the other, which dies before it."""
    layout, dispatch = Layout((waiting, dead), ulysses=2), ranks.next_dispatch()
    ranks.submit(waiting, programs.gather_once, layout, (1, 1), dispatch, 5000, 0.0)
    ranks.submit(dead, programs.gather_once, layout, (1, 1), dispatch, 5000, 60.0)
    time.sleep(1)
    ranks.kill(dead)


def test_random_overlapping_groups_inside_pairs_and_across_them_give_exact_bytes(pairs: CudaRanks) -> None:
    first = pairs.next_dispatch(NUM_DISPATCHES)
    found = pairs.run(range(4), programs.stress, 4, 11, NUM_DISPATCHES, first)
    assert [result["errors"] for result in found] == [0] * 4


def test_one_capture_replays_on_every_order_of_ranks_across_pairs(pairs: CudaRanks) -> None:
    prepared = [(0, 1, 2), (3, 0, 1), (0, 1, 2, 3)]
    members = [*prepared, *itertools.permutations(range(4), 3), *itertools.permutations(range(4))]
    layouts = [(Layout(group, ulysses=len(group)), pairs.next_dispatch()) for group in members]
    found = pairs.run(range(4), programs.replay_everywhere, layouts, 40, len(prepared))
    assert [wrong for _, wrong in found] == [0] * 4


@pytest.mark.parametrize(("source", "target"), [(0, 1), (0, 2), (3, 1)])
def test_transfers_arrive_inside_a_pair_and_across_pairs(pairs: CudaRanks, source: int, target: int) -> None:
    sizes = [1, 100, 16384, (3 << 20) + 1, 40 << 20]
    assert programs.transfer(pairs, sizes, source=source, target=target) == [0, 0]


def test_rank_killed_in_an_exchange_across_pairs(pairs: CudaRanks) -> None:
    kill_between_gathers(pairs, waiting=1, dead=2)
    survives(pairs, [pairs.result(1)], dead=2)


def test_rank_killed_while_others_wait_for_it(ranks: CudaRanks) -> None:
    kill_between_gathers(ranks, waiting=0, dead=1)
    began = time.monotonic()
    survives(ranks, [ranks.result(0)], dead=1)
    assert time.monotonic() - began < 60 * RANKS_PER_GPU


def test_rank_killed_while_it_waits(ranks: CudaRanks) -> None:
    layout, dispatch = Layout((0, 1), ulysses=2), ranks.next_dispatch()
    ranks.submit(0, programs.gather_once, layout, (1, 1), dispatch, 500_000, 1.0)
    ranks.submit(1, programs.gather_once, layout, (1, 1), dispatch, 500_000, 0.0)
    time.sleep(0.7)
    ranks.kill(1)
    # It had sent all it owed before it waited: nothing is missing here, and nothing is wrong.
    assert ranks.result(0) == ("", "", 0)
    survives(ranks, [], dead=1)


def test_rank_killed_while_it_pushes(ranks: CudaRanks) -> None:
    layout, dispatch = Layout((0, 1), ulysses=2), ranks.next_dispatch()
    for rank in (0, 1):
        ranks.submit(rank, programs.push_for_ever, layout, dispatch, 8 << 20)
    time.sleep(1)
    ranks.kill(1)
    name, _, text = ranks.result(0).partition(": ")
    survives(ranks, [(name, text, 0)], dead=1)


def test_rank_that_stands_still_for_five_seconds(ranks: CudaRanks) -> None:
    layout, dispatch = Layout((0, 1), ulysses=2), ranks.next_dispatch()
    pid = ranks.processes[1].pid
    assert pid is not None
    ranks.submit(1, programs.gather_once, layout, (1, 1), dispatch, 5000, 0.5)
    ranks.submit(0, programs.gather_once, layout, (1, 1), dispatch, 5000, 0.0)
    time.sleep(0.3)
    os.kill(pid, signal.SIGSTOP)
    failed = ranks.result(0)
    time.sleep(5)
    os.kill(pid, signal.SIGCONT)
    ranks.kill(1)  # the rule for suspects: reaped before anyone goes on
    survives(ranks, [failed], dead=1)


def test_wrong_tag_is_a_protocol_error(ranks: CudaRanks) -> None:
    dispatch = ranks.next_dispatch()
    ranks.submit(0, programs.gather_once, Layout((0, 1), ulysses=2), (1, 1), dispatch, 100, 0.0)
    ranks.submit(1, programs.gather_once, Layout((0, 1), cfg=2), (1, 1), dispatch, 100, 0.0)
    for rank in (0, 1):
        name, text, wrong = ranks.result(rank)
        assert (name, wrong) == ("ProtocolError", 0), text
        assert f"the entry of rank {1 - rank}" in text
    ranks.run((0, 1), programs.restart, [0, 1])
    assert all_work(ranks, (0, 1))


def test_dispatch_that_a_peer_left_out_is_a_protocol_error(ranks: CudaRanks) -> None:
    layout, first = Layout((0, 1), ulysses=2), ranks.next_dispatch(2)
    ranks.submit(1, programs.gather_once, layout, (1, 1), first + 1, 100, 0.0)
    time.sleep(0.3)
    name, text, _ = ranks.run((0,), programs.gather_once, layout, (1, 1), first, 100, 0.0)[0]
    assert name == "ProtocolError", text
    ranks.abort(1, first + 1)
    assert ranks.result(1)[0] == "AbortedError"
    ranks.run((0, 1), programs.restart, [0, 1])
    assert all_work(ranks, (0, 1))


@pytest.mark.parametrize("share", [0.1, 2])
def test_a_dispatch_may_say_how_long_its_waits_may_take(ranks: CudaRanks, share: float) -> None:
    layout, dispatch = Layout((0, 1), ulysses=2), ranks.next_dispatch()
    timeout_s = share * ranks.timeout_s
    ranks.submit(0, programs.wait_alone, layout, dispatch, timeout_s)
    ranks.run((1,), programs.enter_only, layout, dispatch)
    assert timeout_s <= ranks.result(0) < timeout_s + 0.5 * ranks.timeout_s
    ranks.run((0, 1), programs.restart, [])
    assert all_work(ranks, (0, 1))


def test_group_works_again_after_a_task_that_one_of_them_left_with_words_unread(ranks: CudaRanks) -> None:
    layout, dispatch = Layout((0, 1), ulysses=2), ranks.next_dispatch()
    ranks.submit(0, programs.gather_once, layout, (1, 1), dispatch, 5000, 0.0)
    ranks.run((1,), programs.enter_only, layout, dispatch)
    assert ranks.result(0)[0] == "PeerTimeoutError"
    ranks.run((0, 1), programs.restart, [])  # as the control plane does where no state was under way
    assert all_work(ranks, (0, 1))


def test_dispatch_numbers_must_rise(ranks: CudaRanks) -> None:
    layout, dispatch = Layout((0, 1), ulysses=2), ranks.next_dispatch()
    assert all_work(ranks, (0, 1))
    name, text, _ = ranks.run((0,), programs.gather_once, layout, (1, 1), dispatch, 100, 0.0)[0]
    assert name == "ProtocolError"
    assert "must rise" in text
