from builders import make_job

from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.ipc.migration import Transfer
from gfgen.runtime.processes.attempts import Cause
from gfgen.runtime.processes.recovery import Recovery, given_up


def dispatches(*entries):
    """(number, ranks, producer, source ranks of transfers) by number."""
    table = {}
    for number, ranks, producer, sources in entries:
        layout = Layout(tuple(ranks), ulysses=len(ranks))
        transfers = tuple(Transfer(s, r, "sample", 0, 0, 1, 4) for s in sources for r in ranks)
        task = make_job(f"job-{number}").trajectory.task(3)
        table[number] = Dispatch(number, task, layout, 0, 0, 0, producer=producer, transfers=transfers)
    return table


def test_a_task_on_one_rank_takes_its_consumer_along_and_nothing_else():
    table = dispatches((1, [0], None, []), (2, [0], 1, []), (3, [1], None, []), (4, [2], None, []))
    assert given_up([1], table) == {1, 2}


def test_a_consumer_elsewhere_takes_along_what_is_queued_behind_its_transfer():
    table = dispatches((1, [0], None, []), (2, [1], 1, [0]), (3, [1], None, []), (4, [2], None, []))
    assert given_up([1], table) == {1, 2, 3}


def test_what_is_queued_on_the_ranks_of_a_failed_group_is_void():
    table = dispatches((1, [0, 1], None, []), (2, [1], None, []), (3, [2, 3], None, []))
    assert given_up([1], table) == {1, 2}


def test_what_came_before_on_those_ranks_goes_on():
    table = dispatches((1, [1], None, []), (2, [0, 1], None, []))
    assert given_up([2], table) == {2}


def test_transfers_on_the_same_edge_are_given_up_with_each_other():
    table = dispatches((1, [1], None, [0]), (2, [1], None, [0]), (3, [0], None, [1]))
    assert given_up([2], table) == {1, 2, 3}
    table = dispatches((1, [1], None, [0]), (2, [3], None, [2]))
    assert given_up([2], table) == {2}
    table = dispatches((1, [0], None, [1]), (2, [1], None, [0]))
    assert given_up([2], table) == {1, 2}, "the two ends of a pair count anew together"


def test_ranks_count_anew_only_with_those_with_which_they_exchanged_lost_state():
    table = dispatches((1, [1], None, [0]), (2, [0, 1, 2], None, []), (3, [2], 2, [1]))
    recovery = Recovery()
    recovery.extend({2: Cause("boom")}, table)
    assert recovery.numbers == {2, 3}, "the transfer of 1 goes on"
    assert [recovery.peers_of(rank, table) for rank in range(3)] == [set(), {2}, {1}]
    recovery.dead.add(2)
    assert recovery.peers_of(1, table) == set(), "its successor's arena is new"


def test_the_loss_spreads_over_groups_that_overlap():
    table = dispatches((1, [0, 1], None, []), (2, [1, 2], None, []), (3, [2, 3], None, []))
    assert given_up([1], table) == {1, 2, 3}
    assert given_up([3], table) == {3}


def test_every_rank_concerned_has_to_answer():
    table = dispatches((1, [0, 1], None, []), (2, [3], 1, [1]))
    recovery = Recovery()
    recovery.extend({1: Cause("boom")}, table)
    assert recovery.ranks == {0, 1, 3}
    assert recovery.waiting_for == {0, 1, 3}


def test_a_rank_that_died_is_not_asked():
    table = dispatches((1, [0, 1], None, []))
    recovery = Recovery(dead={1})
    recovery.extend({1: None}, table)
    assert recovery.waiting_for == {0}


def test_another_failure_begins_the_round_anew():
    table = dispatches((1, [0, 1], None, []), (2, [3], None, []))
    recovery = Recovery()
    recovery.extend({1: Cause("boom")}, table)
    recovery.waiting_for.discard(0)
    recovery.extend({2: Cause("bang")}, table)
    assert recovery.waiting_for == {0, 1, 3}
    assert recovery.numbers == {1, 2}
    assert recovery.causes == {1: Cause("boom"), 2: Cause("bang")}


def test_the_first_cause_of_a_failure_counts():
    recovery = Recovery()
    recovery.extend({1: Cause("boom")}, dispatches((1, [0, 1], None, [])))
    recovery.extend({1: Cause("aborted", lost=True)}, dispatches((1, [0, 1], None, [])))
    assert recovery.causes == {1: Cause("boom")}
