"""The live record of a run, and requests to it from outside."""

import json
import os

import pytest
from builders import make_job, simulated_control

from gfgen.errors import RunError
from gfgen.runtime.core.observer import with_view
from gfgen.runtime.files.lock import hold_folder, holder_of
from gfgen.session.live import MAX_AT_ONCE, LiveRun, read_live, send_request, write_live


@pytest.fixture
def live(tmp_path):
    live = LiveRun(tmp_path, started_at=1000.0)
    with_view([live])
    yield live
    live.close()


def begin(live, *jobs):
    for observer in (live.view, live):
        observer.began(tuple(job.info for job in jobs), num_ranks=2, policy="srtf")


def test_a_run_is_watched_until_its_end_and_leaves_its_last_state(tmp_path):
    jobs = [make_job(f"fox-{n}") for n in range(3)]
    control, _ = simulated_control(jobs, num_ranks=2)
    live = LiveRun(tmp_path, started_at=1000.0)
    control.observers = (*control.observers, *with_view([live]))
    control._refresh_s = 0.0
    control.begin()
    for _ in range(4):
        control.turn()
    found = read_live(tmp_path)
    assert found["counts"] | {"jobs": 3, "running": 2, "waiting": 1} == found["counts"]
    assert [row["state"] for row in found["jobs"]] == ["running", "running", "waiting"]
    assert [rank["state"] for rank in found["ranks"]] == ["busy", "busy"]
    assert found["ends_at"] > 1000.0
    while not control.state.finished:
        control.turn()
    live.close()
    found = read_live(tmp_path)
    assert (found["state"], found["counts"]["done"], found["counts"]["waiting"]) == ("ended", 3, 0)
    assert sorted(row["id"] for row in found["recent"]) == ["fox-0", "fox-1", "fox-2"]


def test_a_request_cancels_the_jobs_that_match_and_is_answered(tmp_path, live):
    begin(live, *(make_job(name) for name in ("fox-1", "fox-2", "owl")))
    send_request(tmp_path, {"cancel": ["fox-*", "cat"], "request": "r1"})
    events = live.take_events(5.0)
    assert [(event.time_s, event.job_id) for event in events] == [(5.0, "fox-1"), (5.0, "fox-2")]
    (answer,) = read_live(tmp_path)["answers"]
    assert answer == {
        "request": "r1",
        "cancelled": ["fox-1", "fox-2"],
        "num_cancelled": 2,
        "unmatched": ["cat"],
    }


def test_many_jobs_are_cancelled_over_several_turns(tmp_path, live):
    begin(live, *(make_job(f"job-{n}") for n in range(MAX_AT_ONCE + 1)))
    send_request(tmp_path, {"cancel": ["*"], "request": "r1"})
    assert len(live.take_events(1.0)) == MAX_AT_ONCE
    assert os.read(live.fileno(), 100) == b"\n", "nothing wakes the loop for the rest"
    assert len(live.take_events(2.0)) == 1


def test_a_line_that_is_no_request_is_ignored(tmp_path, live, caplog):
    begin(live, make_job("fox"))
    os.write(live.fileno(), b'nonsense\n{"cancel": ["fox"]}\n[]\n{"cancel": ["fox"], "request": "r"}\n')
    assert [event.job_id for event in live.take_events(0.0)] == ["fox"]
    assert caplog.text.count("is ignored") == 3


def test_nobody_takes_requests_of_a_folder_without_a_run(tmp_path, live):
    live.close()
    with pytest.raises(RunError, match="takes no requests now"):
        send_request(tmp_path, {"cancel": ["fox"]})
    os.mkfifo(tmp_path / ".gfgen.requests")  # as a killed run leaves it
    with pytest.raises(RunError, match="takes no requests now"):
        send_request(tmp_path, {"cancel": ["fox"]})


def test_the_holder_of_a_folder_is_known_only_while_it_lives(tmp_path):
    assert holder_of(tmp_path) is None
    with hold_folder(tmp_path):
        assert holder_of(tmp_path).pid == os.getpid()
    (tmp_path / ".gfgen.lock").write_text(json.dumps({"pid": os.getpid(), "since": "now"}))
    assert holder_of(tmp_path) is None


def test_a_record_of_another_version_is_not_read(tmp_path):
    write_live(tmp_path, {"gfgen_live": 99})
    assert read_live(tmp_path) is None
