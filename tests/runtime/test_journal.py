import os
import subprocess
import sys

import pytest
from builders import make_job, simulated_control
from journal_reader import read_journal, read_runs

from gfgen.errors import InputError, OutputError
from gfgen.runtime.core.events import Event, JobArrived, RankTimes, TaskDone, Wakeup
from gfgen.runtime.files import journal as journal_module
from gfgen.runtime.files.journal import Journal, first_arrivals, journal_header
from gfgen.runtime.files.resume import RunStart

HEADER = {"policy": "srtf", "ranks": 2}


def turns_of(path):
    """By run, the events of each turn of the loop in which there were any."""
    return [[list(turn.events) for turn in run.turns if turn.events] for run in read_runs(path)]


def test_events_come_back_as_they_were_applied(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, header=HEADER)
    control, recorder = simulated_control([make_job("a"), make_job("b")], lookahead_s=0.01, journal=journal)
    control.run()
    journal.close()
    header, *events = read_journal(path)
    assert header == {"gfgen_journal": 2, **HEADER}
    assert events == recorder.events


def test_events_that_were_applied_together_are_one_turn(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, header=HEADER)
    control, _ = simulated_control([make_job("a"), make_job("b")], lookahead_s=0.01, journal=journal)
    batches, wait = [], control.backend.wait

    def noted(until):
        batches.append(wait(until))
        return batches[-1]

    control.backend.wait = noted
    control.run()
    journal.close()
    assert turns_of(path) == [[batch for batch in batches if batch]]
    assert max(map(len, batches)) > 1


def test_turns_of_two_runs_are_not_joined(tmp_path):
    path = tmp_path / "journal.jsonl"
    for _ in range(2):
        journal = Journal(path, header=HEADER)
        journal.append(Wakeup(1.0))
        journal.close()
    assert turns_of(path) == [[[Wakeup(1.0)]], [[Wakeup(1.0)]]]


def test_the_header_tells_other_jobs_apart():
    def header(*jobs):
        infos = [job.info for job in jobs]
        return journal_header(infos, RunStart(num_ranks=2, lookahead_s=0.005, started_at=1.5), policy="srtf")

    one, two = make_job("a"), make_job("b")
    assert header(one, two) == header(one, two) | {
        "policy": "srtf",
        "ranks": 2,
        "guard_s": 0.005,
        "started_at": 1.5,
        "jobs": 2,
        "last_number": 0,
        "resumed": {},
        "closes_s": None,
        "profile": None,
    }
    assert header(one, two)["jobs_hash"] not in (header(two, one)["jobs_hash"], header(one)["jobs_hash"])


def test_a_second_run_appends_a_header_of_its_own(tmp_path):
    path = tmp_path / "journal.jsonl"
    for policy in ("srtf", "edf"):
        journal = Journal(path, header={"policy": policy})
        journal.append(Wakeup(1.0))
        journal.close()
    entries = list(read_journal(path))
    assert [entry["policy"] for entry in entries if not isinstance(entry, Event)] == ["srtf", "edf"]


def test_a_torn_last_line_is_passed_over(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, header=HEADER)
    journal.append(TaskDone(1.0, 1, (RankTimes(0, 0.0, 1.0),)))
    journal.close()
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:20])
    assert len(list(read_journal(path))) == 2


def test_a_line_that_a_killed_run_tore_does_not_spoil_the_next_run(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, header=HEADER)
    journal.append(Wakeup(1.0))
    journal.close()
    path.write_bytes(path.read_bytes()[:-5])
    journal = Journal(path, header=HEADER | {"policy": "edf"})
    journal.append(Wakeup(2.0))
    journal.close()
    first, second, event = read_journal(path)
    assert (first["policy"], second["policy"]) == ("srtf", "edf")
    assert event == Wakeup(2.0)


def test_a_spoilt_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text(
        '{"gfgen_journal":1}\n{"turn":1,"event":"Wakeup"}\n{"turn":1,"event":"Wakeup","time_s":1.0}\n'
    )
    with pytest.raises(InputError, match="line 2 is not a line of a gfgen journal"):
        list(read_journal(path))


@pytest.mark.parametrize("content", ['{"gfgen_journal":99}\n{"event":"Dream"}\n', "my notes\n", "\0" * 9])
def test_a_foreign_journal_is_moved_aside_and_a_new_one_begins(tmp_path, caplog, content):
    path = tmp_path / "journal.jsonl"
    for number in (1, 2):
        path.write_text(content)
        Journal(path, header=HEADER).close()
        assert (tmp_path / f"journal.{number}.old").read_text() == content
        assert [entry["policy"] for entry in read_journal(path)] == ["srtf"]
    assert "renamed to journal.1.old" in caplog.text


def test_arrivals_of_a_force_are_those_of_its_own_runs(tmp_path):
    path = tmp_path / "journal.jsonl"
    for started_at, forced_from in ((100.0, None), (200.0, 0), (300.0, 0), (400.0, 90)):
        journal = Journal(path, header={"started_at": started_at, "forced_from": forced_from})
        journal.append(JobArrived(1.0, "fox", "hash"))
        journal.close()
    found = {each: first_arrivals(path, forced_from=each)["fox", "hash"] for each in (None, 0, 90)}
    assert found == {None: 101.0, 0: 201.0, 90: 401.0}


def test_a_journal_that_is_truncated_while_it_is_read_does_not_end_the_process(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, header={"started_at": 90.0})
    for number in range(1000):
        journal.append(JobArrived(1.5, f"fox-{number}", "hash"))
    journal.close()
    program = "import os, sys\nfrom pathlib import Path\nfrom gfgen.runtime.files.journal import arrivals\n"
    program += "found = arrivals(Path(sys.argv[1]))\nnext(found)\nos.truncate(sys.argv[1], 0)\nlist(found)\n"
    assert subprocess.run([sys.executable, "-c", program, path]).returncode == 0
    assert first_arrivals(path) == {}


@pytest.mark.parametrize("size", [1, 300, 2**24])
def test_blocks_of_a_journal_hide_no_arrival(tmp_path, monkeypatch, size):
    monkeypatch.setattr(journal_module, "_BLOCK_BYTES", size)
    path = tmp_path / "journal.jsonl"
    for started_at in (100.0, 200.0):
        journal = Journal(path, header={"started_at": started_at})
        for name in ("fox", "owl", f"hen-{started_at:g}"):
            journal.append(JobArrived(1.0, name, "hash"))
        journal.close()
    with path.open("ab") as file:
        file.write(b'{"event": "JobArrived", "torn')
    assert {name: at for (name, _), at in first_arrivals(path).items()} == {
        "fox": 101.0,
        "owl": 101.0,
        "hen-100": 101.0,
        "hen-200": 201.0,
    }
    last = [(at, each["job_id"]) for at, each in journal_module.arrivals(path, is_last=True)]
    assert last == [(200.0, "fox"), (200.0, "owl"), (200.0, "hen-200")]


def test_an_unfinished_turn_is_kept_when_the_run_breaks_off(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, header=HEADER)
    journal.append(Wakeup(1.0))
    assert len(list(read_journal(path))) == 1
    journal.close()
    assert len(list(read_journal(path))) == 2


def test_a_file_that_is_no_journal_is_named(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello\nworld\n")
    with pytest.raises(InputError, match="line 1 is not a line of a gfgen journal"):
        list(read_journal(path))


def test_a_journal_of_another_version_is_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"gfgen_journal":99}\n')
    with pytest.raises(InputError, match="another version"):
        list(read_journal(path))


def test_a_folder_that_has_the_name_of_a_journal_stays(tmp_path):
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(OutputError, match="Is a directory"):
        Journal(tmp_path / "journal.jsonl", header={})
    assert os.listdir(tmp_path) == ["journal.jsonl"]
