"""Replays a run from its journal: the same events at the same moments lead to the same decisions.

The real control plane, state and policy run in virtual time over a backend that delivers the events of the
journal. A decision that differs from the run's shows a difference between two versions of gfgen, or that
decisions depend on something that the journal does not keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from journal_reader import JournaledRun, Turn

from gfgen.errors import GfgenError, InputError
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.backlog import Backlog
from gfgen.runtime.control.control import Control, Steering
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import AdmittedJob, arriving_after
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Clock, Event, JobArrived, JobCancelled
from gfgen.runtime.files.journal import NoJournal, dispatch_summary, jobs_hash
from gfgen.runtime.files.resume import ResumePoint, RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.simulation import SimulatedBackend, SimulatedTimes


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it."""

    num_turns: int
    """Replayed, up to the first difference."""
    num_dispatches: int
    difference: str | None = None
    """The first decision that is not the run's; None when all are."""


def replay(
    run: JournaledRun,
    jobs: Sequence[AdmittedJob],
    *,
    profile: Profile | None = None,
    policy: NamedPolicy | None = None,
) -> Replay:
    """Decide anew all that a run decided.

    `jobs` are those that it had to do at its start, in their order, then any that came to it
    later; `profile` is the one that its predictions started from; `policy` need only be given
    where the journal's text does not lead to it.

    Raises: InputError when journal, jobs and profile do not belong together.
    """
    header = run.header
    first, later = _split(header, jobs)
    _check_profile(header, profile)
    clock, journal = Clock(virtual=True), _DecisionCheck(run.turns)
    state = State(
        first,
        RunStart(
            num_ranks=header["ranks"],
            lookahead_s=header["guard_s"],
            started_at=header["started_at"],
            last_number=header["last_number"],
            arrived_at=run.arrived_at,
            resume=_resume_points(header),
            closes_s=header["closes_s"],
            resident=header.get("resident"),
            islands=header.get("islands"),
            near=header.get("near"),
            reads_s=header.get("reads_s", {}),
            first_use_s=header.get("first_use_s", 0.0),
            warm=[(model, shape, tuple(degrees)) for model, shape, degrees in header.get("warm", ())],
        ),
        clock=clock,
        costs=CostModel(profile),
    )
    backlog = Backlog(first, ahead=len(first))
    control = Control(
        backlog.take(),
        state=state,
        backend=_RecordedBackend(clock, run.turns, state=state, later=later),
        policy=policy or load_policy(header["policy"]),
        journal=journal,
        steering=Steering(intake=_NoIntake(), backlog=backlog),  # the journal ends the run, not the last job
    )
    try:
        control.run()
    except (_EndOfJournal, _Difference):
        pass
    except GfgenError:  # what ended the run ends its replay
        if journal.num_turns + 1 < len(run.turns):
            raise
    return Replay(journal.num_turns, journal.num_dispatches, journal.difference)


class _EndOfJournal(Exception):
    """Every turn has been replayed."""


class _Difference(Exception):
    """Something else was decided: from here on nothing is comparable."""


class _NoIntake:
    """Jobs come with the journal's events."""

    def take(self) -> Sequence[AdmittedJob]:
        return ()


class _RecordedBackend(SimulatedBackend):
    """Ranks on which everything takes as long, and ends in the same turn, as it did in the run."""

    def __init__(
        self, clock: Clock, turns: Sequence[Turn], *, state: State, later: Mapping[str, AdmittedJob]
    ) -> None:
        super().__init__(clock, num_ranks=0, times=SimulatedTimes(task_s=lambda _: 0.0))
        self._turns = iter(turns)
        self._state = state
        self._later = dict(later)

    def wait(self, until: float | None) -> list[Event]:
        """What the next turn of the run brought; what would fall due by itself is among it."""
        turn = next(self._turns, None)
        if turn is None or turn.moment_s is None:  # a killed run leaves its last turn without an end
            raise _EndOfJournal
        self._clock.advance(turn.moment_s)
        self._clock.due()
        for event in turn.events:
            if isinstance(event, JobArrived) and event.job_id in self._later:
                job = self._later.pop(event.job_id)
                self._state.jobs.add(arriving_after(job, event.time_s - job.spec.arrival_s))
            elif isinstance(event, JobCancelled):  # before it arrived: then it never will
                self._later.pop(event.job_id, None)
        return list(turn.events)

    def submit(self, dispatch: Dispatch) -> None:
        """Its end is in the journal."""

    def stop(self, dispatches: Sequence[Dispatch]) -> None:
        """That they ended by this is in the journal, too."""


class _DecisionCheck(NoJournal):
    """In place of a journal: holds what is decided beside what was decided."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns: Iterator[Turn] = iter(turns)
        self.num_turns = 0
        self.num_dispatches = 0
        self.difference: str | None = None

    def end_turn(self, moment_s: float, dispatches: Sequence[Dispatch] | None) -> None:
        turn = next(self._turns)
        made = None if dispatches is None else [dispatch_summary(dispatch) for dispatch in dispatches]
        if made != turn.dispatches:
            self.difference = (
                f"turn {self.num_turns + 1}, at {moment_s:.6f} s: {_words(turn.dispatches)} in the run, "
                f"{_words(made)} in the replay"
            )
            raise _Difference
        self.num_turns += 1
        self.num_dispatches += len(made or ())


def _words(dispatches: Sequence[Any] | None) -> str:
    if dispatches is None:
        return "the policy was not asked"
    if not dispatches:
        return "nothing was started"
    starts = [
        f"task {index} of {job_id} on {ranks} as {degrees}" for _, job_id, index, ranks, degrees in dispatches
    ]
    return ", ".join(starts) + f" (dispatch {dispatches[0][0]})"


def _split(
    header: Mapping[str, Any], jobs: Sequence[AdmittedJob]
) -> tuple[Sequence[AdmittedJob], Mapping[str, AdmittedJob]]:
    """The jobs of the start, and the others."""
    first = jobs[: header["jobs"]]
    if jobs_hash([job.info for job in first]) != header["jobs_hash"]:
        raise InputError(f"these are not the {header['jobs']} jobs that the run of the journal had to do")
    return first, {job.job_id: job for job in jobs[header["jobs"] :]}


def _check_profile(header: Mapping[str, Any], profile: Profile | None) -> None:
    if "last_number" not in header:
        raise InputError("the journal is of an earlier gfgen, and does not tell enough to be replayed")
    given = None if profile is None else profile.hash
    if given != header["profile"]:
        was = "no profile" if header["profile"] is None else f"the profile with the hash {header['profile']}"
        raise InputError(f"the predictions of the run of the journal started from {was}, not from this one")


def _resume_points(header: Mapping[str, Any]) -> dict[str, ResumePoint]:
    return {
        job_id: ResumePoint(next_index, producer, last_number, Path())
        for job_id, (next_index, producer, last_number) in header["resumed"].items()
    }
