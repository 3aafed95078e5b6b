"""`gfgen run` without anyone looking on: locks, log files, closing time, watched folders."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import gfgen

from gfgen.cli.main import main
from gfgen.runtime.files.lock import hold_folder
from gfgen.session import memory
from gfgen.session.session import try_to_write

ROOT = Path(__file__).parents[2]
FOX = {"id": "fox", "prompt": "a red fox", "model": "tiny-wan", "size": "64x64", "frames": 5, "steps": 3}
OWL = FOX | {"id": "owl", "prompt": "an owl"}


@pytest.fixture
def night(tmp_path, tiny_models):
    """A folder with a job file; what is started there runs in it."""
    put(tmp_path / "night.jsonl", FOX)
    return tmp_path


def put(path, *jobs):
    """A job file that appears complete."""
    hidden = path.with_name(f".{path.name}.part")
    hidden.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    hidden.rename(path)


def start(folder, *arguments, **options):
    command = [sys.executable, "-m", "gfgen", "run", "--ranks", "1", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **options,
    )  # fmt: skip


def run(folder, *arguments, **options):
    """(exit code, lines of standard output, standard error)."""
    process = start(folder, *arguments, **options)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return process.returncode, out.splitlines(), err


def wait_for(path, process):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def refusal(capsys, *arguments):
    """(exit code, standard error) of a command that starts nothing."""
    with pytest.raises(SystemExit) as end:
        main(["run", *map(str, arguments)])
    return end.value.code, capsys.readouterr().err


def test_a_held_output_folder_is_exit_code_75_and_one_line(capsys, night):
    (night / "out").mkdir()
    with hold_folder(night / "out"):
        code, err = refusal(capsys, night / "night.jsonl", "--output", night / "out")
    assert code == 75
    assert f"out is in use by another run (process {os.getpid()}, since 20" in err
    assert len(err.splitlines()) == 1


def test_a_run_without_terminal_home_or_path_tells_everything_in_its_log(night):
    env = {"PATH": "/usr/bin:/bin", "GFGEN_CACHE": os.environ["GFGEN_CACHE"], "PYTHONPATH": str(ROOT)}
    (night / "out").mkdir()
    (night / "out" / ".old.tmp-17.mp4").write_text("of a killed run")
    jobs, log, out = night / "night.jsonl", night / "logs" / "night.log", night / "out"
    code, lines, err = run("/", jobs, "--quiet", "--log-file", log, "-o", out, env=env)
    assert (code, err) == (0, "")
    assert lines == [f"files and manifest.jsonl are in {out}/"]
    assert sorted(os.listdir(out)) == [".gfgen.live.json", "fox.mp4", "journal.jsonl", "manifest.jsonl"]
    text = log.read_text()
    for part in (
        "removed 1 unfinished file of an earlier run",
        "started fox on rank 0",
        "done fox: fox.mp4",
    ):
        assert part in text
    assert all(line[:2] == "20" and line.split()[2] == "INFO" for line in text.splitlines())


def test_what_ends_a_run_is_in_its_log_too(capsys, night):
    code, err = refusal(capsys, night / "none.jsonl", "--log-file", night / "run.log")
    assert code == 2
    assert "no such file" in err
    assert "ERROR   job file" in (night / "run.log").read_text()


def test_with_json_lines_what_ends_a_run_is_one_of_them(night):
    code, _, err = run(night, "none.jsonl", "--log-json")
    assert code == 2
    entry = json.loads(err)
    assert (entry["level"], "no such file" in entry["message"]) == ("error", True)
    assert (entry["event"], entry["exit_code"]) == ("failed", 2)


def test_closing_time_is_no_failure_and_the_last_line_says_what_is_left(night):
    put(night / "night.jsonl", FOX | {"steps": 1000})
    code, out, err = gfgen(night, "run", "night.jsonl", "--ranks", "1", "--until", "1s")
    assert code == 0, err
    assert out.splitlines()[-1] == "1 job is left: run the same command again to go on"
    assert (night / "outputs/night/manifest.jsonl").read_text() == ""


def test_who_reads_the_last_lines_may_go_before_they_come(night):
    """All is done by then."""
    code = "from gfgen.cli.run import _say; [_say('line') for _ in range(3)]"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_terminal_that_is_closed_does_not_end_a_run_that_was_not_told_to(night):
    """As one that was started in a session of its own, or by a shell that disowned it."""
    master, slave = os.openpty()
    command = [sys.executable, "-m", "gfgen", "run", "night.jsonl", "--ranks", "1"]
    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = subprocess.Popen(command, cwd=night, start_new_session=True, **streams)
    os.close(slave)
    assert b"\n" in os.read(master, 4096)
    os.close(master)
    assert process.wait(timeout=120) == 0
    assert (night / "outputs/night/fox.mp4").exists()


def test_a_watched_folder_is_served_until_a_signal_and_each_file_once(night):
    folder, outputs = night / "inbox", night / "outputs" / "inbox"
    folder.mkdir()
    put(folder / "early.jsonl", FOX | {"model": "tiny-wam"})
    process = start(night, "--watch", "inbox", "--model", "tiny-wan")
    wait_for(outputs / "journal.jsonl", process)
    put(folder / "a.jsonl", FOX)
    wait_for(outputs / "fox.mp4", process)
    put(folder / "b.jsonl", FOX, OWL)
    put(folder / "c.jsonl", FOX | {"id": "cat", "model": "tiny-qwen-image"})
    wait_for(outputs / "owl.mp4", process)
    wait_for(folder / "c.jsonl.errors.txt", process)
    while len((outputs / "manifest.jsonl").read_text().splitlines()) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.startswith("jobs       2 done in")
    assert "model 'tiny-qwen-image' is not loaded; stop the run and start it again" in err
    assert "model = tiny-wam: unknown; did you mean 'tiny-wan'?" in err
    assert err.count("started ") == 2
    taken = [json.loads(line)["file"] for line in (outputs / "watched.jsonl").read_text().splitlines()]
    assert taken == ["a.jsonl", "b.jsonl"]


def test_a_journal_on_a_full_disk_ends_the_run_with_one_line(night):
    (night / "out").mkdir()
    (night / "out" / "journal.jsonl").symlink_to("/dev/full")
    code, _, err = gfgen(night, "run", "night.jsonl", "--ranks", "1", "--quiet", "-o", "out")
    assert code == 1
    expected = "gfgen: cannot write out/journal.jsonl: No space left on device; make room, then run the same"
    assert err.startswith(expected)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a job file, - for standard input, or give a prompt"),
        (["--output", "out"], "name a job file, - for standard input, or give a prompt"),
        (["night.jsonl", "--watch", "."], "give either JOBS or --watch DIR, a folder of job files"),
        ([""], "JOBS is empty; name a job file, or - for standard input"),
        (["night.jsonl", "--output", ""], "it is empty; name a path"),
        (["night.jsonl", "--lookahead", "nan"], "nan is not a finite number"),
        (["--watch", "nowhere"], "--watch nowhere: is no folder; make one"),
        (["--watch", "loop"], "--watch loop: is no folder"),
        (["--watch", ".", "--output", "."], "this is also the output folder"),
        (
            ["night.jsonl", "--output", "night.jsonl"],
            "--output night.jsonl: this is a file; name another folder",
        ),
        (["night.jsonl", "--output", "fox.png"], "--output fox.png: it is a folder; --output-name names"),
        (["night.jsonl", "--until", "25:00"], "--until '25:00': a time of day like \"06:00\""),
        (["night.jsonl", "--log-file", "/proc/x.log"], "--log-file /proc/x.log: cannot write there"),
        (["night.jsonl", "--trace", "/proc/none/x.json"], "--trace /proc/none/x.json: cannot write there"),
        (["night.jsonl", "--trace", "."], "--trace .: cannot write there (Is a directory)"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, monkeypatch, night, arguments, message):
    monkeypatch.chdir(night)
    (night / "loop").symlink_to("loop")
    code, err = refusal(capsys, *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("option", ["--trace", "--log-file"])
@pytest.mark.parametrize("name", ["night.jsonl", "./night.jsonl", "link.jsonl"])
def test_nothing_is_written_into_the_job_file(capsys, monkeypatch, night, option, name):
    monkeypatch.chdir(night)
    (night / "link.jsonl").symlink_to("night.jsonl")
    before = (night / "night.jsonl").read_bytes()
    code, err = refusal(capsys, "night.jsonl", option, name)
    assert code == 2
    assert f"{option} {Path(name)}: is the job file itself; name another file" in err
    assert (night / "night.jsonl").read_bytes() == before
    code, err = refusal(capsys, "nothing.jsonl", option, "nothing.jsonl")
    assert "is the job file itself" in err
    assert not (night / "nothing.jsonl").exists()


def test_a_trace_and_a_log_are_not_written_into_one_file(capsys, monkeypatch, night):
    monkeypatch.chdir(night)
    code, err = refusal(capsys, "night.jsonl", "--trace", "both", "--log-file", "./both")
    assert (code, err) == (2, "gfgen: --log-file both: is the file of --trace, too; name another file\n")
    assert not (night / "both").exists()


def test_runs_that_start_at_the_same_time_find_one_folder_writable(tmp_path):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(try_to_write, [tmp_path / "out"] * 400))
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("available", "message"),
    [
        (10**6, "tiny-wan on 4 ranks: at least 6.9 MB of memory needed, 1.0 MB available"),
        (10**7, "line 1: size = 2048x2048, 401 frames: at least"),
    ],
)
def test_memory_that_is_short_is_told_before_anything_starts(capsys, monkeypatch, night, available, message):
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    put(night / "night.jsonl", FOX | {"size": "2048x2048", "frames": 401})
    code, err = refusal(capsys, night / "night.jsonl", "--model", "tiny-wan")
    assert code == 2
    assert message in err
