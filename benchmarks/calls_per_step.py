"""How many calls the control plane makes for one denoising step, by module.

Runs one job on one rank, with journal, trace and manifest, once with few steps and once with many. The
difference is what the steps cost. Counts calls of functions of gfgen; comprehensions are not counted.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import click

import gfgen
from gfgen.graph import Trajectory
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control.control import Control
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.files.journal import Journal, journal_header
from gfgen.runtime.files.manifest import ManifestWriter
from gfgen.runtime.files.trace import TraceWriter
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.workers import JobMemory, ProcessBackend
from gfgen.runtime.simulate.simulation import SimulatedBackend, SimulatedTimes

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from fault_schedules import Fleet, make_job

from gfgen.runtime.files.resume import RunStart

FEW, MANY = 50, 150
"""Steps of the two runs."""
_PACKAGE = str(Path(gfgen.__file__).parent)


def calls_per_step(policy: str, fleet: Fleet | None, folder: Path) -> dict[str, float]:
    """Calls by module; with a fleet of fake workers also what their messages take."""
    few, many = (_calls(num_steps, policy, fleet, folder / str(num_steps)) for num_steps in (FEW, MANY))
    found = {module: (many[module] - few[module]) / (MANY - FEW) for module in many}
    return {module: count for module, count in found.items() if count > 0.05}


def _calls(num_steps: int, policy: str, fleet: Fleet | None, folder: Path) -> Counter[str]:
    """Calls by module in a run of one job."""
    folder.mkdir()
    job, clock = _job(num_steps), Clock(virtual=fleet is None)
    start = RunStart(num_ranks=1, lookahead_s=LOOKAHEAD_S)
    state = State([job], start, clock=clock, costs=CostModel())
    backend: Any = (
        SimulatedBackend(clock, num_ranks=1, times=SimulatedTimes(task_s=lambda _: 0.1))
        if fleet is None
        else ProcessBackend(fleet.pool(1), JobMemory([job], folder), clock=clock)
    )
    header = journal_header([job.info], start, policy=policy)
    journal = Journal(folder / "journal.jsonl", header=header)
    observers = [TraceWriter(folder / "trace.json"), ManifestWriter(folder / "manifest.jsonl")]
    calls = _counted(
        Control(
            [job],
            state=state,
            backend=backend,
            policy=load_policy(policy),
            journal=journal,
            observers=observers,
        )
    )
    for each in (backend, journal, *observers):
        getattr(each, "close", lambda: None)()
    return calls


def _job(num_steps: int) -> AdmittedJob:
    job = make_job(Random(0), f"job-{num_steps}")
    spec = replace(job.spec, steps=num_steps, arrival_s=0.0, timeout_s=None)
    trajectory = Trajectory(spec.id, num_steps, job.trajectory.artifacts)
    info = replace(job.info, asked=spec, spec=spec, num_tasks=trajectory.num_tasks)
    return replace(job, info=info, trajectory=trajectory)


def _counted(control: Control) -> Counter[str]:
    """Run, and count the calls by module."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and code.co_name[0] != "<":
            calls[str(Path(code.co_filename).relative_to(_PACKAGE))] += 1

    sys.setprofile(note)
    try:
        control.run()
    finally:
        sys.setprofile(None)
    return calls


@click.command()
@click.option("--policy", default="srtf", show_default=True)
@click.option("--processes", is_flag=True, help="Use a fake worker in a process, not a simulated rank.")
def main(*, policy: str, processes: bool) -> None:
    """Calls of the control plane for one denoising step."""
    with tempfile.TemporaryDirectory() as folder:
        if processes:
            with Fleet() as fleet:
                found = calls_per_step(policy, fleet, fleet.folder)  # where its writers expect files
        else:
            found = calls_per_step(policy, None, Path(folder))
            found = {module: count for module, count in found.items() if "/simulate/" not in module}
    for module, count in sorted(found.items(), key=lambda item: -item[1]):
        click.echo(f"{count:7.1f}  {module}")
    click.echo(f"{sum(found.values()):7.1f}  calls in {len(found)} modules")


if __name__ == "__main__":
    main()
