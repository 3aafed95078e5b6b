"""Processes that must not outlive the one that they work for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CODE = """
import os, sys
from gfgen.runtime.lifeline import die_with_parent
if os.fork() == 0:
    die_with_parent()
    os.kill(os.getppid(), 9)
    while True:
        os.read(0, 1) or os._exit(0)
os.wait()
"""


def test_a_process_is_killed_with_its_parent_though_it_does_not_notice():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CODE], **pipes) as parent:
        assert parent.stdout.read() == b"", "the end of its output: nobody holds it any more"
        assert parent.wait() == -signal.SIGKILL


def test_a_process_whose_parent_was_gone_before_ends_at_once():
    code = f"from gfgen.runtime.lifeline import die_with_parent; die_with_parent({os.getppid()})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
