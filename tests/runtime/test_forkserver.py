"""The fork server leaves no file, and comes back when it has died; in a process of its own."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from gfgen.errors import WorkerError
from gfgen.runtime.processes import launcher

START = """
    import multiprocessing, os, signal, time
    from gfgen.runtime.processes import launcher
    from gfgen.system import signals

    def start_one():
        launcher.ensure_fork_server()
        process = multiprocessing.get_context("forkserver").Process(target=time.time)
        process.start()
        process.join()
        assert process.exitcode == 0
"""


def run(tmp_path, script):
    """Run a script of which `START` is the head; its temporary files go to tmp_path."""
    text = textwrap.dedent(START) + "if __name__ == '__main__':\n" + textwrap.indent(script, "    ")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", text], env=environment, timeout=60, check=False)


def test_a_process_that_is_killed_leaves_no_socket_behind(tmp_path):
    run(tmp_path, "start_one()\nopen(os.environ['TMPDIR'] + '/worked', 'w')\nos.kill(os.getpid(), 9)")
    assert os.listdir(tmp_path) == ["worked"]


def test_a_folder_for_temporary_files_may_have_a_long_path(tmp_path):
    """A socket's path has at most 107 bytes."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    run(folder, "start_one()\nopen(os.environ['TMPDIR'] + '/worked', 'w')")
    assert os.listdir(folder) == ["worked"]


def test_a_folder_for_temporary_files_may_be_a_volume_without_sockets(tmp_path):
    """virtiofs, as Docker on a Mac has it, refuses to change their mode."""
    script = textwrap.dedent("""\
        def refuse(path, mode):
            if os.path.realpath(path).startswith(os.environ["TMPDIR"]):
                raise OSError(22, "Invalid argument")

        os.chmod = refuse
        start_one()
        open(os.environ['TMPDIR'] + '/worked', 'w')
    """)
    run(tmp_path, script)
    assert os.listdir(tmp_path) == ["worked"]


def test_a_server_that_was_killed_is_started_anew_and_no_descriptor_is_lost(tmp_path):
    script = textwrap.dedent("""\
        start_one()
        server = multiprocessing.forkserver._forkserver
        fds = len(os.listdir("/proc/self/fd"))
        os.kill(server._forkserver_pid, signal.SIGKILL)
        os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
        start_one()
        assert len(os.listdir("/proc/self/fd")) == fds
        open(os.environ['TMPDIR'] + '/worked', 'w')
    """)
    run(tmp_path, script)
    assert os.listdir(tmp_path) == ["worked"]


def test_signals_to_all_processes_of_a_run_end_neither_the_server_nor_what_it_forked(tmp_path):
    script = textwrap.dedent("""\
        os.setpgid(0, 0)
        numbers = signals.FOR_THE_RUN
        for number in numbers:
            signal.signal(number, lambda *_: None)
        launcher.ensure_fork_server()
        process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
        process.start()
        for number in numbers:
            os.killpg(0, number)
        start_one()
        assert process.is_alive()
        for pid in (process.pid, launcher.multiprocessing.forkserver._forkserver._forkserver_pid):
            os.kill(pid, signal.SIGKILL)
        process.join()
        assert process.exitcode in (-signal.SIGKILL, 255)
        assert not multiprocessing.resource_tracker._resource_tracker._stop()
        open(os.environ['TMPDIR'] + '/worked', 'w')
    """)
    run(tmp_path, script)
    assert os.listdir(tmp_path) == ["worked"]


def test_a_signal_that_comes_while_the_server_starts_is_not_lost():
    came = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with launcher._signals_blocked():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # other threads would take it
            assert came == []
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_modules_of_the_current_folder_take_the_place_of_none(tmp_path):
    script = textwrap.dedent("""\
        os.mkdir(os.environ["TMPDIR"] + "/here")
        os.chdir(os.environ["TMPDIR"] + "/here")
        for name in ("signal", "socket"):
            with open(f"{name}.py", "w") as file:
                file.write("open('was-imported', 'w')")
        start_one()
        assert not os.path.exists("was-imported")
        open(os.environ['TMPDIR'] + '/worked', 'w')
    """)
    run(tmp_path, script)
    assert sorted(os.listdir(tmp_path)) == ["here", "worked"]


def test_without_proc_the_error_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(launcher, "_BY_DESCRIPTOR", "/nowhere/")
    with (
        pytest.raises(WorkerError, match="/proc is not mounted here; mount"),
        launcher._socket_folder("/"),
    ):
        pass


def test_the_server_hears_of_ends_though_the_run_was_started_with_that_signal_blocked():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        with launcher._signals_blocked():
            assert signal.SIGCHLD not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
