"""One job file with eight families of pipelines on two CPU ranks: run, killed and continued, and over HTTP.

    python -m benchmarks.families [NAME...] [--folder DIR]

Small random checkpoints of the real classes; each step of a job runs in another process than the one before.
Every file must have the bytes of one that is written from the frames of the pipeline's own call.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.small_checkpoints import FAMILIES, save_checkpoints
from gfgen.runtime.files.journal import JOURNAL_NAME
from gfgen.runtime.files.manifest import MANIFEST_NAME, read_manifest
from gfgen.runtime.files.outputs import read_metadata, write_output

BOUND_S = 120.0
PARTWAY = 4
"""Tasks that each job has begun when its run is disturbed."""
POLICY = '''
from gfgen.layout import Layout
from gfgen.snapshot import Decision


def hop(snapshot):
    """Jobs take turns, and each step of a job runs on another rank than the one before."""
    decisions, free = [], set(snapshot.free_ranks)
    for job in sorted(snapshot.open.values(), key=lambda job: job.next_task.index):
        last = job.last_layout.ranks[0] if job.last_layout else 1
        target = (last + 1) % len(snapshot.ranks)
        if target in free:
            free.remove(target)
            decisions.append(Decision(job.next_task, Layout.single(target)))
    return decisions
'''
_MOVING = {"frames": 9, "fps": 8, "quality": 100}
_JOBS: Mapping[str, Mapping[str, Any]] = {
    "CogVideoXPipeline": {**_MOVING, "args": {"max_sequence_length": 16}},
    "FluxPipeline": {"true_cfg_scale": 2.0, "args": {"max_sequence_length": 16}},
    "HunyuanVideoPipeline": {**_MOVING, "true_cfg_scale": 2.0},
    "LTXPipeline": {**_MOVING, "scheduler": {"shift": 3.0}},
    "PixArtSigmaPipeline": {"args": {"use_resolution_binning": False}},
    "WanPipeline": {**_MOVING, "guidance_scale_2": 2.0},
}
_COMMON = {
    "prompt": "a red cat",
    "negative_prompt": "blurry",
    "guidance_scale": 3.0,
    "width": 64,
    "height": 64,
    "steps": 12,
    "seed": 5,
}
_WORDS = {"frames": "num_frames", "fps": "frame_rate", "steps": "num_inference_steps"}
"""Arguments of calls by fields of jobs, where the names differ."""


def job_of(name: str) -> dict[str, Any]:
    """A job of a pipeline, as a line of a job file; its model is a folder of the pipeline's name."""
    return {"id": name, "model": name, **_COMMON, **_JOBS.get(name, {})}


def write_inputs(folder: Path, names: Sequence[str]) -> None:
    """Checkpoints, jobs and the policy."""
    save_checkpoints(folder, names)
    lines = [json.dumps({**job_of(name), "model": str(folder / name)}) for name in names]
    (folder / "jobs.jsonl").write_text("\n".join(lines))
    (folder / "hop.py").write_text(POLICY)


def start(
    folder: Path, output: str, *, policy: str = "hop.py:hop", jobs: str = "jobs.jsonl"
) -> subprocess.Popen[str]:
    """`gfgen run`, which stops at once when it is asked to."""
    command = ["run", jobs, "--ranks", "2", "--device", "cpu", "--policy", policy]
    return _gfgen(folder, *command, "--grace", "0", "-o", output)


def end(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and output."""
    text, _ = run.communicate(timeout=BOUND_S)
    return run.returncode, text


def wait_until_partway(run: subprocess.Popen[str], output: Path, num_jobs: int) -> None:
    """Wait until each job has begun some tasks in the current run."""
    given = len(_journal(output))
    _wait(lambda: _are_partway(_journal(output)[given:], num_jobs), run)


def _are_partway(lines: list[str], num_jobs: int) -> bool:
    dispatches = [each for line in lines for each in json.loads(line).get("dispatches") or ()]
    begun = Counter(job for _, job, *_ in dispatches)
    return len(begun) == num_jobs and min(begun.values()) >= PARTWAY


def _journal(output: Path) -> list[str]:
    path = output / JOURNAL_NAME
    return path.read_text().splitlines()[:-1] if path.exists() else []


def _wait(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise RuntimeError(f"ended or stood still before time: {end(process)[1]}")
        time.sleep(0.01)


def own_frames(folder: Path, name: str, *, load: Callable[[Any, Path], Any] | None = None) -> Any:
    """What the pipeline's own call makes of its job, as uint8 [F, H, W, 3].

    load: makes a pipeline of a class from its folder; without it, diffusers does so.
    """
    import diffusers
    import numpy as np
    import torch

    from gfgen.models.loading.components import without_progress_bars

    torch.set_num_threads(1)  # as ranks compute
    job = job_of(name)
    with without_progress_bars():
        kind = getattr(diffusers, name)
        pipeline = load(kind, folder / name) if load else kind.from_pretrained(folder / name)
    pipeline.set_progress_bar_config(disable=True)
    if (options := job.pop("scheduler", None)) is not None:
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, **options)
    given = {_WORDS.get(field, field): value for field, value in {**job, **job.pop("args", {})}.items()}
    taken = inspect.signature(pipeline.__call__).parameters
    args = {field: value for field, value in given.items() if field in taken}
    generator = torch.Generator().manual_seed(job["seed"])
    made = pipeline(**args, generator=generator, output_type="np")
    return (np.asarray(made[0][0] if "frames" in job else made[0]) * 255).round().astype(np.uint8)


def has_frames(path: Path, frames: Any) -> bool:
    """Whether a file has the bytes of one that is written from these frames, with the same tags."""
    named = re.search(rb"Weights: (sha256 [0-9a-f]+)", path.read_bytes())
    weights = {"weights": named[1].decode()} if named else {}  # the text of tags has them, the job does not
    with tempfile.TemporaryDirectory() as apart:
        other = Path(apart) / path.name
        write_output(frames, other, fps=_MOVING["fps"], metadata=read_metadata(path) | weights)
        return other.read_bytes() == path.read_bytes()


class Server:
    """`gfgen serve` with all models."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        models = [word for name in names for word in ("--model", name)]
        options = ["--ranks", "2", "--device", "cpu", "--policy", "hop.py:hop", "-o", "served"]
        self.process = _gfgen(folder, "serve", "--port", str(port), *models, *options)
        _wait(self._is_ready, self.process)

    def accept(self, names: Sequence[str]) -> dict[str, str]:
        """Ask for the jobs of these pipelines; returns their ids."""
        jobs = {name: job_of(name) for name in names}
        bodies = {
            name: {field: value for field, value in job.items() if field not in ("id", "quality")}
            for name, job in jobs.items()
        }
        return {name: self._ask("/v1/jobs", body)["id"] for name, body in bodies.items()}

    def wait_until_begun(self, ids: Mapping[str, str]) -> None:
        """Wait until no job is queued."""
        _wait(
            lambda: all(self._ask(f"/v1/jobs/{job_id}")["status"] != "queued" for job_id in ids.values()),
            self.process,
        )

    def fetch(self, ids: Mapping[str, str], folder: Path) -> dict[str, Path]:
        """Wait for jobs, and write their files into a folder."""
        found = {}
        for name, job_id in ids.items():
            at = f"/v1/jobs/{job_id}"
            _wait(lambda: self._ask(at)["status"] in ("completed", "failed"), self.process)  # noqa: B023
            if (job := self._ask(at))["status"] == "failed":
                raise RuntimeError(f"{name}: {job}")
            with urllib.request.urlopen(f"{self._url}{at}/content") as answer:
                found[name] = folder / f"{name}.{'mp4' if 'frames' in job_of(name) else 'png'}"
                found[name].write_bytes(answer.read())
        return found

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        end(self.process)

    def _is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self._url}/ready").status == 200)
        except OSError:
            return False

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, content, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode()}") from None


def _gfgen(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gfgen", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> None:
    """Print a row for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", default=FAMILIES)
    parser.add_argument("--folder", type=Path, help="keep all files here")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        rows = check(folder.resolve(), options.names)
    print(
        "| pipeline | ranks of its tasks | undisturbed | killed, then stopped | over HTTP |\n"
        "|---|---|---|---|---|"
    )
    for row in rows:
        print(f"| {' | '.join(row)} |")


def check(folder: Path, names: Sequence[str]) -> list[list[str]]:
    """Run the jobs in all ways; whether each file is that of the pipeline's own call."""
    write_inputs(folder, names)
    _expect(0, start(folder, "calm"))
    own = {name: own_frames(folder, name) for name in names}
    for number in (signal.SIGKILL, signal.SIGTERM):
        run = start(folder, "stopped")
        wait_until_partway(run, folder / "stopped", len(names))
        run.send_signal(number)
        _expect(-9 if number == signal.SIGKILL else 143, run)
        kept = len(list((folder / "stopped" / ".resume").glob("*.state")))
        print(f"{number.name}: {kept} jobs have a saved state", flush=True)
    _expect(0, start(folder, "stopped"))
    server = Server(folder, names)
    ids = server.accept(names)
    server.wait_until_begun(ids)
    server.stop(signal.SIGKILL)
    server = Server(folder, names)
    try:
        served = server.fetch(ids, folder)
    finally:
        server.stop()
    lines = {output: read_manifest(folder / output / MANIFEST_NAME) for output in ("calm", "stopped")}
    rows = []
    for name in names:
        files = [folder / output / lines[output][name]["file"] for output in lines]
        results = [has_frames(path, own[name]) for path in (*files, served[name])]
        ranks = "".join(layout.strip("[]") for layout in lines["calm"][name]["layouts"])
        rows.append([name, ranks, *("same bytes" if result else "DIFFERENT" for result in results)])
    return rows


def _expect(code: int, run: subprocess.Popen[str]) -> None:
    found, text = end(run)
    if found != code:
        raise RuntimeError(f"exit status {found}, not {code}:\n{text}")


if __name__ == "__main__":
    main()
