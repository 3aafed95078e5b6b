import pytest
from builders import make_job, simulated_control

from gfgen.errors import InputError
from gfgen.runtime.events import Event, TaskDone, Wakeup
from gfgen.runtime.journal import Journal, read_journal

HEADER = {"policy": "srtf", "ranks": 2}


def test_events_come_back_as_they_were_applied(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, header=HEADER)
    control, recorder = simulated_control([make_job("a"), make_job("b")], guard_s=0.01, journal=journal)
    control.run()
    journal.close()
    header, *events = read_journal(path)
    assert header == {"gfgen_journal": 1, **HEADER}
    assert events == recorder.events


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
    journal.append(TaskDone(1.0, 1, 0, 0.0, 1.0))
    journal.close()
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:20])
    assert len(list(read_journal(path))) == 2


def test_a_file_that_is_no_journal_is_named(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello\nworld\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        list(read_journal(path))


def test_a_journal_of_another_version_is_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"gfgen_journal":99}\n')
    with pytest.raises(InputError, match="another version"):
        list(read_journal(path))
