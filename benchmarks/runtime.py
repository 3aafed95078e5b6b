"""What the control plane costs: CPU time per dispatched task, bytes per message; and the simulator's speed.

    python -m benchmarks.runtime [--tasks 5000] [--runs 8]

Runs the real control loop, state and policy over simulated ranks, with journal, trace and manifest. Each task
is sent through a real socket to a process that answers with a report. Each turn of the loop is timed from the
moment at which its events are there until all its dispatches are out. The simulator runs the same jobs in
virtual time, by a profile and with a cost model, as `gfgen simulate` does; its fastest run counts, since
other processes can only slow one down.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from benchmarks.measured import about, head, host_s, row
from gfgen.graph import Artifact, Stage, Trajectory
from gfgen.job.spec import JobSpec
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control.control import Control
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, Event, TaskDone
from gfgen.runtime.core.metrics import percentile
from gfgen.runtime.core.observer import JobInfo
from gfgen.runtime.files.journal import Journal, journal_header
from gfgen.runtime.files.manifest import ManifestWriter
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.files.trace import TraceWriter
from gfgen.runtime.ipc.messages import Channel, RankTimes, RunTask, TaskReport
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.simulate.simulation import SimulatedBackend, SimulatedTimes, profiled_times

NUM_RANKS = 8
_STEP_FLOPS = 1e9


def measure_control_plane(policy: str, *, num_open: int, num_tasks: int) -> tuple[list[float], int]:
    """Dispatch `num_tasks` tasks with `num_open` jobs open all the time, on 8 simulated ranks.

    Returns CPU seconds of the control plane for each task, and the largest message's bytes.
    """
    jobs = [make_job(idx, num_steps=20 + idx % 31) for idx in range(num_open + num_tasks // 20)]
    clock, costs = Clock(virtual=True), CostModel()
    start = RunStart(num_ranks=NUM_RANKS, lookahead_s=LOOKAHEAD_S)
    with _answering() as channel, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        backend = _TimedBackend(clock, num_tasks=num_tasks, reserve=jobs[num_open:], channel=channel)
        header = journal_header([job.info for job in jobs], start, policy=policy)
        control = Control(
            jobs[:num_open],
            state=State(jobs, start, clock=clock, costs=costs),
            backend=backend,
            policy=load_policy(policy),
            journal=Journal(folder / "journal.jsonl", header=header),
            observers=[TraceWriter(folder / "trace.json"), ManifestWriter(folder / "manifest.jsonl")],
        )
        backend.control = control
        with contextlib.suppress(AllTasksRun):
            control.run()
    return backend.turn_s, backend.largest_message_bytes


def simulated_tasks_per_s(policy: str, *, num_open: int, num_tasks: int, num_runs: int) -> float:
    """Simulate `num_tasks` tasks on 8 ranks, several times; counts this process' own time."""
    return num_tasks / min(_run_s(policy, num_open=num_open, num_tasks=num_tasks) for _ in range(num_runs))


def _run_s(policy: str, *, num_open: int, num_tasks: int) -> float:
    """Processor time of one simulation."""
    jobs = [make_job(idx, num_steps=20 + idx % 31) for idx in range(num_open + num_tasks // 20)]
    profile = _profile(jobs)
    clock, costs = Clock(virtual=True), CostModel(profile)
    times = profiled_times(profile, jobs)
    backend = _RefillingBackend(clock, times, num_tasks=num_tasks, reserve=jobs[num_open:])
    state = State(jobs, RunStart(num_ranks=NUM_RANKS, lookahead_s=LOOKAHEAD_S), clock=clock, costs=costs)
    control = Control(jobs[:num_open], state=state, backend=backend, policy=load_policy(policy))
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


@contextlib.contextmanager
def _answering() -> Iterator[Channel]:
    """A channel to a process that answers each message with a report."""
    end, other = Channel.pair()
    if (pid := os.fork()) == 0:
        end.close()
        _answer(other)
    other.close()
    channel = Channel(end)
    try:
        yield channel
    finally:
        channel.close()
        os.waitpid(pid, 0)


def _answer(end: socket.socket) -> NoReturn:
    report = pickle.dumps(TaskReport(1, RankTimes(0, 0.1, 0.2)), protocol=pickle.HIGHEST_PROTOCOL)
    with contextlib.suppress(OSError):
        while end.recv(1 << 16):
            end.send(report)
    os._exit(0)


class AllTasksRun(Exception):
    """Ends a measurement after its number of tasks."""


class _RefillingBackend(SimulatedBackend):
    """Lets another job arrive for every one that ends, so that the number of open jobs stays.

    Stops after so many tasks.
    """

    def __init__(
        self, clock: Clock, times: SimulatedTimes, *, num_tasks: int, reserve: Sequence[AdmittedJob]
    ):
        super().__init__(clock, num_ranks=NUM_RANKS, times=times)
        self.control: Control | None = None
        self._num_tasks, self._reserve = num_tasks, list(reserve)

    def submit(self, dispatch: Dispatch) -> None:
        super().submit(dispatch)
        self._num_tasks -= 1
        if not self._num_tasks:
            raise AllTasksRun

    def release(self, job_id: str) -> None:
        if self._reserve and self.control is not None:
            job = self._reserve.pop()
            for observer in self.control.observers:
                observer.added((job.info,))
            self.control.schedule(job)


class _TimedBackend(_RefillingBackend):
    """Notes the CPU time between the end of a wait and the begin of the next one."""

    def __init__(self, clock: Clock, *, channel: Channel, **given: Any) -> None:
        super().__init__(clock, SimulatedTimes(task_s=_duration_s), **given)
        self.turn_s: list[float] = []
        self.largest_message_bytes = 0
        self._channel = channel
        self._began_s = 0.0
        self._spent_s = 0.0
        self._num_sent = 0

    def wait(self, until: float | None) -> list[Event]:
        """As simulated; the time since the last wait belongs to the tasks sent in it."""
        self._spent_s += time.process_time() - self._began_s if self._began_s else 0.0
        if self._num_sent:
            self.turn_s += [self._spent_s / self._num_sent] * self._num_sent
            self._num_sent, self._spent_s = 0, 0.0
        events = super().wait(until)
        num_reports = sum(len(event.times) for event in events if isinstance(event, TaskDone))
        self._began_s = time.process_time()
        for _ in range(num_reports):
            self._channel.receive()
        return events

    def submit(self, dispatch: Dispatch) -> None:
        super().submit(dispatch)
        self._num_sent += 1
        task = dispatch.task
        message = RunTask(dispatch.number, task.job_id, task.index, dispatch.producer, dispatch.layout, (1,))
        before_bytes = self._channel.sent_bytes
        for _ in dispatch.layout.ranks:
            self._channel.send(message)
        message_bytes = (self._channel.sent_bytes - before_bytes) // dispatch.layout.degree
        self.largest_message_bytes = max(self.largest_message_bytes, message_bytes)


def _duration_s(dispatch: Dispatch) -> float:
    """Steps of 50 to 90 ms, so that completions do not fall together; the same in every process."""
    return 0.05 + (zlib.crc32(dispatch.task.job_id.encode()) % 41) / 1000


def make_job(idx: int, *, num_steps: int) -> AdmittedJob:
    """One of five shapes and three priorities, with a deadline."""
    spec = JobSpec(
        id=f"job-{idx:05d}",
        prompt="a benchmark",
        model="bench",
        deadline_s=60.0 + idx,
        priority=idx % 3,
        tag="SML"[idx % 3],
        steps=num_steps,
    )
    latents = Artifact("latents", (("latents", (1, 48, 21, 44, 80), "float32"),))
    frames = Artifact("frames", (("frames", (81, 704, 1280, 3), "uint8"),))
    trajectory = Trajectory(spec.id, num_steps, (latents, frames))
    info = JobInfo(spec, spec, trajectory.num_tasks, f"{spec.id}.mp4", "", "bench")
    flops = dict.fromkeys(Stage, _STEP_FLOPS)
    return AdmittedJob(info, trajectory, f"shape {idx % 5}", flops, Path("bench"))


POLICIES = ("srtf", "fcfs", "edf", "triage", "legacy")


@click.command()
@click.option("--tasks", default=5000, show_default=True, help="Tasks to dispatch per row.")
@click.option("--runs", default=5, show_default=True, help="Of the simulator; the fastest counts.")
def main(*, tasks: int, runs: int) -> None:
    """Cost of the scheduler: time per task and message size; speed of the simulator; start-up time."""
    click.echo(about(f"runtime --tasks {tasks} --runs {runs}") + "\n")
    numbers = ("median us", "P99 us", "message bytes", "simulated tasks a second")
    click.echo(head(f"policy, {NUM_RANKS} ranks", "open jobs", *numbers))
    for num_open, policy in itertools.product((50, 1000), POLICIES):
        turns_s, message_bytes = measure_control_plane(policy, num_open=num_open, num_tasks=tasks)
        us = [f"{each * 1e6:.0f}" for each in (statistics.median(turns_s), percentile(turns_s, 99))]
        speed = simulated_tasks_per_s(policy, num_open=num_open, num_tasks=tasks, num_runs=runs)
        click.echo(row(policy, num_open, *us, message_bytes, f"{speed:,.0f}"))
    click.echo("\n" + head("command", "median s"))
    for command in ("--help", "policies"):
        words = [sys.executable, "-m", "gfgen", command]
        times_s = [host_s(partial(subprocess.run, words, check=True, capture_output=True)) for _ in range(5)]
        click.echo(row(f"gfgen {command}", f"{statistics.median(times_s):.2f}"))


if __name__ == "__main__":
    main()
