"""A run's journal leads to the same decisions again."""

import json
from dataclasses import replace
from random import Random

import pytest
from builders import Recorder, make_job
from journal_reader import read_runs
from replay import replay
from test_workers import PICTURE, VIDEO, admitted

from gfgen.errors import InputError
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.policies.catalog import load_policy
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.state import State
from gfgen.runtime.core.events import (
    Clock,
    JobArrived,
    JobCancelled,
    OutputWritten,
    TaskDone,
    TaskFailed,
    Wakeup,
)
from gfgen.runtime.core.observer import Observer
from gfgen.runtime.files.journal import Journal, journal_header
from gfgen.runtime.files.resume import ResumePoint, RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.processes.workers import JobMemory, ProcessBackend
from gfgen.runtime.simulate.choosers import ImmediateChooser
from gfgen.runtime.simulate.simulation import SimulatedBackend, SimulatedTimes

POLICIES = ["legacy", "fcfs", "fcfs,degree=2", "srtf", "srtf,degree=2", "edf", "makespan", "auto"]


class Watching(Recorder):
    """Looks at every snapshot, as a progress display does."""

    refresh_s = 0.0

    def refreshed(self, snapshot):
        self.seen = [rank.free_at_s for rank in snapshot.ranks]


def run(
    path,
    jobs,
    *,
    policy,
    clock,
    backend,
    num_ranks,
    lookahead_s,
    profile=None,
    observer=None,
    last_number=0,
    intake=None,
    resume=None,
    started_at=0.0,
    first_use_s=0.0,
    reads_s=None,
):
    """One run with a journal, as `gfgen run` does it."""
    start = RunStart(
        num_ranks=num_ranks,
        lookahead_s=lookahead_s,
        started_at=started_at,
        last_number=last_number,
        resume=resume or {},
        first_use_s=first_use_s,
        reads_s=reads_s or {},
        warm=[("fake", "small", (1, 1, 1))],
    )
    header = journal_header(
        [job.info for job in jobs],
        start,
        policy=policy,
        profile=None if profile is None else profile.hash,
    )
    journal = Journal(path, header=header)
    chosen = load_policy(policy)
    state = State(
        jobs,
        start,
        clock=clock,
        costs=CostModel(profile),
    )
    control = Control(
        jobs,
        state=state,
        backend=backend,
        policy=chosen,
        journal=journal,
        observers=[observer or Watching()],
        steering=Steering(
            intake=intake,
            chooser=None if chosen.choose is None else ImmediateChooser(chosen.choose),
        ),
    )
    try:
        control.run()
    finally:
        journal.close()
    return control


class Unsteady(SimulatedBackend):
    """Tasks take as long as chance will have it, and sometimes fail on all of their ranks."""

    def __init__(self, clock, *, num_ranks, random, failures=0.05):
        def task_s(dispatch):
            return random.choice([0.1, 0.1, 0.1, 0.11, 0.3]) * (
                1 if random.random() < 0.5 else random.random()
            )

        super().__init__(
            clock, num_ranks=num_ranks, times=SimulatedTimes(task_s=task_s, write_s=lambda _: 0.01)
        )
        self._random = random
        self._failures = failures
        self._first_uses = Random(num_ranks)
        self._failed = set()
        self._unwritten = []

    def wait(self, until):
        events = [self._perhaps(event) for event in super().wait(until)]
        return [event for event in events if not self._is_of_failed_decode(event)]

    def submit(self, dispatch):
        super().submit(dispatch)
        lost_input = dispatch.producer in self._failed
        is_decode = dispatch.task.stage is Stage.DECODE
        if lost_input or (not is_decode and self._random.random() < self._failures):
            self._failed.add(dispatch.number)
            self._unwritten += [dispatch.task.job_id] * is_decode

    def _is_of_failed_decode(self, event):
        if not isinstance(event, OutputWritten) or event.job_id not in self._unwritten:
            return False
        self._unwritten.remove(event.job_id)
        return True

    def _perhaps(self, event):
        number = getattr(event, "dispatch", None)
        if number not in self._failed:
            if isinstance(event, TaskDone) and self._first_uses.random() < 0.3:
                times = [each._replace(is_first_use=True, prepared_s=0.1) for each in event.times]
                return replace(event, times=tuple(times))
            return event
        return TaskFailed(event.time_s, number, "by chance")


def random_jobs(random):
    return [
        make_job(
            f"job-{idx}",
            steps=random.choice([1, 2, 4, 9]),
            shape=random.choice(["small", "large"]),
            arrival_s=random.choice([0.0, random.random() * 2]),
            deadline_s=random.choice([None, random.random() * 3]),
            timeout_s=random.random() * 3 if random.random() < 0.1 else None,
            priority=random.choice([0, 0, 1]),
            uses_cfg=random.random() < 0.5,
        )
        for idx in range(random.randint(1, 9))
    ]


PROFILE = Profile(
    "a machine",
    "2026-11-20",
    "a test",
    num_ranks=4,
    rows=tuple(ProfileRow("fake", "small", stage, (1, 1, 1), 0.1, flops=1e9) for stage in Stage),
)


def at_random(random, clock, num_ranks):
    """Options of a run."""
    return {
        "policy": random.choice(POLICIES),
        "clock": clock,
        "backend": Unsteady(clock, num_ranks=num_ranks, random=random),
        "num_ranks": num_ranks,
        "lookahead_s": random.choice([0.0, 0.01, 0.2, 5.0]),
    }


@pytest.mark.parametrize("seed", range(60))
def test_random_runs_decide_the_same_again(tmp_path, seed):
    random = Random(seed)
    jobs, num_ranks = random_jobs(random), random.randint(1, 4)
    clock, profile = Clock(virtual=True), random.choice([None, PROFILE])
    for job in random.sample(jobs, k=len(jobs) // 3):
        clock.at(JobCancelled(random.random() * 2, job.job_id))
    control = run(
        tmp_path / "journal.jsonl",
        jobs,
        **at_random(random, clock, num_ranks),
        profile=profile,
        first_use_s=random.choice([0.0, 0.5]),
    )
    (journaled,) = read_runs(tmp_path / "journal.jsonl")
    outcome = replay(journaled, jobs, profile=profile)
    assert outcome.difference is None
    assert outcome.num_turns == len(journaled.turns)
    assert outcome.num_dispatches == control.state.flights.last_number


@pytest.mark.parametrize("seed", range(40))
def test_runs_with_shared_steps_decide_the_same_again(tmp_path, seed):
    random = Random(seed)
    jobs, num_ranks, clock = random_jobs(random), random.randint(1, 3), Clock(virtual=True)
    for job in random.sample(jobs, k=len(jobs) // 3):
        clock.at(JobCancelled(random.random() * 2, job.job_id))
    run(
        tmp_path / "journal.jsonl",
        jobs,
        **at_random(random, clock, num_ranks),
        profile=(profile := random.choice([None, PROFILE])),
        reads_s={"fake": random.choice([0.1, 1.0])},
    )
    (journaled,) = read_runs(tmp_path / "journal.jsonl")
    assert replay(journaled, jobs, profile=profile).difference is None


@pytest.mark.parametrize("first_use_s", [0.0, 0.5])
@pytest.mark.parametrize("seed", [11, 16, 30, 42])
def test_looking_ahead_leaves_no_trace_in_what_is_decided(tmp_path, seed, first_use_s):
    """Nobody looks ahead in a replay; these seeds differed when what a look asked for was handed out."""
    random = Random(seed)
    jobs = [
        make_job(
            f"job-{idx}",
            steps=random.choice([2, 4, 9]),
            shape=random.choice(["small", "large", "mid"]),
            arrival_s=random.random() * 6,
            deadline_s=random.choice([None, random.random() * 3]),
            uses_cfg=random.random() < 0.5,
        )
        for idx in range(random.randint(8, 60))
    ]
    num_ranks, clock, profile = random.choice([4, 4, 8]), Clock(virtual=True), random.choice([None, PROFILE])
    run(
        tmp_path / "journal.jsonl",
        jobs,
        policy="auto",
        clock=clock,
        backend=Unsteady(clock, num_ranks=num_ranks, random=random),
        num_ranks=num_ranks,
        lookahead_s=random.choice([0.0, 0.01, 0.2]),
        profile=profile,
        first_use_s=first_use_s,
    )
    (journaled,) = read_runs(tmp_path / "journal.jsonl")
    assert replay(journaled, jobs, profile=profile).difference is None


@pytest.mark.parametrize(
    ("lookahead_s", "policy"), [*((0.005, policy) for policy in POLICIES), (1.0, "legacy"), (1.0, "auto")]
)
def test_a_run_on_real_workers_decides_the_same_again(pool, tmp_path, policy, lookahead_s):
    specs = [
        JobSpec(
            id=f"job-{idx}",
            prompt=f"a fox, {idx}",
            arrival_s=0.03 * idx,
            deadline_s=0.4,
            **(PICTURE | {"negative_prompt": "blurry"} if idx % 2 else VIDEO),
        )
        for idx in range(6)
    ]
    jobs, clock = admitted(*specs), Clock()
    backend = ProcessBackend(pool, JobMemory(jobs, tmp_path), clock=clock)
    try:
        control = run(
            tmp_path / "journal.jsonl",
            jobs,
            policy=policy,
            clock=clock,
            backend=backend,
            num_ranks=pool.num_ranks,
            lookahead_s=lookahead_s,
            last_number=pool.last_number,
        )
    finally:
        backend.close()
    (journaled,) = read_runs(tmp_path / "journal.jsonl")
    outcome = replay(journaled, jobs)
    assert outcome.difference is None
    assert outcome.num_dispatches == len(control.observers[1].dispatches) >= 6 * 7


def test_a_second_run_remembers_arrivals_and_goes_on_where_jobs_stopped(tmp_path):
    jobs = [make_job(f"job-{idx}", steps=5, deadline_s=1.0 + idx) for idx in range(4)]
    path = tmp_path / "journal.jsonl"
    points = {"job-1": ResumePoint(3, 7, 9, tmp_path)}
    for started_at, resume in ((1000.0, {}), (1002.0, points)):
        clock = Clock(virtual=True)
        backend = SimulatedBackend(clock, num_ranks=2, times=SimulatedTimes(task_s=lambda _: 0.1))
        run(
            path,
            jobs,
            policy="edf",
            clock=clock,
            backend=backend,
            num_ranks=2,
            lookahead_s=0.0,
            started_at=started_at,
            resume=resume,
        )
    first, second = read_runs(path)
    assert not first.arrived_at
    assert set(second.arrived_at.values()) == {1000.0}
    assert replay(first, jobs).difference is None
    assert second.turns[0].dispatches is not None
    assert min(number for turn in second.turns for number, *_ in turn.dispatches or ()) == 10


class Intake:
    """Brings a job when it is asked for the third time."""

    def __init__(self, job):
        self._jobs = [[], [], [job]]

    def take(self):
        return self._jobs.pop(0) if self._jobs else []


def test_jobs_that_came_later_are_given_after_the_others(tmp_path):
    early, late = make_job("early", steps=9), make_job("late", steps=2, deadline_s=0.5)
    clock, path = Clock(virtual=True), tmp_path / "journal.jsonl"
    backend = SimulatedBackend(clock, num_ranks=2, times=SimulatedTimes(task_s=lambda _: 0.1))
    with pytest.raises(AssertionError, match="wait forever"):  # who would bring a third job?
        run(
            path,
            [early],
            policy="edf",
            clock=clock,
            backend=backend,
            num_ranks=2,
            lookahead_s=0.0,
            intake=Intake(late),
        )
    (journaled,) = read_runs(path)
    arrivals = [e for turn in journaled.turns for e in turn.events if isinstance(e, JobArrived)]
    assert [event.job_id for event in arrivals] == ["early", "late"]
    assert replay(journaled, [early, late]).difference is None


def test_a_job_that_is_cancelled_before_it_arrives_does_not_arrive_in_the_replay_either(tmp_path):
    early, late = make_job("early", steps=9), make_job("late", steps=2, arrival_s=0.5)
    clock, path = Clock(virtual=True), tmp_path / "journal.jsonl"
    clock.at(JobCancelled(0.25, "late"))
    backend = SimulatedBackend(clock, num_ranks=2, times=SimulatedTimes(task_s=lambda _: 0.1))
    with pytest.raises(AssertionError, match="wait forever"):
        run(
            path,
            [early],
            policy="srtf",
            clock=clock,
            backend=backend,
            num_ranks=2,
            lookahead_s=0.0,
            intake=Intake(late),
        )
    (journaled,) = read_runs(path)
    assert {job for turn in journaled.turns for _, job, *_ in turn.dispatches or ()} == {"early"}
    assert replay(journaled, [early, late]).difference is None


def journaled_run(tmp_path, *jobs, **options):
    clock, path = Clock(virtual=True), tmp_path / "journal.jsonl"
    backend = SimulatedBackend(clock, num_ranks=2, times=SimulatedTimes(task_s=lambda _: 0.1))
    options = {"policy": "fcfs", "lookahead_s": 0.0, **options}
    run(path, jobs, clock=clock, backend=backend, num_ranks=2, **options)
    return path


def test_a_policy_that_decides_otherwise_is_found_out(tmp_path):
    jobs = [make_job("long", steps=9), make_job("short", steps=1), make_job("middle", steps=4)]
    (journaled,) = read_runs(journaled_run(tmp_path, *jobs))
    outcome = replay(journaled, jobs, policy=load_policy("srtf"))
    assert outcome.difference is not None
    assert outcome.difference.startswith("turn 1, at 0.000000 s: task 0 of long on [0] as [1, 1, 1]")
    assert "in the replay" in outcome.difference


def test_a_killed_run_is_replayed_as_far_as_it_came(tmp_path):
    jobs = [make_job("a"), make_job("b")]
    path = journaled_run(tmp_path, *jobs)
    lines = path.read_text().splitlines()
    cut = max(n for n, line in enumerate(lines[:20]) if "moment_s" in line)
    path.write_text("\n".join(lines[:cut]) + "\n" + lines[cut][:15])
    (journaled,) = read_runs(path)
    outcome = replay(journaled, jobs)
    assert outcome.difference is None
    assert outcome.num_turns == len(journaled.turns) - 1


def test_what_does_not_belong_together_is_refused(tmp_path):
    jobs = [make_job("a"), make_job("b")]
    path = journaled_run(tmp_path, *jobs, profile=PROFILE)
    (journaled,) = read_runs(path)
    with pytest.raises(InputError, match="not the 2 jobs that the run"):
        replay(journaled, jobs[::-1], profile=PROFILE)
    with pytest.raises(InputError, match="started from the profile with the hash"):
        replay(journaled, jobs)
    assert replay(journaled, jobs, profile=PROFILE).difference is None


def test_a_journal_of_an_earlier_gfgen_is_read_and_not_replayed(tmp_path):
    path = tmp_path / "journal.jsonl"
    header = {"gfgen_journal": 1, "policy": "fcfs", "ranks": 2, "guard_s": 0.0, "started_at": 1.0}
    header |= {
        "jobs": 0,
        "jobs_hash": journal_header([], RunStart(num_ranks=1, started_at=0), policy="")["jobs_hash"],
    }
    entries = [header, {"turn": 1, "event": "Wakeup", "time_s": 1.0}]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (journaled,) = read_runs(path)
    assert journaled.turns[0].events == [Wakeup(1.0)]
    with pytest.raises(InputError, match="of an earlier gfgen"):
        replay(journaled, [])


def test_who_looks_on_changes_no_decision(tmp_path):
    """The same run with and without an observer that asks for snapshots all the time."""
    journals = []
    for name, observer in (("one", Observer()), ("other", Watching())):
        (tmp_path / name).mkdir()
        jobs = [make_job(f"job-{i}", steps=3 + i % 3, deadline_s=1.0) for i in range(5)]
        path = journaled_run(tmp_path / name, *jobs, policy="edf", lookahead_s=0.05, observer=observer)
        journals.append(path.read_text())
    assert journals[0] == journals[1]
