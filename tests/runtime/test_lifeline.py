"""Processes that must not outlive the one that they work for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from subprocess import PIPE

import pytest

from gfgen.system.lifeline import module_command, module_environment

FORK = """
import os
from gfgen.system.lifeline import bind_forks
bind_forks()
if os.fork() == 0:
    os.fork()  # and what the child forks
    os.write(1, b"x")
    while True:
        os.read(0, 1) or os._exit(0)
os.wait()
"""
NATIVE_CALL = """
import ctypes, os, signal, sys
from functools import partial
from gfgen.runtime.processes import launcher
launcher.ensure_fork_server([1])
sleep = "import ctypes, os; os.write(1, b'x'); ctypes.{}(None).sleep(600)"
for library in ("PyDLL", "CDLL"):  # holds the interpreter's lock, and does not
    process = launcher.multiprocessing.get_context("forkserver").Process(
        target=exec, args=(sleep.format(library),), daemon=True
    )
    process.start()
os.read(0, 1)
"""


def assert_ends_with_parent(command: list[str]) -> None:
    """Two processes of a command say that they are there; nobody holds its output when it was killed."""
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=module_environment()) as parent:
        assert parent.stdout is not None
        assert parent.stdout.read(2) == b"xx"
        parent.kill()
        assert parent.stdout.read() == b""
        assert parent.wait() == -signal.SIGKILL


def test_forks_are_killed_with_their_parent_though_they_do_not_notice() -> None:
    assert_ends_with_parent([sys.executable, "-c", FORK])


def test_what_the_fork_server_forks_is_killed_with_the_run_in_the_middle_of_a_native_call() -> None:
    assert_ends_with_parent([sys.executable, "-c", NATIVE_CALL])


def test_a_process_whose_parent_was_gone_before_ends_at_once() -> None:
    code = f"from gfgen.system.lifeline import die_with_parent; die_with_parent({os.getppid()})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1


@pytest.mark.parametrize("parent", ["own", "another"])
def test_a_module_is_run_as_by_the_interpreter_unless_its_parent_is_gone(parent: str) -> None:
    command = module_command("calendar", "2026", "11")
    if parent == "another":
        command[command.index(str(os.getpid()))] = str(os.getppid())
    ended = subprocess.run(command, capture_output=True, text=True, env=module_environment(), check=False)
    assert ("November 2026" in ended.stdout, ended.returncode) == (
        (True, 0) if parent == "own" else (False, 1)
    )
