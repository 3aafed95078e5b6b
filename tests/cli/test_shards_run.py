"""`gfgen run` from Parquet into an object store, killed again and again; each job is in one shard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from object_store import BUCKET, SECRETS, environment

from gfgen.cli.main import main
from gfgen.runtime.publish.shards import lines_of

pyarrow = pytest.importorskip("pyarrow", reason="reads Parquet: pip install 'gfgen[data]'")
s3fs = pytest.importorskip("s3fs", reason="object stores: pip install 'gfgen[data]'")

NUM_JOBS = 250
NUM_KILLS = int(os.environ.get("GFGEN_TEST_KILLS", "3"))
"""Every third one takes the local folder, too."""
BOUND_S = 300.0
HERE = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from pyarrow import parquet

    captions = [f"picture number {number}" for number in range(NUM_JOBS)]
    table = pyarrow.table({"caption": captions, "url": captions})
    parquet.write_table(table, tmp_path / "prompts.parquet")
    return tmp_path


def start(folder: Path, port: int, *options: str, **more: Any) -> subprocess.Popen[str]:
    """`gfgen run` with workers that compute nothing."""
    given = ["--column", "prompt=caption", "--model", "fake-image", "--steps", "1", "--shard-size", "25"]
    command = [sys.executable, "-m", "fake_run", "run", *options, *given]
    own = {"PYTHONPATH": f"{HERE}:{HERE.parent}", "FAKE_LEASE_S": "1", "GFGEN_CACHE": str(folder / "cache")}
    settings = os.environ | environment(port) | own
    return subprocess.Popen(command, cwd=folder, env=settings, text=True, **more)


def objects(port: int, beginning: str, folder: Path) -> dict[str, Path]:
    fs = s3fs.S3FileSystem(
        key="x", secret="y", endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True
    )
    folder.mkdir()
    found = {}
    for name in fs.find(f"{BUCKET}/{beginning}"):
        path = folder / name.rpartition("/")[2]
        fs.get_file(name, str(path))
        found[path.name] = path
    return found


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("kind", ["webdataset"])
def test_a_run_into_a_store_that_is_killed_has_each_job_once(
    folder: Path, store_port: int, kind: str
) -> None:
    random, state, num_kills = Random(1), folder / "state", 0
    name = f"killed-{kind}"
    options = ["prompts.parquet", "-o", f"s3://{BUCKET}/{name}", "--shards", kind, "--state", "state"]
    with (folder / "log").open("a") as log:
        while True:
            run = start(folder, store_port, *options, stdout=log, stderr=log)
            until = num_lines(state / "manifest.jsonl") + random.randint(0, NUM_JOBS // max(NUM_KILLS, 10))
            at_upload, deadline_s = random.random() < 0.3, time.monotonic() + BOUND_S
            while run.poll() is None:
                assert time.monotonic() < deadline_s, "the run stands still"
                is_uploading = any((state / ".shards").glob("shard-*"))
                is_time = num_lines(state / "manifest.jsonl") > until and (is_uploading or not at_upload)
                if is_time and num_kills < NUM_KILLS:
                    run.kill()
                    num_kills += 1
                    run.wait(BOUND_S)
                    if num_kills % 3 == 0:
                        state.rename(folder / f"lost-{num_kills}")
                    break
                time.sleep(0.01)
            if run.returncode == 0:
                break
            assert run.returncode in (-9, 75), (folder / "log").read_text()[-2000:]
    assert num_kills == NUM_KILLS, "the run ended before it was killed"
    found = objects(store_port, name, folder / "found")
    for beginning in ("shard", "manifest"):
        lines = [line for each in found if each.startswith(beginning) for line in lines_of(found[each])]
        ids = Counter(line["id"] for line in lines)
        assert (len(ids), set(ids.values())) == (NUM_JOBS, {1}), beginning
    assert not list(state.glob("*.png"))
    for path in [*state.rglob("*"), *found.values(), folder / "log"]:
        for secret in SECRETS.values():
            assert path.is_dir() or secret.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "s3://key:secret@data/x"], "s3://BUCKET/NAME without keys is accepted"),
        (["-o", "gs://data/x"], "a path of this machine or s3://BUCKET/NAME"),
        (["-o", f"s3://{BUCKET}/x", "--force"], "--force goes with files in a folder"),
        (["-o", "x", "--shards", "parquet", "--state", "x"], "--state goes with -o s3://"),
        (["--shard-size", "5"], "--shard-size goes with --shards"),
        (["-o", f"s3://{BUCKET}-missing/x"], "there is no such bucket"),
        (["--column", "seed=a", "--column", "seed=b"], "--column gives seed twice"),
        (["--trace", "s3://data/x"], "a path of this machine is accepted"),
    ],
)
def test_what_a_store_does_not_do_is_one_line(
    folder: Path,
    store_port: int,
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    for name, value in {**environment(store_port), "XDG_STATE_HOME": str(folder)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main(["run", "prompts.parquet", *options])
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2
    assert said in error
    assert "secret" not in error


def test_a_run_that_is_stopped_leaves_no_open_shard(folder: Path, store_port: int) -> None:
    options = [
        "-o",
        f"s3://{BUCKET}/stopped",
        "--shards",
        "parquet",
        "--state",
        "state",
        "--set",
        "flow_shift=0.1",
    ]
    run = start(folder, store_port, "prompts.parquet", *options)
    deadline_s = time.monotonic() + BOUND_S
    while num_lines(folder / "state/manifest.jsonl") < 5:
        assert run.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    run.terminate()
    assert run.wait(BOUND_S) == 143
    found = objects(store_port, "stopped", folder / "found")
    ids = [line["id"] for path in found.values() if path.suffix == ".parquet" for line in lines_of(path)]
    assert len(ids) == num_lines(folder / "state/manifest.jsonl") < NUM_JOBS
    assert not list((folder / "state").glob("*.png"))


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_changed_job_under_an_id_that_is_stored_is_a_problem(
    command: str,
    tmp_path: Path,
    store_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {**environment(store_port), "XDG_STATE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    Path("jobs.jsonl").write_text('{"id": "a", "prompt": "a fox"}')
    url = f"s3://{BUCKET}/changed-{command}"
    entries = [
        {"output": url, "shards": "parquet", "owner": "x"},
        {"stored": 0, "jobs": {"a": "of another prompt"}},
    ]
    Path("state").mkdir()
    Path("state/published.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with pytest.raises(SystemExit) as end:
        main([command, "jobs.jsonl", "-o", url, "--shards", "parquet", "--state", "state"])
    said = capsys.readouterr()
    assert end.value.code == 2
    assert "line 1: id = a: is in the store with other fields" in said.out + said.err


def test_a_job_file_in_a_store_has_no_key_in_records(folder: Path, store_port: int) -> None:
    settings = environment(store_port)
    fs = s3fs.S3FileSystem(key="x", secret="y", endpoint_url=settings["AWS_ENDPOINT_URL"])
    (folder / "two.jsonl").write_text(
        '{"id": "a", "prompt": "a fox"}\n{"id": "b", "prompt": "a fox", "x": 1}'
    )
    fs.put_file(str(folder / "two.jsonl"), f"{BUCKET}/two.jsonl")
    url = f"{settings['AWS_ENDPOINT_URL']}/{BUCKET}/two.jsonl?X-Amz-Signature=signed"
    command = [sys.executable, "-m", "fake_run", "run", url, "--model", "fake-image", "--steps", "1"]
    own = {"PYTHONPATH": f"{HERE}:{HERE.parent}", "GFGEN_CACHE": str(folder / "cache")}
    run = subprocess.run(
        [*command, "--skip-invalid", "-o", "out"],
        cwd=folder,
        env=os.environ | settings | own,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stderr
    assert "two.jsonl: line 2: x: not a field" in run.stderr
    line = json.loads((folder / "out/manifest.jsonl").read_text())
    assert line["job_file"] == url.partition("?")[0]
    for text in (run.stdout, run.stderr, *(path.read_text() for path in (folder / "out").glob("*.jsonl"))):
        assert "signed" not in text
