"""How fast the simulator is: tasks a second on one core, with so many jobs open all the time.

The whole of `gfgen simulate` runs: control loop, state, policy, cost model, durations from a
profile. For every job that ends another one arrives, so that the number of open jobs stays.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from benchmarks.runtime import NUM_RANKS, POLICIES, AllTasksRun, make_job
from gfgen.graph import Stage
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control.control import Control
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate.simulation import SimulatedBackend, SimulatedTimes, profiled_times
from gfgen.system.machine import cpu_name

_SHORTEST_JOB_TASKS = 23


@dataclass(frozen=True, slots=True)
class SimulatorSpeed:
    """Of one policy; the fastest of several runs, since other processes can only slow one down."""

    policy: str
    num_open: int
    num_tasks: int
    tasks_per_s: float


def measure_simulator(policy: str, *, num_open: int, num_tasks: int, num_runs: int) -> SimulatorSpeed:
    """Simulate `num_tasks` tasks on 8 ranks, several times; counts this process' own time."""
    fastest_s = min(_run_s(policy, num_open=num_open, num_tasks=num_tasks) for _ in range(num_runs))
    return SimulatorSpeed(policy, num_open, num_tasks, num_tasks / fastest_s)


class _RefillingBackend(SimulatedBackend):
    """Lets another job arrive for every one that ends, and stops after so many tasks."""

    def __init__(
        self, clock: Clock, *, times: SimulatedTimes, num_tasks: int, reserve: Sequence[AdmittedJob]
    ) -> None:
        super().__init__(clock, num_ranks=NUM_RANKS, times=times)
        self.control: Control | None = None
        self._num_left = num_tasks
        self._reserve = list(reserve)

    def submit(self, dispatch: Dispatch) -> None:
        super().submit(dispatch)
        self._num_left -= 1
        if not self._num_left:
            raise AllTasksRun

    def release(self, job_id: str) -> None:
        if self._reserve and self.control is not None:
            self.control.schedule(self._reserve.pop())


def _run_s(policy: str, *, num_open: int, num_tasks: int) -> float:
    """Processor time of one simulation."""
    num_jobs = num_open + num_tasks // _SHORTEST_JOB_TASKS + 1
    jobs = [make_job(idx, num_steps=20 + idx % 31) for idx in range(num_jobs)]
    profile = _profile(jobs)
    clock, costs = Clock(virtual=True), CostModel(profile)
    backend = _RefillingBackend(
        clock, times=profiled_times(profile, jobs), num_tasks=num_tasks, reserve=jobs[num_open:]
    )
    state = State(jobs, RunStart(num_ranks=NUM_RANKS, lookahead_s=LOOKAHEAD_S), clock=clock, costs=costs)
    control = Control(
        jobs[:num_open],
        state=state,
        backend=backend,
        policy=load_policy(policy),
    )
    backend.control = control
    began_s = time.process_time()
    with contextlib.suppress(AllTasksRun):
        control.run()
    return time.process_time() - began_s


def _profile(jobs: Sequence[AdmittedJob]) -> Profile:
    """Steps of 50 to 90 ms, so that ends do not fall together, and shorter other tasks."""
    shapes = sorted({job.shape for job in jobs})
    rows = [
        ProfileRow("bench", shape, stage, (1, 1, 1), seconds)
        for number, shape in enumerate(shapes)
        for stage, seconds in (
            (Stage.ENCODE, 0.011),
            (Stage.PREPARE, 0.003),
            (Stage.DENOISE, 0.05 + 0.0097 * number),
            (Stage.DECODE, 0.037),
        )
    ]
    return Profile("bench", "2026-11-20", "made up", NUM_RANKS, tuple(rows), write_s=0.02)


@click.command()
@click.option("--tasks", type=click.IntRange(1), default=10_000, show_default=True, help="Tasks per run.")
@click.option(
    "--runs", type=click.IntRange(1), default=5, show_default=True, help="Runs; the fastest counts."
)
def main(*, tasks: int, runs: int) -> None:
    """Tasks per second of 'gfgen simulate' on one core."""
    click.echo(f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, Python {platform.python_version()}")
    click.echo(f"command: python -m benchmarks.simulator --tasks {tasks} --runs {runs}")
    click.echo("(processor time of one process; the fastest run)\n")
    click.echo("| policy, 8 ranks | open jobs | tasks a second |\n|---|---|---|")
    for num_open in (50, 1000):
        for policy in POLICIES:
            speed = measure_simulator(policy, num_open=num_open, num_tasks=tasks, num_runs=runs)
            click.echo(f"| {policy} | {num_open} | {speed.tasks_per_s:,.0f} |")


if __name__ == "__main__":
    main()
