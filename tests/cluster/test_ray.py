"""A real Ray cluster on this machine, where Ray is installed (pip install 'gfgen[ray]')."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_tree import descendants_of

from gfgen.cli.main import main

NUM_NODES, NUM_RANKS, NUM_JOBS = (int(n) for n in os.environ.get("RAY_SIZE", "2x1x8").split("x"))
"""Nodes, ranks of each, jobs."""
JOBS = {"prompt": "a red circle falls", "frames": 1, "num_images": NUM_JOBS, "steps": 4}
LIMIT_S = 600.0
ROOT = Path(__file__).parents[2]


class Folders:
    """The driver and the nodes do not see each other's folder, where namespaces are allowed."""

    def __init__(self, path):
        self.nodes, self.driver, self.kept = (path / name for name in ("nodes", "driver", "kept"))
        for folder in (self.nodes, self.driver, self.kept):
            folder.mkdir()
        (self.kept / "jobs.jsonl").write_text(json.dumps(JOBS) + "\n")
        hidden = f"mount --bind {self.kept} {self.driver} && mount -t tmpfs none {self.nodes}"
        self._apart = ["unshare", "-rm", "sh", "-c", f'{hidden} && cd {self.driver} && exec "$@"', "-"]
        tool = shutil.which("unshare")
        self.are_apart = tool is not None and not subprocess.run([*self._apart[:-1], "true"]).returncode

    def gfgen(self, *command):
        """A process in the driver's folder."""
        prefix = self._apart if self.are_apart else []
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "gfgen", *command],
            cwd=self.kept,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.kept)},
        )

    def lines(self, output="out"):
        manifest = self.kept / output / "manifest.jsonl"
        return [json.loads(line) for line in manifest.read_text().splitlines()] if manifest.exists() else []


@pytest.fixture
def folders(tmp_path, monkeypatch):
    found = Folders(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(found.nodes))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.chdir(found.nodes)
    return found


@pytest.mark.filterwarnings("ignore")
def test_neither_a_dead_node_nor_a_dead_driver_costs_a_job(folders):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'gfgen[ray]'")
    from ray.cluster_utils import Cluster

    ranks = ["--ranks", str(NUM_RANKS), "--policy", "fcfs"]  # on one rank each: equal layouts, equal bits
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": {"health_check_period_ms": 500}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    command = ["run", "jobs.jsonl", "--ray", cluster.address, *ranks, "-o", "out"]
    try:
        others = [cluster.add_node(num_cpus=1) for _ in range(NUM_NODES - 1)]
        with folders.gfgen(*command) as run:
            wait_for(lambda: folders.lines())
            raylet = others[0].all_processes["raylet"][0].process.pid
            for pid in [*descendants_of(raylet), raylet]:
                os.kill(pid, signal.SIGKILL)
            cluster.add_node(num_cpus=1)
            wait_for(lambda: "is gone" in run.stderr.readline())
            wait_for(lambda: len(folders.lines()) >= NUM_JOBS // 2)
            run.kill()
        assert len(folders.lines()) < NUM_JOBS, "the driver was killed too late"
        with folders.gfgen(*command) as run:
            said = run.communicate(timeout=LIMIT_S)[1]
    finally:
        cluster.shutdown()
    assert run.returncode == 0, said
    with folders.gfgen("run", "jobs.jsonl", *ranks, "-o", "alone") as alone:
        assert alone.wait(LIMIT_S) == 0, alone.communicate()[1]
    made = {line["id"]: (line["status"], line["sha256"]) for line in folders.lines()}
    assert len(made) == len(folders.lines()) == NUM_JOBS
    assert made == {line["id"]: ("done", line["sha256"]) for line in folders.lines("alone")}
    assert files_in(folders.kept / "out") == files_in(folders.kept / "alone")
    assert not any(folders.driver.iterdir()), "nodes write nothing into the driver's folder"


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".png"}


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
        (["--ray", "local", "--ray-scale"], "--ray-scale goes with a cluster that has an autoscaler"),
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
