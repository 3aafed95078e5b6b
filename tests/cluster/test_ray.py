"""A real Ray cluster on this machine, where Ray is installed (pip install 'gfgen[ray]')."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from process_tree import descendants_of

from gfgen.cli.main import main

JOBS = {"prompt": "a red circle falls", "frames": 1, "num_images": 6, "steps": 2}
LIMIT_S = 240.0


@pytest.mark.filterwarnings("ignore")
def test_a_killed_node_costs_no_job(tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    (tmp_path / "jobs.jsonl").write_text(json.dumps(JOBS) + "\n")
    manifest = tmp_path / "out" / "manifest.jsonl"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=1)
        command = ["run", "jobs.jsonl", "--ray", cluster.address, "--ranks", "1", "-o", "out"]
        with subprocess.Popen(
            [sys.executable, "-m", "gfgen", *command],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as run:
            wait_for(lambda: manifest.exists() and manifest.read_text())
            raylet = other.all_processes["raylet"][0].process.pid
            for pid in [*descendants_of(raylet), raylet]:
                os.kill(pid, signal.SIGKILL)
            _, said = run.communicate(timeout=LIMIT_S)
    finally:
        cluster.shutdown()
    assert run.returncode == 0, said
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    assert sorted({line["id"] for line in lines}) == sorted(line["id"] for line in lines)
    assert [line["status"] for line in lines] == ["done"] * 6
    assert len(list((tmp_path / "out").glob("*.png"))) == 6
    assert "is gone" in said


def wait_for(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.fixture
def failing(tmp_path, capsys, monkeypatch):
    """What `gfgen run` prints when it ends with exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a fox", "frames": 1}\n')

    def run(*options):
        with pytest.raises(SystemExit) as end:
            main(["run", "jobs.jsonl", *options])
        assert end.value.code == 2
        return capsys.readouterr().err

    return run


def test_a_missing_ray_is_one_line(failing, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert failing("--ray", "auto") == "gfgen: --ray: Ray is not installed; pip install 'gfgen[ray]'\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--shared"], "--shared goes with --ray"),
        (["--ray", "auto", "--dry-run"], "--dry-run goes with one machine; leave out --ray"),
        (["--ray", "auto", "--ray-resources", "h200"], "--ray-resources h200: JSON like"),
        (
            ["--ray", "auto", "--policy", "own.py"],
            "--policy own.py: nodes have no such file; with --ray, one of legacy",
        ),
    ],
)
def test_options_that_do_not_fit_are_one_line(failing, options, line):
    said = failing(*options)
    assert line in said
    assert said.count("\n") == 1
