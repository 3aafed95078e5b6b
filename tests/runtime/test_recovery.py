from types import SimpleNamespace

from builders import make_job

from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.ipc.messages import Abandoned, EdgesRestarted, TaskFault, Transfer
from gfgen.runtime.processes.child import AwakeClock, Patience, Phase
from gfgen.runtime.processes.recovery import Attempts, Cause, Recovery, given_up


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


def test_the_loss_spreads_over_groups_that_overlap():
    table = dispatches((1, [0, 1], None, []), (2, [1, 2], None, []), (3, [2, 3], None, []))
    assert given_up([1], table) == {1, 2, 3}
    assert given_up([3], table) == {3}


class Ranks:
    """A pool that notes what its workers are told."""

    def __init__(self):
        self.clock, self.patience = AwakeClock(), Patience()
        self.meeting = SimpleNamespace(held_back=set())
        self.told = []
        self.killed = []
        self.workers = [self.worker(rank) for rank in range(4)]

    def worker(self, rank):
        def tell(message):
            self.told.append((rank, message))

        def kill(why):
            self.killed.append((rank, why))

        facts = {"rank": rank, "name": f"rank {rank}", "phase": Phase.SERVING, "is_to_blame": True}
        return SimpleNamespace(tell=tell, kill=kill, **facts)


def recovering(table):
    pool, attempts = Ranks(), Attempts()
    for each in table.values():
        attempts.begin(each, deadline_s=100.0)
    return pool, attempts, Recovery(pool, attempts)


def test_ranks_count_anew_only_with_those_with_which_they_exchanged_lost_state():
    table = dispatches((1, [1], None, [0]), (2, [0, 1, 2], None, []), (3, [2], 2, [1]))
    pool, attempts, recovery = recovering(table)
    recovery.give_up({2: Cause("boom")})
    assert attempts.leaving.keys() == {2, 3}, "the transfer of 1 goes on"
    assert [recovery._peers_of(rank) for rank in range(3)] == [set(), {2}, {1}]
    pool.meeting.held_back.add(2)
    assert recovery._peers_of(1) == set(), "its successor's arena is new"


def test_every_rank_concerned_has_to_answer_twice_before_the_failures_are_told():
    _, attempts, recovery = recovering(dispatches((1, [0, 1], None, []), (2, [3], 1, [1])))
    recovery.give_up({1: Cause("boom")})
    assert recovery.waiting_for == {0, 1, 3}
    numbers = frozenset({1, 2})
    for rank in (0, 1, 3):
        assert list(recovery.answered(rank, EdgesRestarted(numbers), now_s=5.0)) == []
        assert list(recovery.answered(rank, Abandoned(numbers), now_s=5.0)) == []
    assert recovery.waiting_for == {0, 1, 3}
    found = [
        each for rank in (0, 1, 3) for each in recovery.answered(rank, EdgesRestarted(numbers), now_s=5.0)
    ]
    assert [(each.dispatch, each.reason, each.void) for each in found] == [
        (1, "boom", False),
        (2, "given up with another task", True),
    ]
    assert not attempts


def test_a_rank_that_died_is_not_asked():
    pool, _, recovery = recovering(dispatches((1, [0, 1], None, [])))
    pool.meeting.held_back.add(1)
    recovery.give_up({1: None})
    assert recovery.waiting_for == {0}


def test_another_failure_begins_the_round_anew():
    _, attempts, recovery = recovering(dispatches((1, [0, 1], None, []), (2, [3], None, [])))
    recovery.give_up({1: Cause("boom")})
    list(recovery.answered(0, Abandoned(frozenset({1})), now_s=5.0))
    assert recovery.waiting_for == {1}
    recovery.give_up({2: Cause("bang")})
    assert recovery.waiting_for == {0, 1, 3}
    list(recovery.answered(1, Abandoned(frozenset({1})), now_s=5.0))
    assert recovery.waiting_for == {0, 1, 3}, "that was an answer to the smaller question"
    assert {number: each.cause for number, each in attempts.items()} == {1: Cause("boom"), 2: Cause("bang")}


def test_the_first_cause_of_a_failure_counts():
    _, attempts, recovery = recovering(dispatches((1, [0, 1], None, [])))
    recovery.give_up({1: Cause("boom")})
    recovery.give_up({1: Cause("aborted", lost=True)})
    assert attempts[1].cause == Cause("boom")


def waited_in_vain(paused_s, *, is_late=True):
    """What the task of two ranks fails of, if all processes were stopped meanwhile."""
    pool, attempts, recovery = recovering(dispatches((1, [0, 1], None, [])))
    pool.clock._looked_s -= paused_s
    pool.clock.look()
    recovery.fail(pool.workers[0], TaskFault(1, "no answer", is_late=is_late))
    return attempts[1].cause


def test_waits_that_ran_out_while_all_processes_were_stopped_are_nobodys_fault():
    assert waited_in_vain(31.0) is None
    assert waited_in_vain(0.3) == waited_in_vain(31.0, is_late=False) == Cause("no answer")


def test_a_pause_before_a_task_began_is_no_excuse():
    pool, attempts, recovery = recovering({})
    pool.clock._looked_s -= 100.0
    pool.clock.look()
    (dispatch,) = dispatches((1, [0, 1], None, [])).values()
    attempts.begin(dispatch, deadline_s=100.0, paused_before_s=pool.clock.paused_s)
    recovery.fail(pool.workers[0], TaskFault(1, "no answer", is_late=True))
    assert attempts[1].cause == Cause("no answer")


def test_a_task_that_does_not_end_in_time_is_given_up_and_the_rank_that_stays_in_it_is_killed():
    pool, attempts, recovery = recovering(dispatches((1, [0, 1], None, []), (2, [2], None, [])))
    attempts[1].deadline_s = 10.0
    pool.clock.now_s = 11.0
    recovery.look()
    assert recovery.waiting_for == {0, 1}
    list(recovery.answered(0, Abandoned(frozenset({1})), now_s=5.0))
    recovery.look()
    assert pool.killed == []
    pool.clock.now_s += Patience().leaving_s + 1.0
    recovery.look()
    assert pool.killed == [(1, "it hangs in a task that was given up")]


def test_a_rank_that_stays_in_an_unwanted_task_is_killed_without_blame():
    pool, _, recovery = recovering(dispatches((1, [0, 1], None, [])))
    recovery.stop([1, 7])
    list(recovery.answered(0, Abandoned(frozenset({1})), now_s=5.0))
    pool.clock.now_s += Patience().stopping_s + 1.0
    recovery.look()
    assert pool.killed == [(1, "it did not leave a task that was stopped")]
    assert [worker.is_to_blame for worker in pool.workers] == [True, False, True, True]
    pool.meeting.held_back.add(1)  # it has ended
    recovery.give_up({})
    recovery.look()
    assert len(pool.killed) == 1, "the other one is asked again"


def test_an_overdue_task_that_all_ranks_leave_fails_itself():
    pool, _, recovery = recovering(dispatches((1, [0], None, [])))
    pool.clock.now_s = 101.0
    recovery.look()
    numbers, found = frozenset({1}), []
    for answer in (Abandoned(numbers), EdgesRestarted(numbers)):
        found += recovery.answered(0, answer, now_s=5.0)
    assert [(each.reason, each.void) for each in found] == [
        ("it did not end in time and was given up", False)
    ]
