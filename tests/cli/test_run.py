"""`gfgen run` as a user starts it: a process of its own, real workers, tiny models."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

JOBS = [
    {"id": "fox", "prompt": "a red fox", "model": "tiny-qwen-image", "size": "64x64", "steps": 3},
    {"id": "sea", "prompt": "the sea", "model": "tiny-wan", "size": "70x64", "frames": 6, "steps": 3},
]


@pytest.fixture
def folder(tmp_path, tiny_models):
    with (tmp_path / "night.jsonl").open("w") as file:
        for job in JOBS:
            file.write(json.dumps(job) + "\n")
    return tmp_path


def start(folder, *arguments):
    command = [sys.executable, "-m", "gfgen", "run", "night.jsonl", "--ranks", "2", *arguments]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


def manifest(folder):
    lines = (folder / "outputs/night/manifest.jsonl").read_text().splitlines()
    return {entry["id"]: entry for entry in map(json.loads, lines)}


def test_a_job_file_becomes_files_and_a_second_run_skips_them(folder):
    process = start(folder, "--trace", "trace.json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "files and manifest.jsonl are in outputs/night/"
    outputs = sorted(os.listdir(folder / "outputs/night"))
    assert outputs == ["fox.png", "journal.jsonl", "manifest.jsonl", "sea.mp4"]
    entries = manifest(folder)
    assert {entry["status"] for entry in entries.values()} == {"done"}
    assert "70x64" in entries["sea"]["rounded"]
    assert json.loads((folder / "trace.json").read_text())

    before = {name: (folder / "outputs/night" / name).stat().st_mtime_ns for name in ("fox.png", "sea.mp4")}
    again = start(folder)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0
    assert "2 skipped" in out
    after = {name: (folder / "outputs/night" / name).stat().st_mtime_ns for name in before}
    assert before == after


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_and_the_next_one_finishes_it(folder, number, code):
    long = JOBS[1] | {"id": "long", "steps": 400}
    (folder / "night.jsonl").write_text(f"{json.dumps(JOBS[0])}\n{json.dumps(long)}\n")
    process = start(folder)
    deadline = time.monotonic() + 60
    while not (folder / "outputs/night/fox.png").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "run the same command again to go on" in err
    assert "Traceback" not in err
    assert sorted(os.listdir(folder / "outputs/night")) == ["fox.png", "journal.jsonl", "manifest.jsonl"]


def test_valid_jobs_of_a_faulty_file_run_when_asked_to(folder):
    with (folder / "night.jsonl").open("a") as file:
        file.write('{"promt": "oops"}\n')
    process = start(folder, "--skip-invalid", "--quiet")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "line 3: promt: not a field; did you mean prompt?" in err
    assert out == "files and manifest.jsonl are in outputs/night/\n"
    assert {entry["status"] for entry in manifest(folder).values()} == {"done"}
