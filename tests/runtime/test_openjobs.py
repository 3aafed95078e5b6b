"""Sorted lists of open jobs are what sorting anew would give, whatever has happened in between."""

import math
from dataclasses import replace
from operator import attrgetter

import pytest
from builders import make_job, simulated_control
from hypothesis import given
from hypothesis import strategies as st

from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.job_record import JobRecord
from gfgen.runtime.core import openjobs
from gfgen.runtime.core.openjobs import MAX_ORDERS, OpenJobOrders, OpenJobs, is_unbegun, kind_of
from gfgen.runtime.predict.cost import CostModel
from gfgen.snapshot import JobView

by_arrival = attrgetter("arrival_s")


def by_precedence(job: JobView) -> tuple[int, float]:
    return job.precedence, -job.arrival_s


def view(number: int, arrival_s: float = 0.0, priority: int = 0) -> JobView:
    job = make_job(f"job-{number}", arrival_s=arrival_s, priority=priority)
    costs = CostModel()
    cost_class = costs.cost_class("m", "s", flops=job.flops, state_bytes=1)
    return JobRecord(job, cost_class, arrival_s, math.inf).view(costs)


changes = st.lists(
    st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 3), st.integers(-1, 1), st.booleans()),
    max_size=60,
)


@given(changes)
def test_a_kept_order_is_the_sorted_one(changes):
    jobs = OpenJobs()
    for is_put, number, arrival_s, priority, is_asked in changes:
        if is_put:
            jobs.put(view(number, float(arrival_s), priority))
        else:
            jobs.discard(f"job-{number}")
        if is_asked:
            opened = list(jobs.frozen().values())
            for key in (by_arrival, by_precedence):
                assert jobs.sorted(key) == sorted(opened, key=key)


@given(changes)
def test_the_kinds_of_jobs_that_have_not_begun_are_known(changes):
    jobs = OpenJobs()
    for is_put, number, steps, _, has_begun in changes:
        job = view(number)
        begun = replace(job, num_tasks=steps + 4, next_task=replace(job.next_task, index=int(has_begun)))
        if is_put:
            jobs.put(begun)
        else:
            jobs.discard(f"job-{number}")
        unbegun = filter(is_unbegun, jobs.frozen().values())
        assert jobs.unbegun_kinds == set(map(kind_of, unbegun))


def test_what_was_handed_out_does_not_change():
    jobs = OpenJobs()
    for number in range(20):
        jobs.put(view(number, float(number)))
    views, in_order = jobs.frozen(), jobs.sorted(by_arrival)
    ids = [job.job_id for job in in_order]
    jobs.discard("job-3")
    jobs.put(view(7, 99.0))
    jobs.renew(lambda job_id: replace(view(0), job_id=job_id))
    assert len(views) == 20
    assert [job.job_id for job in in_order] == ids


def test_a_snapshot_that_a_policy_keeps_stays_as_it_was():
    kept = []

    def hoarder(snapshot):
        kept.append((snapshot, dict(snapshot.open), snapshot.in_order(by_arrival), snapshot.ranks))
        return load_policy("srtf").decide(snapshot)

    jobs = [make_job(f"job-{i}", steps=1 + i % 3, arrival_s=0.1 * i) for i in range(12)]
    control, _ = simulated_control(jobs, num_ranks=2, lookahead_s=0.02)
    control.decider.policy = NamedPolicy("hoarder", hoarder)
    control.run()
    assert len(kept) > 20
    for snapshot, opened, in_order, ranks in kept:
        assert dict(snapshot.open) == opened
        assert snapshot.ranks == ranks
        assert list(snapshot.in_order(by_arrival)) == in_order


def test_a_snapshot_with_other_jobs_in_it_is_sorted_by_those():
    seen = []

    def choosy(snapshot):
        some = dict(list(snapshot.open.items())[:2])
        seen.append((len(some), len(replace(snapshot, open=some).in_order(by_arrival))))
        return load_policy("fcfs").decide(snapshot)

    control, _ = simulated_control([make_job(f"job-{i}") for i in range(6)])
    control.decider.policy = NamedPolicy("choosy", choosy)
    control.run()
    assert all(some == sorted_ for some, sorted_ in seen)


def test_nothing_is_kept_of_jobs_that_are_gone():
    jobs = OpenJobs()
    for number in range(100):
        jobs.put(view(number))
        jobs.sorted(by_precedence)
        jobs.discard(view(number).job_id)
    jobs.sorted(by_precedence)
    assert "job-" not in repr(vars(jobs))


def test_an_order_that_nobody_asks_for_does_not_grow(monkeypatch):
    monkeypatch.setattr(openjobs, "MAX_CHANGED", 50)
    jobs = OpenJobs()
    jobs.sorted(by_precedence)
    for number in range(200):
        jobs.put(view(number))
        jobs.discard(view(number).job_id)
    assert repr(vars(jobs)).count("job-") <= 50
    assert jobs.sorted(by_precedence) == []


def test_a_key_that_raises_is_forgotten_and_the_others_go_on():
    jobs = OpenJobs()
    for number in range(8):
        jobs.put(view(number, float(number)))

    def broken(job):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        jobs.sorted(broken)
    jobs.put(view(9, -1.0))
    assert jobs.sorted(by_arrival)[0].job_id == "job-9"


def test_keys_made_anew_at_every_call_do_not_pile_up():
    jobs = OpenJobs()
    jobs.put(view(1))
    for _ in range(50):
        assert len(jobs.sorted(lambda job: job.arrival_s)) == 1
    assert len(jobs._orders) <= MAX_ORDERS


def test_orders_of_a_snapshot_are_of_no_use_once_something_has_changed():
    jobs = OpenJobs()
    jobs.put(view(1))
    views = jobs.frozen()
    orders = OpenJobOrders(jobs, views, joining=[])
    assert orders.sorted(views, by_arrival) is not None
    assert orders.sorted(dict(views), by_arrival) is None
    jobs.put(view(2))
    assert orders.sorted(views, by_arrival) is None
