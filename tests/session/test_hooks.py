"""Commands of --on-file and --on-done: what they get, and that their failures hold up nothing."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_job

from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome
from gfgen.session.filters import FileHook, run_done_hook


@pytest.fixture(autouse=True)
def heard(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("gfgen"), "propagate", True)
    caplog.set_level("INFO", logger="gfgen")
    return caplog


def outcome(job_id: str, status: str = "done") -> JobOutcome:
    return JobOutcome(make_job(job_id).info, status)  # type: ignore[arg-type]


def test_each_finished_file_runs_the_command_in_order(tmp_path: Path, heard) -> None:
    log = tmp_path / "log"
    hook = FileHook(f'echo "$GFGEN_JOB_ID $GFGEN_FILE $GFGEN_SEED" >> {log}', tmp_path, limit_s=20)
    for each in (outcome("a"), outcome("b", "failed"), outcome("c"), outcome("d", "skipped")):
        hook.ended(each)
    hook.close()
    hook.finish(is_stopped=False)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [line[0] for line in lines] == ["a", "c"]
    assert lines[0][1] == str(tmp_path / outcome("a").info.file)
    assert heard.text == "" or "waiting" in heard.text


def test_a_slow_command_delays_nobody_and_is_killed_at_its_limit(tmp_path: Path, heard) -> None:
    hook = FileHook("sleep 600 & sleep 600", tmp_path, limit_s=1.0)
    began = time.monotonic()
    hook.ended(outcome("a"))
    assert "took longer" not in heard.text, "it was not waited for"
    hook.finish(is_stopped=False)
    assert time.monotonic() - began < 300
    assert "--on-file for job a took longer than 1.0 s and was killed" in heard.text


def test_a_command_that_stays_in_the_background_is_not_waited_for(tmp_path: Path, heard) -> None:
    hook = FileHook(f"(until [ -e {tmp_path}/go ]; do sleep 0.05; done) &", tmp_path, limit_s=20)
    hook.ended(outcome("a"))
    hook.finish(is_stopped=False)
    (tmp_path / "go").touch()
    assert "took longer" not in heard.text


def test_a_command_that_fails_is_named_with_its_output(tmp_path: Path, heard) -> None:
    hook = FileHook("echo no such bucket; exit 3", tmp_path, limit_s=20)
    hook.ended(outcome("a"))
    hook.finish(is_stopped=False)
    assert "--on-file for job a failed with status 3: no such bucket" in heard.text


def test_a_stopped_run_starts_no_further_command_and_counts_them(tmp_path: Path, heard) -> None:
    hook = FileHook("sleep 0.5", tmp_path, limit_s=20)
    for name in "abc":
        hook.ended(outcome(name))
    hook.finish(is_stopped=True)  # the first command may run by now
    assert re.search("--on-file was not run for [23] jobs, because the run was stopped", heard.text)


def test_the_end_of_a_run_passes_its_counts(tmp_path: Path, heard) -> None:
    log = tmp_path / "log"
    summary = Summary(num_done=3, num_failed=1, num_skipped=2)
    command = f'echo "$GFGEN_STATUS $GFGEN_DONE $GFGEN_FAILED $GFGEN_SKIPPED $GFGEN_OUTPUT" > {log}'
    run_done_hook(command, summary, tmp_path, status="failed", limit_s=20)
    assert log.read_text() == f"failed 3 1 2 {tmp_path}\n"


def test_commands_run_when_the_folder_for_temporary_files_is_gone(
    tmp_path: Path, heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    run_done_hook(f"echo > {tmp_path}/log", Summary(), tmp_path, status="done", limit_s=20)
    assert (tmp_path / "log").exists()


def test_a_command_that_cannot_start_is_named(tmp_path: Path, heard) -> None:
    hook = FileHook("true", tmp_path, limit_s=20)
    long = make_job("a").info
    hook.ended(replace(outcome("a"), info=replace(long, spec=replace(long.spec, prompt="x" * 2**18))))
    hook.finish(is_stopped=False)
    assert "--on-file for job a could not start: Argument list too long" in heard.text
