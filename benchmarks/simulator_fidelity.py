"""How near a simulated run comes to the real one, on CPU ranks.

    python -m benchmarks.simulator_fidelity [--repeat 3] [--workload mixed ...] [--json FILE]

In each repetition: measure a profile of all shapes; then, for each workload, run its jobs on real
workers, and simulate the same jobs under the same policy by that profile. Twice more, to tell a machine that
has changed from a simulator that is wrong: by the profile with the run's own means, and with every task as
long as it was in the run. Bars: attainment within 5 percentage points, makespan within 10%.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from gfgen.bench import profiling
from gfgen.job.spec import JobSpec
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control.control import Control
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CPU, Devices
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, Event, OutputWritten, TaskDone
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobInfo, Observer
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import wait_ready
from gfgen.runtime.processes.workers import JobMemory, ProcessBackend
from gfgen.runtime.simulate.simulation import SimulatedTimes, profiled_times, simulate
from gfgen.session.ranks import Ranks
from gfgen.system.machine import cpu_name, versions

NUM_RANKS = 2
DEVICES = Devices(CPU, NUM_RANKS)
SHAPES: dict[str, dict[str, Any]] = {
    "video": {"model": "tiny-wan", "width": 128, "height": 128, "frames": 17},
    "long video": {"model": "tiny-wan", "width": 192, "height": 128, "frames": 33},
    "picture": {"model": "tiny-qwen-image", "width": 256, "height": 256},
    "large picture": {"model": "tiny-qwen-image", "width": 384, "height": 384},
}
"""Steps of about 20 to 100 ms on one core."""
ALPHAS = {"video": 2.0, "long video": 3.5, "picture": 1.5, "large picture": 6.0}
"""A deadline is so many stand-alone times after the arrival. Source: the paper's classes S and L (FACTS)."""


@dataclass(frozen=True)
class Workload:
    """Jobs of some shapes as they arrive."""

    name: str
    policy: str
    seed: int
    shapes: dict[str, float]
    """Weights."""
    num_jobs: int
    load: float | None
    """Work over what the ranks can do, with Poisson arrivals; None: all at the start."""
    slack: tuple[float, float] | None = None
    """Deadlines in stand-alone times, drawn between these; None: ALPHAS, which suit no batch."""
    steps: tuple[int, int] = (4, 12)


WORKLOADS = (
    Workload("mixed", "srtf", 1, {"video": 2, "picture": 2, "long video": 1}, 100, 0.8),
    Workload("urgent", "edf", 2, {"picture": 3, "large picture": 0.5, "video": 1.5}, 100, 0.7),
    Workload(
        "batch", "fcfs,degree=2", 3, {"video": 1, "large picture": 1, "long video": 1}, 40, None, (2.0, 60.0)
    ),
)


def make_jobs(workload: Workload, profile: Profile) -> Sequence[AdmittedJob]:
    """The jobs of a workload; arrivals and deadlines follow from what the profile says of their work."""
    random, now_s, specs = Random(workload.seed), 0.0, []
    alone = {(row.model, row.shape, row.stage): row for row in profile.rows if row.degrees == (1, 1, 1)}
    admit = Ranks(DEVICES).admission("tiny-wan")
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
        tasks = [job.trajectory.task(idx) for idx in range(job.trajectory.num_tasks)]
        rows = [alone[job.spec.model or "", job.shape, task.stage] for task in tasks]
        job_s = sum(row.seconds for row in rows)
        loaded_s = sum(row.loaded_s or row.seconds for row in rows)
        alpha = random.uniform(*workload.slack) if workload.slack else ALPHAS[kind]
        specs.append(replace(spec, arrival_s=now_s, deadline_s=alpha * job_s))
        if workload.load:
            now_s += random.expovariate(workload.load * NUM_RANKS / loaded_s)
    admitted, problems = admit(specs)
    assert not problems
    return admitted


def run_for_real(
    jobs: Sequence[AdmittedJob], policy: str, profile: Profile, pool: WorkerPool, watch: Observer
) -> Summary:
    """The jobs under a policy on the pool, as `gfgen run` does it; `watch` is told what happens."""
    clock = Clock()
    state = State(
        jobs,
        RunStart(num_ranks=NUM_RANKS, lookahead_s=LOOKAHEAD_S, last_number=pool.last_number),
        clock=clock,
        costs=CostModel(profile),
    )
    with tempfile.TemporaryDirectory() as folder:
        backend = ProcessBackend(pool, JobMemory(jobs, Path(folder)), clock=clock)
        control = Control(
            jobs,
            state=state,
            backend=backend,
            policy=load_policy(policy),
            observers=[watch],
        )
        try:
            return control.run()
        finally:
            backend.close()


# What a run shows afterwards --------------------------------------------------------------------


class Durations(Observer):
    """What the tasks and files of a run took."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobInfo] = {}
        self._dispatches: dict[int, Dispatch] = {}
        self._seconds: dict[int, float] = {}
        self._writes: dict[str, float] = {}

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self._jobs = {info.job_id: info for info in jobs}

    def dispatched(self, dispatch: Dispatch) -> None:
        self._dispatches[dispatch.number] = dispatch

    def applied(self, event: Event) -> None:
        if isinstance(event, TaskDone):
            self._seconds[event.dispatch] = event.busy_s
        elif isinstance(event, OutputWritten):
            self._writes[event.job_id] = event.write_s

    def means(self, before: Profile) -> Profile:
        """The same table with the run's own means, where the run has any."""
        samples: dict[object, list[float]] = defaultdict(list)
        for number, seconds in self._seconds.items():
            dispatch = self._dispatches[number]
            spec = self._jobs[dispatch.task.job_id].spec
            size = (spec.model, spec.width, spec.height, spec.frames)
            samples[(*size, dispatch.task.stage, dispatch.layout.degrees)].append(seconds)
        write_s = statistics.fmean(self._writes.values())
        rows = []
        for row in before.rows:
            width, height, *frames = map(int, row.shape.partition("+")[0].split("x"))
            key = (row.model, width, height, frames[0] if frames else 1, row.stage, row.degrees)
            mean_s = statistics.fmean(samples[key]) if key in samples else row.seconds
            written_s = None if row.write_s is None else write_s
            rows.append(replace(row, seconds=mean_s, loaded_s=mean_s, write_s=written_s))
        return replace(before, rows=tuple(rows))

    def times(self, jobs: Sequence[AdmittedJob], before: Profile) -> SimulatedTimes:
        """Each task and file as long as in the run; on other degrees by the ratio of the profile."""
        told = profiled_times(self.means(before), jobs)
        lasted = {d.task: (d, self._seconds[number]) for number, d in self._dispatches.items()}

        def task_s(dispatch: Dispatch) -> float:
            real, seconds = lasted[dispatch.task]
            same = real.layout.degrees == dispatch.layout.degrees
            return seconds if same else seconds * told.task_s(dispatch) / told.task_s(real)

        return replace(
            told, task_s=task_s, loaded_s=None, write_s=lambda dispatch: self._writes[dispatch.task.job_id]
        )


# How steady the machine is ----------------------------------------------------------------------


class Elsewhere:
    """The share of the processors' time that others took since the last look, hypervisor included."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pids = [os.getpid(), *[child.process.pid for child in pool.children]]
        self._last = self._ticks()

    def look(self) -> float:
        before, self._last = self._last, self._ticks()
        busy, own, total = (now - then for now, then in zip(self._last, before, strict=True))
        return max(0.0, busy - own) / total

    def _ticks(self) -> tuple[int, int, int]:
        """(busy, of these our own, all) since the machine began."""
        first = Path("/proc/stat").read_text().partition("\n")[0]
        user, nice, system, idle, iowait, *others = map(int, first.split()[1:9])
        own = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own += int(fields[11]) + int(fields[12])
        busy = user + nice + system + sum(others)
        return busy, own, busy + idle + iowait


def spin_ms() -> float:
    """What a fixed piece of work takes on all cores at once: the median over two seconds."""
    block, end_s = bytes(4_000_000), time.monotonic() + 2.0

    def spin(_: int) -> list[float]:
        times = [time.monotonic()]
        while times[-1] < end_s:
            sha256(block)  # lets other threads run
            times.append(time.monotonic())
        return [1000 * (b - a) for a, b in pairwise(times)]

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return statistics.median(ms for durations in threads.map(spin, range(NUM_RANKS)) for ms in durations)


# Comparing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FidelityOutcome:
    """A run in the two numbers that count."""

    met: float
    makespan_s: float

    @classmethod
    def of(cls, summary: Summary) -> FidelityOutcome:
        assert summary.deadlines is not None
        return cls(summary.deadlines.fraction, summary.makespan_s)

    def against(self, real: FidelityOutcome) -> str:
        points, error = self.points(real), self.error(real)
        return f"{self.met:.0%} ({points:+.1f}), {self.makespan_s:.1f} s ({error:+.1%})"

    def points(self, real: FidelityOutcome) -> float:
        return 100 * (self.met - real.met)

    def error(self, real: FidelityOutcome) -> float:
        return self.makespan_s / real.makespan_s - 1


@dataclass(frozen=True)
class FidelityResult:
    """One workload, once."""

    workload: str
    policy: str
    real: FidelityOutcome
    simulated: FidelityOutcome
    by_means: FidelityOutcome
    """Simulated by what the run's own tasks took on average: the profile's error is left out."""
    by_tasks: FidelityOutcome
    """Simulated with every task as long as it was: what is left is the simulator's own error."""
    elsewhere: float
    """The share of the processors' time that other processes took during the run."""
    profile_elsewhere: float
    """And while the profile was measured."""
    spin_ms: float
    """A fixed piece of work, before the run."""
    profile_spin_ms: float


@dataclass(frozen=True)
class MeasuredTimes:
    """A profile, and the machine meanwhile."""

    profile: Profile
    elsewhere: float
    spin_ms: float


def measure_profile(pool: WorkerPool, folder: Path) -> MeasuredTimes:
    jobs, _ = Ranks(DEVICES).admission("tiny-wan")(
        [JobSpec(id=kind, prompt="a fox", steps=4, seed=0, **shape) for kind, shape in SHAPES.items()]
    )
    plan = profiling.plan_measurements(jobs, num_ranks=NUM_RANKS)
    spun_ms, elsewhere = spin_ms(), Elsewhere(pool)
    measured = {entry.key: profiling.measure(entry, pool, folder=folder) for entry in plan}
    profile = profiling.assemble(
        measured, plan, device=cpu_name(), source="fidelity", num_ranks=NUM_RANKS, versions=versions()
    )
    return MeasuredTimes(profile, elsewhere.look(), spun_ms)


def compare(workload: Workload, measured: MeasuredTimes, pool: WorkerPool) -> FidelityResult:
    """Run and simulate."""
    profile, watch = measured.profile, Durations()
    jobs, policy = make_jobs(workload, profile), load_policy(workload.policy)
    spun_ms, elsewhere = spin_ms(), Elsewhere(pool)
    real = run_for_real(jobs, workload.policy, profile, pool, watch)
    share = elsewhere.look()

    def again(truth: Profile, times: SimulatedTimes | None = None) -> FidelityOutcome:
        simulated = simulate(jobs, policy=policy, num_ranks=NUM_RANKS, profile=truth, times=times)
        return FidelityOutcome.of(simulated.summary)

    return FidelityResult(
        workload.name,
        workload.policy,
        real=FidelityOutcome.of(real),
        simulated=again(profile),
        by_means=again(watch.means(profile)),
        by_tasks=again(profile, watch.times(jobs, profile)),
        elsewhere=share,
        profile_elsewhere=measured.elsewhere,
        spin_ms=spun_ms,
        profile_spin_ms=measured.spin_ms,
    )


def table(results: Sequence[FidelityResult]) -> Iterator[str]:
    yield "| workload, policy | real | simulated | by its own means | task by task | elsewhere | spin |"
    yield "|---|---|---|---|---|---|---|"
    for r in results:
        simulated = [outcome.against(r.real) for outcome in (r.simulated, r.by_means, r.by_tasks)]
        yield (
            f"| {r.workload}, {r.policy} | {r.real.met:.0%}, {r.real.makespan_s:.1f} s | "
            f"{' | '.join(simulated)} | {r.profile_elsewhere:.0%}, {r.elsewhere:.0%} "
            f"| {r.profile_spin_ms:.1f}, {r.spin_ms:.1f} ms |"
        )


def verdicts(results: Sequence[FidelityResult]) -> Iterator[str]:
    """By workload: the median difference over the repetitions."""
    for name in dict.fromkeys(result.workload for result in results):
        mine = [result for result in results if result.workload == name]
        points = statistics.median(result.simulated.points(result.real) for result in mine)
        error = statistics.median(result.simulated.error(result.real) for result in mine)
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
    admission = Ranks(DEVICES).admission("tiny-wan")
    checkpoints = [admission.models.find(name).checkpoint for name in ("tiny-wan", "tiny-qwen-image")]
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        WorkerPool(RankSettings(num_ranks=NUM_RANKS), checkpoints) as pool,
    ):
        wait_ready(pool)
        for number in range(1, arguments.repeat + 1):
            began_s = time.monotonic()
            measured = measure_profile(pool, Path(folder))
            print(f"repetition {number}: profile in {time.monotonic() - began_s:.0f} s", flush=True)
            for workload in chosen:
                results.append(compare(workload, measured, pool))
                print(*list(table(results[-1:]))[2:], sep="\n", flush=True)
    print(f"\n{time.strftime('%Y-%m-%d %H:%M')}, {cpu_name()}, {versions()}\n")
    print(*table(results), sep="\n")
    print()
    print(*verdicts(results), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
