"""What many jobs cost the control process: admission, memory, time per decision, and going on after a stop.

    python -m benchmarks.million [1000 10000 100000 1000000] [--to RESULTS.json]

Admission, index, manifest, journal and live record are those of `gfgen run` with a tiny Qwen-Image. Only the
ranks are simulated, in virtual time: four, whose tasks take 5 ms. A picture is a link to a file of one byte.
The first run stops when a thousandth of the jobs are left, and the second one goes on, in another process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gfgen.cli.run import run_jobs
from gfgen.cli.run_files import RunOptions, admit_jobs
from gfgen.errors import InterruptedRunError
from gfgen.job.reader import JobSource
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.state import State
from gfgen.runtime.core.devices import choose_devices
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, OutputWritten, StopRequested
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.simulate.simulation import SimulatedBackend, SimulatedTimes
from gfgen.session.ranks import Ranks, made_with
from gfgen.session.session import Session
from gfgen.system.machine import cpu_name

SIZES = (1_000, 10_000, 100_000, 1_000_000)
NUM_RANKS = 4
WORDS = (
    "red", "blue", "fox", "whale", "river", "stone", "tower", "light", "rain", "small", "old", "golden",
    "city",
)  # fmt: skip


class Backend(SimulatedBackend):
    folder: Path
    num_left: int

    def _write(self, dispatch: Dispatch, ended_s: float) -> None:
        job_id = dispatch.task.job_id
        os.symlink("byte", self.folder / f"{job_id}.png")
        self._clock.at(OutputWritten(ended_s, job_id, f"{job_id}.png", 1, 1e-4))
        self.num_left -= 1
        if not self.num_left:
            self._clock.at(StopRequested(ended_s, 15))


class SimulatedSession(Session):
    stop_after: int
    turns_s: list[float]
    began_at: float

    def load(self, jobs: Any, **_: Any) -> None:
        self.residency = None

    def _made_with(self, info: Any) -> Any:
        return made_with(self.options.ranks, self.admission.models.find(info.spec.model).checkpoint)

    def run(self, jobs: Any, **given: Any) -> Any:
        clock = Clock(virtual=True)
        clock.started_at = time.time()
        return super().run(jobs, clock=clock, **given)

    def _start(self, jobs: Any, options: Any, clock: Clock, arrivals: Any) -> RunStart:
        arrived_at = self._first_arrivals(jobs, options, arrivals)
        return RunStart(
            num_ranks=NUM_RANKS, arrived_at=arrived_at, started_at=clock.started_at, lookahead_s=1e-4
        )

    def _control(self, jobs: Any, setup: Any, stack: Any, **records: Any) -> Control:
        self.turns_s = []
        backend = Backend(setup.clock, num_ranks=NUM_RANKS, times=SimulatedTimes(task_s=lambda _: 5e-3))
        backend.folder, backend.num_left = setup.options.output_dir, self.stop_after
        self.began_at = time.process_time()
        return Control(
            jobs,
            state=State(jobs, setup.start, clock=setup.clock, costs=CostModel()),
            backend=backend,
            policy=setup.options.policy,
            steering=Steering(backlog=setup.arrivals.backlog, on_turn=self.turns_s.append),
            **records,
        )


def memory_mb(name: str = "VmRSS") -> float:
    """Resident memory; VmHWM is the most that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(round(int(line.split()[1]) / 1024) for line in lines if line.startswith(name))


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(jobs: Path, folder: Path, policy: str, stop_after: int) -> dict[str, Any]:
    """One run, as a process of its own measures it; seconds are of its CPU time."""
    given: dict[str, Any] = dict(trace=None, logs=SimpleNamespace(log_json=False), job_file="jobs.jsonl")
    options = RunOptions(
        output_dir=folder,
        ranks=Ranks(choose_devices("cpu", NUM_RANKS)),
        policy=load_policy(policy),
        model="tiny-qwen-image",
        **given,
    )
    import gfgen.cli.run as command

    command._observers = lambda options: []
    begun_at, source = time.process_time(), JobSource(files=(str(jobs),), overrides={"steps": 2})
    found: dict[str, Any] = {}
    session: Any = SimulatedSession(options)
    with session:
        session.stop_after = stop_after
        admitted, claims, _ = admit_jobs(source, session.admission, options)
        found["admission_s"], found["admitted_mb"] = time.process_time() - begun_at, memory_mb()
        try:
            summary = run_jobs(session, admitted, options, claims)
            found["num_done"] = summary.num_done
        except InterruptedRunError as error:
            found["stopped"] = str(error)
        found["first_decision_s"] = session.began_at - begun_at
        ended_at, turns = time.process_time(), sorted(session.turns_s)
        if claims.index is not None:
            claims.index.close()
    found |= {
        "turns": len(turns),
        "turn_us": 1e6 * sum(turns) / len(turns),
        "median_us": 1e6 * turns[len(turns) // 2],
    }
    found |= {"p99_us": 1e6 * turns[int(0.99 * len(turns))], "longest_ms": 1e3 * turns[-1]}
    found["run_s"] = ended_at - session.began_at
    found["peak_mb"] = memory_mb("VmHWM")
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def write_jobs(path: Path, number: int) -> None:
    with path.open("w") as file:
        for idx in range(number):
            words = " ".join(WORDS[(idx * 7919 >> shift) % len(WORDS)] for shift in range(0, 24, 3))
            file.write(
                json.dumps({"id": f"p{idx:07}", "prompt": f"a {words}, number {idx}", "seed": idx}) + "\n"
            )


def study(number: int, policy: str, place: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=place) as name:
        jobs, folder = Path(name) / "jobs.jsonl", Path(name) / "out"
        folder.mkdir()
        (folder / "byte").write_bytes(b"x")
        write_jobs(jobs, number)
        row: dict[str, Any] = {"jobs": number}
        for part, stop_after in (("first", number - max(10, number // 1000)), ("second", -1)):
            command = [sys.executable, "-m", "benchmarks.million", "--one", str(jobs), str(folder), policy]
            begun_at = time.time()
            row[part] = json.loads(subprocess.check_output([*command, str(stop_after)], text=True))
            row[part]["wall_s"] = round(time.time() - begun_at, 1)
            begun_at, cpu_s = time.time(), cpu_of_children()
            status = [sys.executable, "-m", "gfgen", "status", str(folder)]
            text = subprocess.run(status, capture_output=True, text=True, check=False)
            row[part]["status_s"] = round(cpu_of_children() - cpu_s, 2)
            row[part]["status_wall_s"] = round(time.time() - begun_at, 2)
            row[part]["status"] = (text.stdout or text.stderr).splitlines()[:3]
            print(json.dumps(row), file=sys.stderr, flush=True)
        row["files_mb"] = {
            each.name: round(each.stat().st_size / 1e6) for each in folder.iterdir() if not each.is_symlink()
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=SIZES)
    parser.add_argument("--policy", default="triage")
    parser.add_argument("--place", help="where the folders are made")
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    rows = [study(number, given.policy, given.place) for number in given.sizes]
    text = json.dumps({"machine": cpu_name(), "policy": given.policy, "rows": rows}, indent=1)
    print(text)
    if given.to is not None:
        given.to.write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))))
    else:
        main()
