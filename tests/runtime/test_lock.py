"""One run at a time in an output folder."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from gfgen.errors import LockedError, OutputError
from gfgen.runtime.files import lock
from gfgen.runtime.files.lock import LOCK_NAME, hold_folder, holder_of

HOLDER = (
    "import sys, time\nfrom pathlib import Path\nfrom gfgen.runtime.files.lock import hold_folder\n"
    "with hold_folder(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)"
)
ORPHAN = (
    "import os, sys, time\nfrom pathlib import Path\nfrom gfgen.runtime.files.lock import hold_folder\n"
    "with hold_folder(Path(sys.argv[1])):\n"
    "    pid = os.fork()\n    pid and print(pid, flush=True)\n    time.sleep(600)"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_held_folder_names_its_holder_and_since_when(holder, tmp_path):
    with pytest.raises(LockedError, match=rf"process {holder.pid}, since 20\d\d-.*; wait for it") as refusal:
        hold_folder(tmp_path).__enter__()
    assert refusal.value.exit_code == 75
    assert "\n" not in str(refusal.value)


def test_the_death_of_its_holder_releases_the_folder(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK_NAME).exists()
    with hold_folder(tmp_path):
        pass


@pytest.fixture
def orphan(tmp_path):
    """A process of a run that was killed: it has kept the lock's descriptor open. The number of both."""
    run = subprocess.Popen([sys.executable, "-c", ORPHAN, tmp_path], stdout=subprocess.PIPE, text=True)
    pid = int(run.stdout.readline())
    run.kill()
    run.wait()
    yield run.pid, pid
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    run.stdout.close()


def test_a_run_does_not_start_beside_processes_of_a_killed_one(monkeypatch, orphan, tmp_path):
    monkeypatch.setattr(lock, "ORPHANS_S", 0.0)
    with pytest.raises(LockedError) as refusal:
        hold_folder(tmp_path).__enter__()
    run, _ = orphan
    assert f"the run before was killed (process {run}, since" in str(refusal.value)
    assert "its processes have not ended yet" in str(refusal.value)
    assert refusal.value.exit_code == 75


def test_a_run_waits_for_processes_of_a_killed_one(monkeypatch, orphan, tmp_path):
    waits = []

    def end_orphan(pause_s):
        waits.append(pause_s)
        os.kill(orphan[1], signal.SIGKILL)

    monkeypatch.setattr(lock.time, "sleep", end_orphan)
    monkeypatch.setattr(lock, "ORPHANS_S", 60.0)
    with hold_folder(tmp_path):
        assert waits


def test_nothing_is_left_in_the_folder_afterwards(tmp_path):
    with hold_folder(tmp_path):
        assert os.listdir(tmp_path) == [LOCK_NAME]
    assert os.listdir(tmp_path) == []


def test_a_second_try_in_the_same_process_is_refused_too(tmp_path):
    with hold_folder(tmp_path), pytest.raises(LockedError, match="in use by another run"):
        hold_folder(tmp_path).__enter__()


def test_a_holder_that_has_not_said_who_it_is_is_refused_without_a_name(tmp_path):
    with hold_folder(tmp_path):
        (tmp_path / LOCK_NAME).write_text("{")
        with pytest.raises(LockedError, match="another run; wait"):
            hold_folder(tmp_path).__enter__()


def test_a_file_that_was_removed_under_its_holder_can_be_locked_anew(tmp_path):
    with hold_folder(tmp_path):
        (tmp_path / LOCK_NAME).unlink()
        with hold_folder(tmp_path):
            pass


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"cannot write .*choose another --output"):
        hold_folder(tmp_path / "file").__enter__()


NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL]
TAKING = (
    "import errno, fcntl, os, sys\nfrom pathlib import Path\nfrom gfgen.errors import LockedError\n"
    "from gfgen.runtime.files.lock import hold_folder\n"
    "def refuse(*_): raise OSError(int(sys.argv[2]), 'no locks')\n"
    "for name in sys.argv[3:]: setattr(fcntl, name, refuse)\n"
    "try:\n    with hold_folder(Path(sys.argv[1])): print('held')\n"
    "except LockedError as error: print(error)"
)
"""Another process that finds the same file system."""


def refuse_locks(monkeypatch, number, *names):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    for name in names:
        monkeypatch.setattr(fcntl, name, refuse)


@pytest.mark.parametrize("number", NO_LOCKS)
@pytest.mark.parametrize("names", [("flock",), ("flock", "lockf")], ids=["lockf", "name"])
def test_without_locks_of_files_others_replace_them_with_a_warning(
    monkeypatch, caplog, tmp_path, names, number
):
    refuse_locks(monkeypatch, number, *names)

    def take():
        command = [sys.executable, "-c", TAKING, tmp_path, str(number), *names]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with hold_folder(tmp_path):
        assert f"in use by another run (process {os.getpid()}" in take()
        assert holder_of(tmp_path).pid == os.getpid()
    assert "this file system has " in caplog.text
    assert len(caplog.records) == 1
    assert take() == "held\n"
    assert holder_of(tmp_path) is None
    with hold_folder(tmp_path):
        pass


def test_a_name_is_held_until_the_last_process_of_the_run_has_ended(monkeypatch, tmp_path):
    refuse_locks(monkeypatch, errno.ENOSYS, "flock", "lockf")
    with hold_folder(tmp_path) as held:
        child = os.dup(held)
    with pytest.raises(LockedError):
        hold_folder(tmp_path).__enter__()
    os.close(child)
    with hold_folder(tmp_path):
        pass


def test_a_lock_that_fails_otherwise_is_one_line(monkeypatch, tmp_path):
    refuse_locks(monkeypatch, errno.EIO, "flock")
    with pytest.raises(OutputError, match="cannot lock"):
        hold_folder(tmp_path).__enter__()


def test_the_file_of_a_killed_run_of_another_user_does_not_matter(monkeypatch, tmp_path):
    (tmp_path / LOCK_NAME).write_text("")
    real = os.open

    def open_(path, flags, mode=0o777):
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", open_)
    with hold_folder(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_gone_is_not_the_one_that_is_held(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as file:
        assert lock._is_under(path, file.fileno())
        path.unlink()
        assert not lock._is_under(path, file.fileno())
        path.touch()
        assert not lock._is_under(path, file.fileno())
