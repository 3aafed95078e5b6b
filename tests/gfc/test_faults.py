"""Deaths, aborts and mistakes: typed errors that name the edge, and survivors that go on.

Waits here end by events; the time-outs only have to be long enough not to fire by themselves
where a test does not mean them, and short where it does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from ranks import Ranks

from gfgen.errors import AbortedError, PeerTimeoutError, ProtocolError
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import Endpoint
from gfgen.layout import Layout

MakeRanks = Callable[..., Ranks]
SHORT_S = 0.5


def descriptor(ranks: Ranks, members: tuple[int, ...]) -> Descriptor:
    layout = Layout(members, ulysses=len(members))
    incarnations = tuple(ranks.incarnations[rank] for rank in members)
    return Descriptor(ranks.next_dispatch(), layout, incarnations)


def gather(endpoint: Endpoint, group: Descriptor, num_times: int = 3) -> list[int]:
    """The members' ranks, as an all_gather tells them."""
    whole = endpoint.group(group)
    whole.enter()
    for _ in range(num_times):
        x = whole.all_gather(torch.full((500,), endpoint.rank))
    return sorted(set(x.tolist()))


def gather_for_ever(endpoint: Endpoint, group: Descriptor) -> None:
    whole = endpoint.group(group)
    whole.enter()
    x = torch.full((5000,), endpoint.rank)  # several rounds each: most of the time is pushing
    while True:
        whole.all_gather(x)


def enter_and_die(endpoint: Endpoint, group: Descriptor) -> None:
    endpoint.group(group).enter()
    os.kill(os.getpid(), signal.SIGKILL)


def survive_and_go_on(ranks: Ranks, members: tuple[int, ...], dead: int) -> None:
    """What the host does after a death: reaped, edges anew, fewer ranks, then all of them."""
    survivors = tuple(rank for rank in members if rank != dead)
    ranks.kill(dead)
    ranks.run(survivors, Endpoint.restart_edges, survivors)
    smaller = descriptor(ranks, survivors)
    assert ranks.run(survivors, gather, smaller) == [list(survivors)] * len(survivors)
    ranks.revive(dead)
    again = descriptor(ranks, members)
    assert ranks.run(members, gather, again) == [list(members)] * len(members)


def test_rank_killed_while_it_pushes_costs_the_task_only(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(4, timeout_s=SHORT_S)
    members = (0, 1, 2, 3)
    group = descriptor(ranks, members)
    for rank in members:
        ranks.submit(rank, gather_for_ever, group)
    assert not ranks.pipes[2].poll(0.05)  # all are exchanging by now, or soon
    os.kill(ranks.processes[2].pid or 0, signal.SIGKILL)
    for rank in (0, 1, 3):
        error = ranks.result(rank)
        assert isinstance(error, PeerTimeoutError)
        assert f"rank {rank}, dispatch {group.dispatch}" in str(error)
        assert "expected sequence" in str(error)
        assert "seen sequence" in str(error)
    survive_and_go_on(ranks, members, dead=2)


def test_rank_killed_while_others_wait_is_named(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(3, timeout_s=SHORT_S)
    group = descriptor(ranks, (0, 1, 2))
    ranks.submit(0, gather, group)
    ranks.submit(1, gather, group)
    ranks.submit(2, enter_and_die, group)
    for rank in (0, 1):
        error = ranks.result(rank)
        assert isinstance(error, PeerTimeoutError)
        assert "exchange of rank 2" in str(error)
        failure = ranks.arena(rank).last_failure()
        assert failure is not None
        assert (failure.rank, failure.peer) == (rank, 2)
    survive_and_go_on(ranks, (0, 1, 2), dead=2)


def test_entry_waits_for_a_late_peer_until_the_host_aborts(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2, timeout_s=0.05)
    group = descriptor(ranks, (0, 1))
    ranks.submit(0, gather, group)
    assert not ranks.pipes[0].poll(0.3)  # several times the time-out of waits inside a task
    ranks.abort(0, group.dispatch)
    error = ranks.result(0)
    assert isinstance(error, AbortedError)
    assert "entry of rank 1" in str(error)
    later = descriptor(ranks, (0, 1))  # the abort does not reach the next dispatch
    assert ranks.run((0, 1), gather, later) == [[0, 1]] * 2


def wait_for_ever(endpoint: Endpoint, group: Descriptor, timeout_s: float) -> float:
    """How long a barrier has waited for a rank that does not come."""
    whole = endpoint.group(group, timeout_s=timeout_s)
    whole.enter()
    began_s = time.monotonic()
    try:
        whole.subgroup("ulysses").barrier()
    except PeerTimeoutError:
        return time.monotonic() - began_s
    raise AssertionError("nobody else called it")


@pytest.mark.parametrize(("endpoints_s", "dispatchs_s"), [(60.0, 0.05), (0.05, 0.8)])
def test_a_dispatch_may_say_how_long_its_waits_may_take(
    make_ranks: MakeRanks, endpoints_s: float, dispatchs_s: float
) -> None:
    ranks = make_ranks(2, timeout_s=endpoints_s)
    group = descriptor(ranks, (0, 1))
    ranks.submit(0, wait_for_ever, group, dispatchs_s)
    ranks.submit(1, only_enter, group)
    assert dispatchs_s <= ranks.result(0) < 50.0
    assert ranks.result(1) is None


def fail_twice(endpoint: Endpoint, group: Descriptor) -> tuple[str, str]:
    """The error of a collective whose peer does not come, and of the next one, of a subgroup."""
    whole = endpoint.group(group)
    whole.enter()
    errors = []
    for collective in (whole.barrier, whole.subgroup("ulysses").barrier):
        try:
            collective()
        except PeerTimeoutError as error:
            errors.append(str(error))
    return errors[0], errors[1]


def only_enter(endpoint: Endpoint, group: Descriptor) -> None:
    endpoint.group(group).enter()


def test_poisoned_task_fails_at_once_with_the_first_error(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2, timeout_s=SHORT_S)
    group = descriptor(ranks, (0, 1))
    ranks.submit(0, fail_twice, group)
    ranks.submit(1, only_enter, group)
    first, second = ranks.result(0)
    assert first == second
    assert ranks.result(1) is None


def test_other_collectives_than_the_peers_are_a_protocol_error(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(4, timeout_s=SHORT_S)
    layout = Layout((0, 1, 2, 3), cfg=2, ulysses=2)
    group = Descriptor(ranks.next_dispatch(), layout, (1,) * 4)
    for rank in range(4):
        ranks.submit(rank, barrier_of_kind, group, "whole" if rank == 0 else "ulysses")
    assert isinstance(ranks.result(1), ProtocolError)
    for rank in (0, 2, 3):
        ranks.result(rank)


def barrier_of_kind(endpoint: Endpoint, group: Descriptor, kind: str) -> None:
    whole = endpoint.group(group)
    whole.enter()
    whole.subgroup(kind).barrier()  # type: ignore[arg-type]


def test_different_layouts_under_one_number_are_a_protocol_error(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(3, timeout_s=SHORT_S)
    dispatch = ranks.next_dispatch()
    ranks.submit(0, gather, Descriptor(dispatch, Layout((0, 1), ulysses=2), (1, 1)))
    ranks.submit(1, gather, Descriptor(dispatch, Layout((1, 0), ulysses=2), (1, 1)))
    results = [ranks.result(0), ranks.result(1)]
    assert all(isinstance(result, ProtocolError) for result in results)


def test_peer_that_left_a_dispatch_out_is_a_protocol_error(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2, timeout_s=SHORT_S)
    skipped, later = descriptor(ranks, (0, 1)), descriptor(ranks, (0, 1))
    ranks.submit(1, gather, later)
    ranks.submit(0, gather, skipped)
    error = ranks.result(0)
    assert isinstance(error, ProtocolError)
    assert "entry of rank 1" in str(error)
    ranks.abort(1, later.dispatch)
    assert isinstance(ranks.result(1), AbortedError)


def test_descriptor_with_an_unmapped_incarnation_is_refused(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    group = Descriptor(ranks.next_dispatch(), Layout((0, 1), ulysses=2), (1, 2))
    (error,) = ranks.run((0,), gather, group)
    assert isinstance(error, ProtocolError)
    assert "incarnation 2 of rank 1" in str(error)


def gather_without_entry(endpoint: Endpoint, group: Descriptor) -> None:
    endpoint.group(group).all_gather(torch.zeros(1))


def test_collective_before_the_entry_barrier_is_refused(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    (error,) = ranks.run((0,), gather_without_entry, descriptor(ranks, (0, 1)))
    assert isinstance(error, ProtocolError)
    assert "before the entry barrier" in str(error)


def test_dispatch_number_that_does_not_rise_is_refused(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    group = descriptor(ranks, (0, 1))
    assert ranks.run((0, 1), gather, group) == [[0, 1]] * 2
    for error in ranks.run((0, 1), gather, group):
        assert isinstance(error, ProtocolError)
        assert "must rise" in str(error)


def send_much(endpoint: Endpoint, to: int, dispatch: int, timeout_s: float | None = None) -> None:
    endpoint.send(torch.zeros(100_000), to=to, dispatch=dispatch, timeout_s=timeout_s)


def receive(endpoint: Endpoint, source: int, dispatch: int, num_items: int) -> int:
    x = endpoint.recv((num_items,), torch.float32, source=source, dispatch=dispatch)
    return x.numel()


def test_send_without_a_receiver_ends_by_abort(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    dispatch = ranks.next_dispatch()
    ranks.submit(0, send_much, 1, dispatch)
    ranks.abort(0, dispatch)
    assert isinstance(ranks.result(0), AbortedError)


def test_edge_of_a_failed_transfer_is_refused_until_it_starts_anew(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    (error,) = ranks.run((0,), send_much, 1, ranks.next_dispatch(), 0.05)
    assert isinstance(error, PeerTimeoutError)
    assert "credit of rank 1" in str(error)
    (error,) = ranks.run((0,), send_much, 1, ranks.next_dispatch())
    assert isinstance(error, AbortedError)
    assert "restart_edges" in str(error)
    ranks.run((0, 1), Endpoint.restart_edges, (0, 1))
    dispatch = ranks.next_dispatch()
    assert ranks.run((0,), _submit_send, dispatch) == [None]
    assert ranks.run((1,), receive, 0, dispatch, 10) == [10]


def _submit_send(endpoint: Endpoint, dispatch: int) -> None:
    endpoint.send(torch.zeros(10), to=1, dispatch=dispatch)


def test_receiver_with_another_dispatch_gets_a_protocol_error(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    assert ranks.run((0,), _submit_send, 5) == [None]
    (error,) = ranks.run((1,), receive, 0, 6, 10)
    assert isinstance(error, ProtocolError)
    assert "chunk of rank 0" in str(error)


@pytest.mark.parametrize("first_sequence", [0xFFFFFFFD, 0xFFFFFFFF])
def test_counts_wrap(make_ranks: MakeRanks, first_sequence: int) -> None:
    from gfgen.gfc.arena import ArenaPlan

    plan = ArenaPlan(data_bytes=1 << 16, post_bytes=1 << 10, first_sequence=first_sequence)
    ranks = make_ranks(2, plan=plan)
    for dispatch in ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32):
        group = Descriptor(dispatch, Layout((0, 1), ulysses=2), (1, 1))
        assert ranks.run((0, 1), gather, group) == [[0, 1]] * 2
        ranks.submit(0, send_much, 1, dispatch)
        assert ranks.run((1,), receive, 0, dispatch, 100_000) == [100_000]
        assert ranks.result(0) is None
