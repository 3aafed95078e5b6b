"""Reads journals: the events of their runs by turn, and what was dispatched.

Version 1 has an entry for each rank of a dispatch; these are joined to one event.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from gfgen.errors import InputError
from gfgen.runtime.core import events
from gfgen.runtime.core.events import Event
from gfgen.runtime.files.journal import EVENT_TYPES, READABLE
from gfgen.runtime.ipc.messages import RankTimes

_OF_TASKS = (events.TaskDone.__name__, events.TaskFailed.__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the loop in which something happened."""

    events: Sequence[Event]
    moment_s: float | None = None
    """The time of its decisions; None in older journals."""
    dispatches: Sequence[Any] | None = None
    """[number, job, index, ranks, degrees] of each; None when the policy was not asked."""


@dataclass(frozen=True, slots=True)
class JournaledRun:
    """One run of a journal."""

    header: Mapping[str, Any]
    arrived_at: Mapping[tuple[str, str], float]
    """`first_arrivals` of the earlier runs."""
    turns: Sequence[Turn]


def read_journal(path: Path) -> Iterator[dict[str, Any] | Event]:
    """The entries of a journal: a header (a dict) for each run, and events.

    Skips the torn last line of a killed run.
    Raises: InputError for a file that is not a journal, or has another version.
    """
    for _, entry in _entries(path):
        if not isinstance(entry, Turn):
            yield entry


def read_runs(path: Path) -> Iterator[JournaledRun]:
    """The runs of a journal, oldest first. Raises: as `read_journal`."""
    arrivals: dict[tuple[str, str], float] = {}
    header: dict[str, Any] | None = None
    turns: list[Turn] = []
    for number, entries in itertools.groupby(_entries(path), key=itemgetter(0)):
        for entry in [entry for _, entry in entries] if number == 0 else ():
            if header is not None:
                yield JournaledRun(header, dict(arrivals), turns)
                _note_arrivals(arrivals, header, turns)
            assert isinstance(entry, dict)
            header, turns = entry, []
        if number:
            turns.append(_turn_of([entry for _, entry in entries]))
    if header is not None:
        yield JournaledRun(header, dict(arrivals), turns)


def _turn_of(entries: Sequence[object]) -> Turn:
    events = [entry for entry in entries if isinstance(entry, Event)]
    ends = [entry for entry in entries if isinstance(entry, Turn)]
    return replace(ends[-1], events=events) if ends else Turn(events)


def _note_arrivals(
    arrivals: dict[tuple[str, str], float], header: Mapping[str, Any], turns: Sequence[Turn]
) -> None:
    for event in itertools.chain.from_iterable(turn.events for turn in turns):
        if isinstance(event, events.JobArrived):
            arrivals.setdefault((event.job_id, event.spec_hash), header["started_at"] + event.time_s)


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any] | Event | Turn]]:
    """Each entry with the number of its turn; a header has the number 0."""
    torn: int | None = None
    tasks = _TasksByRank()
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        is_header = isinstance(entry, dict) and "gfgen_journal" in entry
        if not is_header and (number == 1 or torn is not None):
            raise InputError(f"{path}: line {torn or number} is not a line of a gfgen journal")
        torn = None
        if is_header and entry["gfgen_journal"] not in READABLE:
            raise InputError(f"{path}: line {number} is of another version of gfgen; move the file away")
        if is_header:
            yield 0, entry
            tasks = _TasksByRank()
        elif (end := _end_of_turn(entry)) is not None:
            tasks.note(end[1])
            yield end
        elif tasks.takes(entry):
            if (joined := tasks.join(entry)) is not None:
                yield joined
        elif (found := _event(entry)) is not None:
            yield found
        else:
            torn = number


def _event(entry: object) -> tuple[int, Event] | None:
    """Turn and event of a line; None if it is torn or invalid."""
    if not isinstance(entry, dict) or entry.get("event") not in EVENT_TYPES:
        return None
    try:
        turn, kind = int(entry.pop("turn")), EVENT_TYPES[entry.pop("event")]
        if kind is events.TaskDone:
            entry["times"] = tuple([RankTimes(*times) for times in entry["times"]])
        return turn, kind(**entry)
    except (KeyError, TypeError, ValueError):
        return None


class _TasksByRank:
    """Joins the entries that version 1 has for the ranks of a dispatch: where the last of them is."""

    def __init__(self) -> None:
        self._ranks: dict[int, Sequence[int]] = {}
        """By dispatch: of its layout, by slot."""
        self._ends: dict[int, dict[int, dict[str, Any]]] = {}
        """By dispatch and rank."""

    def note(self, turn: Turn) -> None:
        """What was dispatched at the end of this turn."""
        self._ranks |= {number: ranks for number, _, _, ranks, _ in turn.dispatches or ()}

    def takes(self, entry: object) -> bool:
        """Whether an entry tells how a task ended on one rank."""
        return isinstance(entry, dict) and entry.get("event") in _OF_TASKS and "rank" in entry

    def join(self, entry: dict[str, Any]) -> tuple[int, Event] | None:
        """Turn and event of a dispatch that has ended on its last rank."""
        number, ends = entry["dispatch"], self._ends.setdefault(entry["dispatch"], {})
        ends[entry["rank"]] = entry
        ranks = self._ranks.get(number, [entry["rank"]])
        if len(ends) < len(ranks):
            return None
        parts = [self._ends[number][rank] for rank in ranks]
        del self._ends[number]
        if not (failures := [part for part in parts if part["event"] == events.TaskFailed.__name__]):
            times = [_rank_times(part) for part in parts]
            return entry["turn"], events.TaskDone(entry["time_s"], number, tuple(times))
        void, lost = (any(part[name] for part in failures) for name in ("void", "lost"))
        return entry["turn"], events.TaskFailed(entry["time_s"], number, failures[0]["reason"], void, lost)


def _rank_times(part: dict[str, Any]) -> RankTimes:
    """How one rank ran its part, from an entry of version 1, which lacks fields that are newer."""
    return RankTimes(**{name: part[name] for name in RankTimes._fields if name in part})


def _end_of_turn(entry: object) -> tuple[int, Turn] | None:
    """Turn and end of a turn; None for anything else."""
    if not isinstance(entry, dict) or "moment_s" not in entry:
        return None
    try:
        return int(entry["turn"]), Turn((), float(entry["moment_s"]), entry.get("dispatches"))
    except (KeyError, TypeError, ValueError):
        return None
