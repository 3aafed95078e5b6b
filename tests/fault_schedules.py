"""Schedules of faults: random jobs, policies and trouble from a seed, on real processes.

Everything is real but the models: control loop, state, pool, channels, slabs, files. The workers
(fake_worker.py) fail as the plan says. Afterwards everything is checked that a user relies on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from types import FrameType

from builders import patient
from fake_worker import STATE_BYTES, frames_of_job
from fault_plan import KINDS, SLOW_KINDS, Done, Fault, FaultFolder, FaultKind, FaultPoint
from journal_reader import read_runs
from PIL import Image
from replay import replay

from gfgen.errors import PolicyFault, WorkerError
from gfgen.gfc.arena import ArenaPlan
from gfgen.graph import Artifact, Stage, Trajectory
from gfgen.job.spec import JobSpec
from gfgen.layout import Limits
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.control import Control
from gfgen.runtime.control.job_record import MAX_LOST_WORKERS, MAX_TASK_FAILURES
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, Event, RankLost, TaskDone, TaskFailed
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.files import resume
from gfgen.runtime.files.journal import Journal, journal_header
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.content import remove_leftovers
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.child import Patience
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import wait_ready
from gfgen.runtime.processes.workers import JobMemory, ProcessBackend
from gfgen.runtime.processes.writes import MAX_WRITES
from gfgen.snapshot import Decision, Snapshot
from gfgen.system.wording import counted

MAX_RANKS = 4
BOUND_S = 15.0
"""A schedule takes a fraction of a second, a few with everything slow in it; beyond this it hangs."""
HASTY = Patience(
    ping_s=0.1,
    silence_s=0.6,
    task_s=0.6,
    task_factor=1.0,
    leaving_s=0.6,
    write_s=2.0,  # its process may have yet to start, which takes more than 0.6 s where ten others compute
    starting_s=2.0,  # the same
)
_SIDE = 16
_FRAMES_BYTES = _SIDE * _SIDE * 3


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run and what goes wrong in it."""

    seed: int
    num_ranks: int
    jobs: tuple[AdmittedJob, ...]
    policy: str
    lookahead_s: float
    faults: tuple[Fault, ...]
    read_s: float = 0.0
    """What the reads of a step take, if blocks are read for each forward."""


@dataclass(slots=True)
class ScheduleResult:
    """What came of a schedule; `problems` is empty when all is as promised."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    """Done, by kind."""
    num_deaths: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_lost: int = 0
    num_doubled: int = 0
    problems: list[str] = field(default_factory=list)


# Making a schedule ----------------------------------------------------------------------------


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed: always the same one."""
    random = Random(seed)
    num_ranks = random.randint(1, MAX_RANKS)
    jobs = tuple([make_job(random, f"job-{seed}-{idx}") for idx in range(random.randint(1, 8))])
    return Schedule(
        seed=seed,
        num_ranks=num_ranks,
        jobs=jobs,
        policy=random.choice(["wander", "wander", "wander", "srtf", "fcfs,degree=2", "edf", "legacy"]),
        lookahead_s=random.choice([0.0, 0.003, 10.0]),
        faults=tuple(_faults(random, jobs, num_ranks=num_ranks)),
    )


def make_job(random: Random, job_id: str) -> AdmittedJob:
    """A job of any length for the fake worker."""
    spec = JobSpec(
        id=job_id,
        prompt=f"prompt of {job_id}",
        model="fake",
        steps=random.choice([1, 2, 3, 5, 8, 13]),
        width=_SIDE,
        height=_SIDE,
        frames=1,
        arrival_s=random.choice([0.0, 0.0, random.random() * 0.1]),
        deadline_s=random.random(),
        timeout_s=random.random() * 0.2 if random.random() < 0.04 else None,
    )
    artifacts = (
        Artifact("prompt", (("prompt", (STATE_BYTES,), "uint8"),)),
        Artifact("condition", ()),
        Artifact("latents", (("latents", (STATE_BYTES,), "uint8"),)),
        Artifact("frames", (("frames", (1, _SIDE, _SIDE, 3), "uint8"),)),
    )
    trajectory = Trajectory(job_id, spec.steps or 0, artifacts)
    info = JobInfo(spec, spec, trajectory.num_tasks, f"{job_id}.png", f"hash of {job_id}", "fake")
    flops = dict.fromkeys(Stage, 1e7)
    job = AdmittedJob(
        info,
        trajectory,
        "small",
        flops,
        Path("fake"),
        limits=Limits(
            uses_cfg=random.random() < 0.5,
            max_sequence_degree=random.choice([1, 2, MAX_RANKS]),
            max_decode_degree=random.choice([1, 2, MAX_RANKS]),
        ),
    )
    return replace(job, shape=f"small {job.limits}")  # jobs of one shape can use the same layouts


def _faults(random: Random, jobs: Sequence[AdmittedJob], *, num_ranks: int) -> Iterator[Fault]:
    """Mostly one or two, sometimes none or a handful; slow ones are rare."""
    for _ in range(random.choice([0, 1, 1, 2, 2, 3, 4, 6])):
        point = random.choice(list(FaultPoint))
        kinds = [kind for kind in KINDS[point] if kind not in SLOW_KINDS or random.random() < 0.08]
        if not kinds:
            continue
        kind = random.choice(kinds)
        job = random.choice(jobs)
        if point in (FaultPoint.WRITING, FaultPoint.WRITTEN):
            yield Fault(kind, point, job_id=job.job_id, times=random.choice([1, 1, MAX_WRITES]))
        elif (
            point not in (FaultPoint.LOADING, FaultPoint.RECEIVING, FaultPoint.SENDING)
            and random.random() < 0.4
        ):
            index = random.randrange(job.trajectory.num_tasks)
            times = random.choice([1, 1, MAX_TASK_FAILURES, MAX_LOST_WORKERS])
            yield Fault(kind, point, job_id=job.job_id, index=index, times=times)
        else:
            yield Fault(kind, point, rank=random.randrange(num_ranks), after=random.randrange(12))
            if point is FaultPoint.LOADING:  # which comes after something else
                yield Fault(FaultKind.KILL, FaultPoint.BEFORE, rank=random.randrange(num_ranks))
    for _ in range(random.choice([0, 1, 3])):
        point = random.choice(
            [FaultPoint.BEFORE, FaultPoint.MEETING, FaultPoint.SENDING, FaultPoint.PUBLISHED]
        )
        yield Fault(FaultKind.DELAY, point, rank=random.randrange(num_ranks), after=random.randrange(20))


def wandering(random: Random) -> NamedPolicy:
    """Any layout of free ranks, another one at every step."""

    def decide(snapshot: Snapshot) -> Iterator[Decision]:
        free = list(snapshot.free_ranks)
        for job in random.sample(list(snapshot.open.values()), len(snapshot.open)):
            if not free:
                return
            random.shuffle(free)
            layout = job.layout(free[: random.randint(1, len(free))])
            free = [rank for rank in free if rank not in layout.ranks]
            yield Decision(job.next_task, layout)

    return NamedPolicy("wander", decide)


# Running one ------------------------------------------------------------------------------------


class Fleet:
    """Pools of fake workers, by number of ranks; a run leaves its pool warm for the next one.

    One fork server serves all pools of a process, so `preload` counts for the first of them.
    """

    def __init__(self, *, preload: Sequence[str] | None = None) -> None:
        self._preload = preload
        self.folder = Path(tempfile.mkdtemp(prefix="gfgen-faults-"))
        self.faults = FaultFolder(self.folder / "faults")
        (self.folder / "faults").mkdir()
        self.faults.begin(())
        self._pools: dict[int, WorkerPool] = {}

    def pool(self, num_ranks: int) -> WorkerPool:
        """A pool whose ranks have not died yet, as far as it remembers."""
        if num_ranks not in self._pools:
            plan = ArenaPlan(data_bytes=1 << 16, post_bytes=1 << 10)
            pool = WorkerPool(
                RankSettings(num_ranks=num_ranks, plan=plan),
                [self.folder / "faults"],
                worker_main="fake_worker:main",
                writer_main="fake_worker:write",
                preload=self._preload,
            )
            self._pools[num_ranks] = pool
            wait_ready(pool)
        self._pools[num_ranks].deaths.clear()
        return self._pools[num_ranks]

    def drop(self, num_ranks: int) -> None:
        """End a pool that has lost ranks for good, or may be in any state."""
        self._pools.pop(num_ranks).close(at_once=True)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for num_ranks in list(self._pools):
            self.drop(num_ranks)
        shutil.rmtree(self.folder)


class HungError(Exception):
    """A schedule does not end; says where it stands."""


class _Witness(Observer):
    """Keeps what it is told, over all runs of a schedule."""

    def __init__(self) -> None:
        self.dispatches: dict[int, Dispatch] = {}
        self.events: list[Event] = []
        self.outcomes: list[JobOutcome] = []
        self.completed: dict[str, list[int]] = {}
        """By job: its tasks that have ended well, in order, since the job began last."""
        self.runs: list[Sequence[AdmittedJob]] = []
        """What each run had to do."""

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self.completed |= {job.job_id: [] for job in jobs}

    def dispatched(self, dispatch: Dispatch) -> None:
        self.dispatches[dispatch.number] = dispatch

    def applied(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, TaskDone):
            task = self.dispatches[event.dispatch].task
            self.completed[task.job_id].append(task.index)

    def ended(self, outcome: JobOutcome) -> None:
        self.outcomes.append(outcome)


def run_schedule(schedule: Schedule, fleet: Fleet) -> ScheduleResult:
    """Run a schedule and check everything; in the main thread."""
    output_dir = fleet.folder / "outputs"
    output_dir.mkdir()
    witness, result = _Witness(), ScheduleResult(schedule.seed)
    fleet.faults.begin(())
    pool = fleet.pool(schedule.num_ranks)
    processes_before = set(multiprocessing.active_children()) - {c.process for c in pool.children}
    fds_before = _open_fds()
    fleet.faults.begin(schedule.faults)
    try:
        with _bounded(lambda: _stand(schedule, fleet, witness)):
            _run_until_all_ended(schedule, fleet, output_dir, witness)
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    _settle(schedule, result, fleet, witness, output_dir)
    if fleet.pool(schedule.num_ranks).retired or result.problems:
        fleet.drop(schedule.num_ranks)
    elif fleet.pool(schedule.num_ranks) is pool:
        result.problems += _left_behind(pool, fds_before, processes_before)
    shutil.rmtree(output_dir)
    return result


def _run_until_all_ended(schedule: Schedule, fleet: Fleet, output_dir: Path, witness: _Witness) -> None:
    """Run, and run again what is left when every rank has died too often, as a user would."""
    jobs: Sequence[AdmittedJob] = schedule.jobs
    while jobs:
        remove_leftovers(output_dir)
        pool = fleet.pool(schedule.num_ranks)
        try:
            _run(schedule, jobs, pool, output_dir, witness)
        except WorkerError:
            if len(pool.retired) < pool.num_ranks:
                raise
            fleet.drop(schedule.num_ranks)
            fleet.faults.disarm(FaultPoint.LOADING)  # a run without a rank that starts is none
        ended = {outcome.info.job_id for outcome in witness.outcomes}
        jobs = [job for job in schedule.jobs if job.job_id not in ended]


def _run(
    schedule: Schedule,
    jobs: Sequence[AdmittedJob],
    pool: WorkerPool,
    output_dir: Path,
    witness: _Witness,
) -> None:
    """One run, as `gfgen run` does it."""
    clock, costs = Clock(), CostModel()
    start = RunStart(
        num_ranks=pool.num_ranks,
        lookahead_s=schedule.lookahead_s,
        last_number=max([pool.last_number, *witness.dispatches]),
        reads_s={"fake": schedule.read_s} if schedule.read_s else {},
    )
    state = State(jobs, start, clock=clock, costs=costs)
    backend = ProcessBackend(pool, JobMemory(jobs, output_dir), clock=clock)
    witness.runs.append(jobs)
    journal = Journal(
        output_dir.with_name("journal.jsonl"),
        header=journal_header([job.info for job in jobs], start, policy=schedule.policy),
    )
    control = Control(
        jobs,
        state=state,
        backend=backend,
        policy=_policy_of(schedule),
        observers=[witness],
        journal=journal,
    )
    with patient(pool, HASTY), contextlib.closing(backend), contextlib.closing(journal):
        control.run()
    if control.decider.given_up is not None:
        raise PolicyFault(f"policy {schedule.policy} was given up: {control.decider.given_up}")


def _policy_of(schedule: Schedule) -> NamedPolicy:
    """Anew for each run: a wandering one begins at the beginning."""
    return wandering(Random(schedule.seed)) if schedule.policy == "wander" else load_policy(schedule.policy)


@contextlib.contextmanager
def _bounded(stand: Callable[[], str]) -> Iterator[None]:
    """Interrupt what does not end, wherever it waits."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise HungError(f"not done after {BOUND_S:g} s; {stand()}")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, BOUND_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _stand(schedule: Schedule, fleet: Fleet, witness: _Witness) -> str:
    """Where a run stands, for whoever has to find out why."""
    lines = [
        f"{counted(schedule.num_ranks, 'rank')}, policy {schedule.policy}",
        f"lookahead {schedule.lookahead_s:g} s",
        f"plan: {schedule.faults}",
        f"done: {fleet.faults.done()}",
        f"ended: {[outcome.info.job_id for outcome in witness.outcomes]}",
        *[f"dispatch {dispatch}" for dispatch in list(witness.dispatches.values())[-6:]],
        *[f"event {event}" for event in witness.events[-12:]],
    ]
    return "\n    ".join(lines)


# Checking it ------------------------------------------------------------------------------------


def _settle(
    schedule: Schedule, result: ScheduleResult, fleet: Fleet, witness: _Witness, output_dir: Path
) -> None:
    """Count, and compare with what was promised."""
    done = fleet.faults.done()
    result.faults = Counter(fault.kind for fault in done)
    result.num_deaths = sum(isinstance(event, RankLost) for event in witness.events)
    result.problems += [f"complaint: {text}" for text in fleet.faults.complaints()]
    ends = Counter(outcome.info.job_id for outcome in witness.outcomes)
    result.num_doubled = sum(count > 1 for count in ends.values())
    missing = [job.job_id for job in schedule.jobs if not ends[job.job_id]]
    result.num_lost = len(missing)
    if result.num_lost or result.num_doubled:
        result.problems.append(f"never ended: {missing}; ended: {dict(ends)}")
    for outcome in witness.outcomes:
        result.num_done += outcome.status == "done"
        result.num_failed += outcome.status == "failed"
        if outcome.status == "failed":
            result.problems += _unexplained(outcome, done, witness)
    result.problems += _wrong_steps(schedule, witness)
    result.problems += _decided_otherwise(schedule, witness, output_dir.with_name("journal.jsonl"))
    result.problems += _wrong_files(schedule, witness, output_dir)


def _unexplained(outcome: JobOutcome, done: Sequence[Done], witness: _Witness) -> Iterator[str]:
    """A job fails for its own exceptions, three deaths, its file or its time-out alone."""
    job_id, error = outcome.info.job_id, outcome.error or ""
    mine = [fault for fault in done if fault.job_id == job_id]
    deaths = {
        event.dispatch
        for event in witness.events
        if isinstance(event, TaskFailed)
        and event.lost
        and witness.dispatches[event.dispatch].task.job_id == job_id
    }
    raised = Counter(fault.index for fault in mine if fault.kind is FaultKind.RAISE)
    at_file = [fault for fault in mine if fault.point in (FaultPoint.WRITING, FaultPoint.WRITTEN)]
    reasons = {
        r"[a-z]+( \d+ of \d+)?: ScriptedError: as the plan says": max(raised.values(), default=0)
        >= MAX_TASK_FAILURES,
        r"\d+ workers died under it: .*": len(deaths) >= MAX_LOST_WORKERS,
        r"its writer died twice: .*": len(at_file) >= MAX_WRITES,
        r"ScriptedError\('as the plan says'\)": any(fault.kind is FaultKind.RAISE for fault in at_file),
        r"[a-z]+( \d+ of \d+)?: it did not end in time.*": any(fault.kind in SLOW_KINDS for fault in done),
        r"timed out .*": outcome.info.spec.timeout_s is not None,
    }
    if not any(re.fullmatch(pattern, error) and holds for pattern, holds in reasons.items()):
        yield f"{job_id} failed without cause: {error}; faults: {mine}, deaths: {len(deaths)}"


def _wrong_steps(schedule: Schedule, witness: _Witness) -> Iterator[str]:
    """A fault costs the step it was in: what was complete is never run again, nothing is left out."""
    finished = {outcome.info.job_id for outcome in witness.outcomes if outcome.status == "done"}
    for job in schedule.jobs:
        indices = witness.completed[job.job_id]
        if indices != list(range(len(indices))):
            yield f"{job.job_id}: tasks were completed in the order {indices}"
        if job.job_id in finished and len(indices) != job.trajectory.num_tasks:
            yield f"{job.job_id} is done after {len(indices)} of {job.trajectory.num_tasks} tasks"


def _decided_otherwise(schedule: Schedule, witness: _Witness, path: Path) -> Iterator[str]:
    """What was decided is decided again when the journal is replayed; the journal is removed."""
    for run, jobs in zip(read_runs(path), witness.runs, strict=True):
        outcome = replay(run, jobs, policy=_policy_of(schedule))
        if outcome.difference:
            yield f"replayed: {outcome.difference}"
    path.unlink()


def _wrong_files(schedule: Schedule, witness: _Witness, output_dir: Path) -> Iterator[str]:
    """Done jobs have one file with the right content; a failed one may have left a good file, or a state."""
    jobs = {job.info.file: job for job in schedule.jobs}
    failed = [outcome.info.job_id for outcome in witness.outcomes if outcome.status == "failed"]
    states = {*(output_dir / resume.FOLDER).glob("*")}
    for path in states - {resume.resume_path(output_dir, job_id) for job_id in failed}:
        yield f"{path.name} is left in {resume.FOLDER}"
    files = {path.name for path in output_dir.iterdir()} - ({resume.FOLDER} if states else set())
    for name in sorted(files - jobs.keys()):
        yield f"{name} is left in the output folder"
    finished = {o.info.file for o in witness.outcomes if o.status == "done"}
    for name in sorted(finished - files):
        yield f"{name} is not there although its job is done"
    for name in sorted(files & jobs.keys()):
        expected = frames_of_job(jobs[name].job_id, jobs[name].trajectory.num_steps, _FRAMES_BYTES)
        with Image.open(output_dir / name) as image:
            if image.tobytes() != expected:
                yield f"{name} does not show what an undisturbed run makes"


def _left_behind(pool: WorkerPool, fds_before: int, processes_before: set[BaseProcess]) -> Iterator[str]:
    """Descriptors (memory, sockets) and processes that a run has left."""
    fds = _open_fds()
    if fds != fds_before:
        yield f"{fds} descriptors are open, {fds_before} were before"
    strays = set(multiprocessing.active_children()) - processes_before - {c.process for c in pool.children}
    if strays:
        yield f"processes are left: {strays}"


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
