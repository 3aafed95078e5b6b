"""How near a simulated run comes to the real one, on CPU ranks.

    python benchmarks/simulator_fidelity.py [--repeat 3] [--workload mixed ...] [--json FILE]

For each workload: measure a profile of its shapes, run its jobs on real workers, and simulate the same
jobs by that profile, under the same policy; and once more by what the run's own tasks took ("in hindsight"),
which tells a machine that has changed from a simulator that is wrong. Bars: attainment within 5 percentage
points, makespan within 10%.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from gfgen.bench import profiling
from gfgen.cli.admission import Admission
from gfgen.graph import Stage
from gfgen.jobspec import JobSpec
from gfgen.policies.catalog import load_policy
from gfgen.runtime.admission import AdmittedJob
from gfgen.runtime.clock import Clock
from gfgen.runtime.control import Control
from gfgen.runtime.cost import CostModel
from gfgen.runtime.dispatch import Dispatch
from gfgen.runtime.events import Event, OutputWritten, TaskDone
from gfgen.runtime.machine import cpu_name, versions
from gfgen.runtime.metrics import Summary
from gfgen.runtime.observer import JobInfo, Observer
from gfgen.runtime.pool import WorkerPool
from gfgen.runtime.profile import Profile
from gfgen.runtime.simulation import simulate
from gfgen.runtime.state import State
from gfgen.runtime.workers import ProcessBackend

NUM_RANKS = 2
GUARD_S = 0.005
SHAPES = {
    "video": {"model": "tiny-wan", "width": 128, "height": 128, "frames": 17},
    "long video": {"model": "tiny-wan", "width": 192, "height": 128, "frames": 33},
    "picture": {"model": "tiny-qwen-image", "width": 256, "height": 256},
    "large picture": {"model": "tiny-qwen-image", "width": 384, "height": 384},
}
"""Steps of about 40 to 150 ms on one core."""


@dataclass(frozen=True)
class Workload:
    """Jobs of some shapes as they arrive; deadlines in stand-alone times of each job."""

    name: str
    policy: str
    seed: int
    shapes: dict[str, float]
    """Weights."""
    num_jobs: int
    load: float | None
    """Work over what the ranks can do, with Poisson arrivals; None: all at the start."""
    slack: tuple[float, float]
    steps: tuple[int, int] = (4, 12)


WORKLOADS = (
    Workload("mixed", "srtf", 1, {"video": 2, "picture": 2, "long video": 1}, 40, 0.8, (1.5, 4.0)),
    Workload("urgent", "edf", 2, {"picture": 3, "large picture": 0.5, "video": 1.5}, 40, 0.7, (0.8, 2.5)),
    Workload(
        "batch", "fcfs,degree=2", 3, {"video": 1, "large picture": 1, "long video": 1}, 12, None, (2.0, 20.0)
    ),
)


def make_jobs(workload: Workload, profile: Profile) -> Sequence[AdmittedJob]:
    """The jobs of a workload; arrivals and deadlines follow from what the profile says of their work."""
    random, now_s, specs = Random(workload.seed), 0.0, []
    alone = {(row.model, row.shape, row.stage): row for row in profile.rows if row.degrees == (1, 1, 1)}
    admit = Admission(default_model="tiny-wan")
    for number in range(workload.num_jobs):
        (kind,) = random.choices(list(workload.shapes), list(workload.shapes.values()))
        spec = JobSpec(
            id=f"{workload.name}-{number:02d}",
            prompt="a red fox trots through fresh snow",
            steps=random.randint(*workload.steps),
            seed=number,
            tag=kind,
            **SHAPES[kind],
        )
        ((job,), _) = admit([spec])
        rows = {stage: alone[job.spec.model, job.shape, stage] for stage in Stage}
        job_s = sum(rows[stage].seconds * (spec.steps if stage is Stage.DENOISE else 1) for stage in Stage)
        loaded_s = sum(
            (rows[stage].loaded_s or rows[stage].seconds) * (spec.steps if stage is Stage.DENOISE else 1)
            for stage in Stage
        )
        deadline_s = job_s * random.uniform(*workload.slack)
        specs.append(replace(spec, arrival_s=now_s, deadline_s=deadline_s))
        if workload.load:
            now_s += random.expovariate(workload.load * NUM_RANKS / loaded_s)
    admitted, problems = admit(specs)
    assert not problems
    return admitted


def run_for_real(
    jobs: Sequence[AdmittedJob], policy: str, profile: Profile, pool: WorkerPool, watch: Observer
) -> Summary:
    clock = Clock()
    state = State(
        jobs,
        num_ranks=NUM_RANKS,
        clock=clock,
        costs=CostModel(profile),
        guard_s=GUARD_S,
        last_number=pool.last_number,
    )
    with tempfile.TemporaryDirectory() as folder:
        backend = ProcessBackend(pool, jobs, clock=clock, output_dir=Path(folder))
        control = Control(
            jobs,
            state=state,
            backend=backend,
            clock=clock,
            policy=load_policy(policy),
            guard_s=GUARD_S,
            observers=[watch],
        )
        try:
            return control.run()
        finally:
            backend.close()


class Durations(Observer):
    """What the tasks and files of a run took."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobInfo] = {}
        self._dispatches: dict[int, Dispatch] = {}
        self._seconds: dict[int, float] = {}
        self._decoded_s: dict[str, float] = {}
        self._writes: list[float] = []

    def dispatched(self, dispatch: Dispatch) -> None:
        self._dispatches[dispatch.number] = dispatch

    def applied(self, event: Event) -> None:
        if isinstance(event, TaskDone):
            lasted_s = event.ended_s - event.started_s
            self._seconds[event.dispatch] = max(lasted_s, self._seconds.get(event.dispatch, 0.0))
            self._decoded_s[self._dispatches[event.dispatch].task.job_id] = event.ended_s
        elif isinstance(event, OutputWritten):
            self._writes.append(event.time_s - self._decoded_s[event.job_id])

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self._jobs = {info.job_id: info for info in jobs}

    def profile(self, before: Profile) -> Profile:
        """The same table with the run's own means, where the run has any."""
        samples: dict[object, list[float]] = defaultdict(list)
        for number, seconds in self._seconds.items():
            dispatch = self._dispatches[number]
            spec = self._jobs[dispatch.task.job_id].spec
            size = (spec.model, spec.width, spec.height, spec.frames)
            samples[(*size, dispatch.task.stage, dispatch.layout.degrees)].append(seconds)
        rows = []
        for row in before.rows:
            width, height, *frames = map(int, row.shape.partition("+")[0].split("x"))
            key = (row.model, width, height, frames[0] if frames else 1, row.stage, row.degrees)
            mean_s = statistics.fmean(samples[key]) if key in samples else row.seconds
            write_s = statistics.fmean(self._writes) if row.write_s is not None else None
            rows.append(replace(row, seconds=mean_s, loaded_s=mean_s, write_s=write_s))
        return replace(before, rows=tuple(rows))


def met(summary: Summary) -> float:
    assert summary.deadlines is not None
    return summary.deadlines.fraction


@dataclass(frozen=True)
class Result:
    """One workload, once."""

    workload: str
    policy: str
    real_met: float
    simulated_met: float
    hindsight_met: float
    """Simulated by what the run's own tasks took on average: what is left is the simulator's."""
    real_s: float
    simulated_s: float
    hindsight_s: float
    load_average: float
    """Of the machine, in the minute that ended with the real run: 2 ranks alone make about 2."""

    @property
    def points(self) -> float:
        return 100 * (self.simulated_met - self.real_met)

    @property
    def makespan_error(self) -> float:
        return self.simulated_s / self.real_s - 1


def measure_profile(jobs: Sequence[AdmittedJob], pool: WorkerPool, folder: Path) -> Profile:
    plan = profiling.plan_measurements(jobs, num_ranks=NUM_RANKS)
    measured = {entry.key: profiling.measure(entry, pool, folder=folder) for entry in plan}
    return profiling.assemble(
        measured, plan, device=cpu_name(), source="fidelity", num_ranks=NUM_RANKS, versions=versions()
    )


def compare(workload: Workload, pool: WorkerPool, folder: Path) -> Result:
    """Profile, run, simulate: close together, since the machine may change."""
    admit = Admission(default_model="tiny-wan")
    shapes = [JobSpec(id=kind, prompt="a fox", steps=4, seed=0, **SHAPES[kind]) for kind in workload.shapes]
    profile = measure_profile(admit(shapes)[0], pool, folder)
    jobs = make_jobs(workload, profile)
    watch = Durations()
    real = run_for_real(jobs, workload.policy, profile, pool, watch)
    load_average = os.getloadavg()[0]
    policy = load_policy(workload.policy)
    simulated = simulate(jobs, policy=policy, num_ranks=NUM_RANKS, profile=profile, guard_s=GUARD_S).summary
    again = simulate(
        jobs, policy=policy, num_ranks=NUM_RANKS, profile=watch.profile(profile), guard_s=GUARD_S
    ).summary
    return Result(
        workload.name,
        workload.policy,
        *(met(summary) for summary in (real, simulated, again)),
        *(summary.makespan_s for summary in (real, simulated, again)),
        load_average,
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    heads = ("met: real", "simulated", "in hindsight", "makespan: real", "simulated", "in hindsight", "load")
    yield f"| workload, policy | {' | '.join(heads)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for r in results:
        yield (
            f"| {r.workload}, {r.policy} | {r.real_met:.0%} | {r.simulated_met:.0%} ({r.points:+.1f}) "
            f"| {r.hindsight_met:.0%} | {r.real_s:.1f} s | {r.simulated_s:.1f} s ({r.makespan_error:+.1%}) "
            f"| {r.hindsight_s:.1f} s | {r.load_average:.1f} |"
        )


def verdicts(results: Sequence[Result]) -> Iterator[str]:
    """By workload: the median difference over the repetitions."""
    for name in dict.fromkeys(result.workload for result in results):
        mine = [result for result in results if result.workload == name]
        points = statistics.median(result.points for result in mine)
        error = statistics.median(result.makespan_error for result in mine)
        holds = abs(points) <= 5 and abs(error) <= 0.1
        verdict = "within" if holds else "NOT within"
        yield f"{name}: median {points:+.1f} points, makespan {error:+.1%}: {verdict} the bars"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--workload", action="append", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--jobs", type=int, help="Of each workload, in place of its own number.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    chosen = [
        replace(workload, num_jobs=arguments.jobs or workload.num_jobs)
        for workload in WORKLOADS
        if not arguments.workload or workload.name in arguments.workload
    ]
    admission = Admission(default_model="tiny-wan")
    checkpoints = [admission.find_model(name).checkpoint for name in ("tiny-wan", "tiny-qwen-image")]
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        WorkerPool(num_ranks=NUM_RANKS, checkpoints=checkpoints) as pool,
    ):
        pool.wait_ready()
        for _ in range(arguments.repeat):
            for workload in chosen:
                began_s = time.monotonic()
                results.append(compare(workload, pool, Path(folder)))
                print(f"{workload.name}: {time.monotonic() - began_s:.0f} s", flush=True)
                print(*table(results[-1:]), sep="\n", flush=True)
    print(f"\n{time.strftime('%Y-%m-%d')}, {cpu_name()}, {versions()}\n")
    print(*table(results), sep="\n")
    print()
    print(*verdicts(results), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
