from gfgen.runtime.core.events import Clock, JobArrived, RankReady, RankTimes, TaskDone, Wakeup


def test_virtual_time_stands_still_until_it_is_advanced():
    clock = Clock(virtual=True)
    clock.advance(3.0)
    clock.advance(1.0)
    assert clock.now_s == 3.0


def test_events_fall_due_in_order_of_time():
    clock = Clock(virtual=True)
    clock.at(Wakeup(2.0))
    clock.at(Wakeup(1.0))
    assert clock.next_wakeup() == 1.0
    clock.advance(1.5)
    assert clock.due() == [Wakeup(1.0)]
    assert clock.next_wakeup() == 2.0


def test_what_ends_comes_before_what_begins_at_the_same_time():
    clock = Clock(virtual=True)
    done = TaskDone(1.0, 7, (RankTimes(0, 0.5, 1.0),))
    for event in (Wakeup(1.0), JobArrived(1.0, "a"), done, RankReady(1.0, 0, 1, 0.0)):
        clock.at(event)
    clock.advance(1.0)
    assert [type(event).__name__ for event in clock.due()] == [
        "RankReady",
        "TaskDone",
        "JobArrived",
        "Wakeup",
    ]


def test_equal_events_keep_the_order_in_which_they_were_scheduled():
    clock = Clock(virtual=True)
    for name in "cab":
        clock.at(JobArrived(1.0, name))
    clock.advance(1.0)
    assert [event.job_id for event in clock.due()] == ["c", "a", "b"]


def test_wall_time_passes_by_itself():
    clock = Clock()
    assert clock.now_s >= 0.0


def test_events_of_other_kinds_before_a_time_are_more_to_come():
    clock = Clock(virtual=True)
    clock.at(Wakeup(1.0))
    clock.at(JobArrived(2.0, "a"))
    assert clock.brings_more(before_s=2.5, than=(Wakeup,))
    assert not clock.brings_more(before_s=2.0, than=(Wakeup,))
    assert not clock.brings_more(before_s=2.5, than=(Wakeup, JobArrived))
