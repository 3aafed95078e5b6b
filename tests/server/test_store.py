"""The record of what was accepted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from concurrent.futures import Future
from dataclasses import replace

import pytest

from gfgen.errors import OutputError
from gfgen.server import store as store_module
from gfgen.server.shown.served_job import ServedJob
from gfgen.server.store import (
    Ending,
    JobFacts,
    KeyTakenError,
    RequestKey,
    Store,
    _facts,
    _values,
    used_rank_s,
)


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "jobs.sqlite3", began_at=1.0)
    yield opened
    opened.close()


def accepted(job_id, *, batch_id=None, created_at=100.0):
    facts = JobFacts(
        id=job_id,
        kind="video",
        model="fake",
        prompt="a fox",
        size="64x64",
        steps=4,
        seed=7,
        created_at=created_at,
        arrives_at=created_at,
        file=f"{job_id}.mp4",
        num_tasks=7,
        batch_id=batch_id,
    )
    return facts, {"id": job_id, "prompt": "a fox"}


def test_facts_of_older_stores_are_read_and_those_of_a_second_pass_kept():
    facts, _ = accepted("a")
    older = {name: value for name, value in _values(facts).items() if name != "num_refined"}
    assert _facts(json.dumps(older)) == facts
    again = _facts(json.dumps(_values(replace(facts, num_refined=2))))
    stages = [str(ServedJob(again).task(index).stage) for index in range(2, again.num_tasks)]
    assert stages == ["denoise", "denoise", "refine", "refine", "decode"]


def run(*works):
    async def all_at_once():
        return await asyncio.gather(*works, return_exceptions=True)

    return asyncio.run(all_at_once())


def accept(store, *job_ids, **options):
    jobs = [accepted(job_id, batch_id=options.get("batch_id")) for job_id in job_ids]
    (error,) = run(store.accept(jobs, now=100.0, **options))
    if error is not None:
        raise error


def test_what_was_accepted_is_there_after_a_restart(store, tmp_path):
    accept(store, "a", "b")
    again = Store(tmp_path / "jobs.sqlite3", began_at=2.0)
    assert [facts.id for facts, _ in again.open_jobs()] == ["a", "b"]
    assert again.open_jobs()[0] == accepted("a")
    assert again.epoch > store.epoch
    again.close()


def test_a_job_ends_once_and_the_first_word_counts(store):
    accept(store, "a")
    done = Ending("a", "completed", 105.0, started_at=101.0, size_bytes=9, met_deadline=True, step=4)
    endings = [done, Ending("a", "cancelled", 106.0), Ending("b", "failed", 1.0)]
    assert run(store.end_all(endings)) == [[True, False, False]]
    kept = store.job("a")
    assert kept is not None
    assert kept.ending == done
    assert store.open_jobs() == []


def test_what_a_run_tells_of_an_end_is_added_to_one_that_was_noted_without_it(store):
    accept(store, "a", "b", "c", batch_id="batch")
    run(store.end_all([Ending("a", "completed", 105.0), Ending("b", "cancelled", 106.0)]))
    told = [Ending(name, "completed", 107.0, started_at=101.0, manifest={"of": name}) for name in "ab"]
    assert run(store.end_all(told)) == [[False, False]]
    again = replace(told[0], started_at=None, manifest={"of": "another telling"})
    assert run(store.end_all([again])) == [[False]]
    kept = {each.facts.id: (replace(each.ending, manifest=None), x) for each, x in store.manifest("batch")}
    assert kept == {
        "a": (Ending("a", "completed", 105.0, started_at=101.0), {"of": "a"}),
        "b": (Ending("b", "cancelled", 106.0), None),
    }
    assert store.batch("batch").completed == 1


def test_an_ended_job_has_the_times_of_its_manifest_entry(store):
    accept(store, "a")
    timings = {"busy_s": 3.0, "stages_s": {"encode": 0.5, "denoise": 2.5}}
    entry = {"timings": timings, "shape": {"width": 64}, "steps_reused": 2, "tag": "red"}
    run(store.end_all([Ending("a", "completed", 105.0, manifest=entry)]))
    read = {"timings": timings, "shape": {"width": 64}, "peak_memory_mb": None, "steps_reused": 2}
    assert store.job("a").ending.manifest == read


def test_nothing_can_end_a_job_twice_not_even_a_mistake_of_ours(store, tmp_path):
    accept(store, "a")
    run(store.end_all([Ending("a", "completed", 105.0)]))
    with (
        sqlite3.connect(tmp_path / "jobs.sqlite3") as db,
        pytest.raises(sqlite3.IntegrityError, match="has ended"),
    ):
        db.execute("UPDATE jobs SET status = 'failed' WHERE id = 'a'")


def test_many_writers_at_once_are_all_served(store):
    jobs = [store.accept([accepted(f"job-{number}")], now=1.0) for number in range(500)]
    assert run(*jobs) == [None] * 500
    assert len(store.open_jobs()) == 500


def test_a_request_key_counts_once_and_knows_its_request(store):
    key = RequestKey("/v1/videos k", "hash")
    accept(store, "a", key=key)
    with pytest.raises(KeyTakenError) as taken:
        accept(store, "b", key=key)
    assert (taken.value.ids, taken.value.is_same) == (("a",), True)
    assert store.job("b") is None, "what was refused is not there"
    found = store.request(replace(key, fingerprint="other"), now=100.0)
    assert found is not None
    assert not found.is_same


def test_of_two_requests_with_one_key_at_once_one_is_accepted(store):
    key = RequestKey("k", "hash")
    results = run(*(store.accept([accepted(name)], key=key, now=1.0) for name in "ab"))
    assert sorted(type(result).__name__ for result in results) == ["KeyTakenError", "NoneType"]
    assert len(store.open_jobs()) == 1


def test_a_refused_work_leaves_those_beside_it_alone(store):
    accept(store, "a")
    results = run(store.accept([accepted("a")], now=1.0), store.accept([accepted("b")], now=1.0))
    assert [type(result).__name__ for result in results] == ["IntegrityError", "NoneType"]
    assert [facts.id for facts, _ in store.open_jobs()] == ["a", "b"]


def test_a_batch_counts_its_jobs_as_they_end(store):
    accept(store, "a", "b", "c", batch_id="batch")
    run(store.end_all([Ending("a", "completed", 101.0, met_deadline=False)]))
    row = store.batch("batch")
    assert (row.total, row.completed, row.missed, row.completed_at) == (3, 1, 1, None)
    run(store.end_all([Ending("b", "failed", 102.0), Ending("c", "cancelled", 103.0)]))
    row = store.batch("batch")
    assert (row.completed, row.failed, row.cancelled, row.completed_at) == (1, 1, 1, 103.0)
    run(store.remove("abc"))
    assert store.batch("batch") is None


def test_batches_are_listed_page_by_page(store):
    for number, name in enumerate("abcd"):
        jobs = [accepted(f"job-{name}", batch_id=name)]
        run(store.accept(jobs, batch_id=name, now=100.0 + number // 2))
    ids = lambda **which: [row.id for row in store.batches(**which)]  # noqa: E731
    assert ids(limit=3, after=None) == ["d", "c", "b"]
    assert ids(limit=3, after="c") == ["b", "a"]
    assert ids(limit=3, after="a") == []


def test_what_is_open_is_never_removed(store):
    accept(store, "a")
    run(store.remove(["a"]))
    assert store.job("a") is not None


def test_a_key_counts_for_a_day(store):
    key, later = RequestKey("k", "hash"), 100.0 + 86401.0
    accept(store, "a", key=key)
    assert run(store.forget_requests(now=later - 2.0)) == [None]
    assert store.request(key, now=later - 2.0) is not None
    assert store.request(key, now=later) is None, "also before it is forgotten"
    run(store.accept([accepted("b")], key=replace(key, fingerprint="other"), now=later))
    assert store.request(key, now=later).ids == ("b",)
    run(store.forget_requests(now=2 * later))
    assert store.request(key, now=later) is None


def test_what_is_too_old_or_too_much_is_found_the_newest_are_kept(store):
    accept(store, *"abcde")
    endings = [
        Ending(job_id, "completed", 100.0 + number, size_bytes=10) for number, job_id in enumerate("abcd")
    ]
    run(store.end_all(endings))

    def outdated(**limits):
        return {kept.facts.id for kept in store.outdated(**limits)}

    assert outdated(before=0.0, keep_bytes=100) == set()
    assert outdated(before=102.0, keep_bytes=100) == {"a", "b"}
    assert outdated(before=0.0, keep_bytes=25) == {"a", "b"}
    assert outdated(before=0.0, keep_bytes=0) == set("abcd")
    assert run(store.change("a", is_open=False, favourite=True)) == [True]
    assert outdated(before=102.0, keep_bytes=100) == {"b"}, "a favourite stays"
    assert [kept.facts.id for kept in store.jobs(limit=10, is_favourite=True)] == ["a"]
    run(store.change("a", is_open=False, favourite=False))
    assert outdated(before=0.0, keep_bytes=0) == set("abcd")


def test_lists_go_forward_and_backward(store):
    for number, name in enumerate("abcd"):
        accept(store, name)
        if number % 2:
            run(store.end_all([Ending(name, "failed", 100.0 + number)]))
    ids = lambda **which: [kept.facts.id for kept in store.jobs(limit=10, **which)]  # noqa: E731
    assert ids() == ["d", "c", "b", "a"]
    assert ids(after="c") == ["b", "a"]
    assert ids(after="b", is_ascending=True) == ["c", "d"]
    assert ids(has_ended=True) == ["d", "b"]
    assert ids(kind="image") == []
    assert [kept.facts.id for kept in store.jobs(limit=5, has_ended=True, is_by_end=True)] == ["d", "b"]


def test_jobs_with_a_file_are_those_that_are_done_or_may_be_yet(store):
    accept(store, *"abcd")
    run(
        store.end_all(
            [Ending("a", "completed", 1.0), Ending("b", "cancelled", 1.0), Ending("c", "failed", 1.0)]
        )
    )
    assert store.known("abcdef", "open", "completed") == {"a", "d"}
    assert store.known("abcdef", "cancelled", "failed") == {"b", "c"}, "of e and f nothing is known here"


def test_a_full_disk_refuses_and_keeps_what_was_there(store):
    accept(store, "a")
    (pages,) = store._writer.execute("PRAGMA page_count").fetchone()
    store._writer.execute(f"PRAGMA max_page_count = {pages}")
    big = accepted("b")[0], {"prompt": "x" * 100_000}
    (error,) = run(store.accept([big], now=1.0))
    assert isinstance(error, OutputError)
    assert "free some space" in str(error)
    store._writer.execute("PRAGMA max_page_count = 1000000")
    accept(store, "c")
    assert [facts.id for facts, _ in store.open_jobs()] == ["a", "c"]


def test_a_full_disk_is_told_of_once_until_something_is_written(store, caplog):
    def refused(*_):
        raise sqlite3.OperationalError("database or disk is full")

    works = [(lambda _: None, Future()) for _ in range(4)]
    with pytest.MonkeyPatch.context() as full:
        full.setattr(store_module, "_attempt", refused)
        for work in works[:3]:
            store._commit([work])
    assert len(caplog.records) == 1
    store._commit(works[3:])
    assert works[3][1].done()
    assert store._logged_error is None


def test_a_store_says_whether_it_can_be_written(store, monkeypatch):
    def refused(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.MonkeyPatch.context() as full:
        full.setattr(store_module, "_attempt", refused)
        for _ in range(2):
            (error,) = run(store.check_writable())
            assert isinstance(error, OutputError)
    assert store._logged_error is not None
    assert run(store.check_writable()) == [None]
    assert store._logged_error is None


def test_nothing_is_accepted_into_a_store_that_was_removed(store, tmp_path):
    moved = (tmp_path / store_module.STORE_NAME).rename(tmp_path / "moved")
    (error,) = run(store.accept([accepted("a")], now=100.0))
    assert str(error) == "jobs.sqlite3 was removed or replaced; start the server again"
    moved.rename(tmp_path / store_module.STORE_NAME)
    assert run(store.accept([accepted("a")], now=100.0)) == [None]


def test_a_store_is_opened_on_a_full_disk_and_takes_jobs_when_there_is_room(store, tmp_path, caplog):
    accept(store, "a")

    def connect_to_full(path):
        db = connect(path)
        db.execute("PRAGMA query_only = 1")
        return db

    connect = store_module._connect
    with pytest.MonkeyPatch.context() as full:
        full.setattr(store_module, "_connect", connect_to_full)
        again, third = (Store(tmp_path / "jobs.sqlite3", began_at=at) for at in (2.0, 3.0))
    assert len({store.epoch, again.epoch, third.epoch}) == 3
    assert [facts.id for facts, _ in again.open_jobs()] == ["a"]
    with pytest.raises(OutputError, match="free some space"):
        accept(again, "b")
    assert len(caplog.records) == 1
    again._writer.execute("PRAGMA query_only = 0")
    accept(again, "b")
    assert [facts.id for facts, _ in store.open_jobs()] == ["a", "b"]
    again.close()
    third.close()


def test_a_store_of_version_1_is_upgraded(tmp_path):
    with contextlib.closing(Store(tmp_path / "jobs.sqlite3", began_at=1.0)) as store:
        accept(store, "a", batch_id="batch")
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.sqlite3")) as db, db:
        for table in ("jobs", "batches"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN owner")
        db.execute("UPDATE jobs SET facts = json_set(json_remove(facts, '$.owner'), '$.seconds', '4')")
        db.execute("PRAGMA user_version = 1")
    with contextlib.closing(Store(tmp_path / "jobs.sqlite3", began_at=2.0)) as upgraded:
        assert upgraded.job("a").facts.owner is None
        assert upgraded.jobs(limit=5, owner="ann") == upgraded.batches(limit=5, after=None, owner="ann") == []
        assert upgraded.batch("batch").owner is None


def test_a_store_of_another_version_is_left_alone(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.sqlite3")) as db, db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(OutputError, match="another version"):
        Store(tmp_path / "jobs.sqlite3", began_at=1.0)
    (tmp_path / "other.sqlite3").write_bytes(b"no database" * 100)
    with pytest.raises(OutputError, match="cannot open"):
        Store(tmp_path / "other.sqlite3", began_at=1.0)


def test_time_of_ranks_is_counted_once_for_a_key_and_day_and_stays_when_the_job_is_removed(store, tmp_path):
    jobs = [(replace(accepted(name)[0], owner="ann"), {}) for name in "ab"]
    run(store.accept(jobs, now=100.0))
    entry = {"timings": {"rank_s": 2.5}}
    done = Ending("a", "completed", 105.0, manifest=entry)
    cancelled = Ending("b", "cancelled", 106.0)  # the run tells later what it took
    run(store.end_all([done, cancelled]))
    told = replace(cancelled, manifest=entry)
    run(store.end_all([done, told, told]))
    run(store.remove(["a", "b"]))
    again = Store(tmp_path / "jobs.sqlite3", began_at=2.0)
    assert [used_rank_s(again, owner, day=day) for owner, day in (("ann", 0), ("ann", 1), ("bob", 0))] == [
        5,
        0,
        0,
    ]
    again.close()


def test_a_store_from_before_time_was_counted_opens(store, tmp_path):
    accept(store, "a")
    with sqlite3.connect(tmp_path / "jobs.sqlite3") as db:
        db.execute("DROP TABLE usage")
    db.close()
    again = Store(tmp_path / "jobs.sqlite3", began_at=2.0)
    assert used_rank_s(again, "ann", day=0) == 0
    again.close()
