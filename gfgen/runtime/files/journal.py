"""The journal of a run: every event in the order in which it was applied, one JSON per line.

Its first line names the format's version, the policy with its options, ranks and guard, the jobs by
number and hash, the profile that predictions started from by its hash, and the jobs that an earlier
run had begun. Each event has the number of the turn of the loop that brought it: events of one turn
were applied together, before the policy was asked once. A turn ends with a line that tells its moment, and
what was dispatched if the policy was asked. With the job file that is all that a run's decisions
depended on, so that it can be replayed (tests/replay.py). Journals of earlier gfgen have no such lines.

Version 1 has an entry for each rank of a dispatch; this module reads it as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from gfgen.errors import InputError, OutputError
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobInfo
from gfgen.runtime.files.start import RunStart
from gfgen.system.linefile import LineFile

logger = logging.getLogger(__name__)

JOURNAL_NAME = "journal.jsonl"
"""In the output folder."""
VERSION = 2
_READABLE = (1, VERSION)
_MAX_HEADER_BYTES = 65536

_TYPES = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_OF_TASKS = (events.TaskDone.__name__, events.TaskFailed.__name__)
_encode = json.JSONEncoder(separators=(",", ":")).encode
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _TYPES.values()}


class Journal:
    """Appends events to a file, and writes them at the end of each turn.

    Opening and flushing raise OutputError on a full disk, or when the file was removed. Then the run must
    stop.
    """

    def __init__(self, path: Path, *, header: dict[str, Any]) -> None:
        _move_away_foreign(path)
        self._lines = LineFile(path)
        self._pending: list[str] = []
        self._turn = 1
        self._pending.append(_encode({"gfgen_journal": VERSION, **header}))
        self.flush()

    def append(self, event: Event) -> None:
        kind = type(event)
        entry = {"turn": self._turn, "event": kind.__name__}
        for name in _FIELDS[kind]:
            entry[name] = getattr(event, name)
        self._pending.append(_encode(entry))

    def end_turn(self, moment_s: float, dispatches: Sequence[Dispatch] | None) -> None:
        """Write the events of the turn, if any, and its dispatches, unless the policy was not asked.

        `moment_s` is the time of its decisions.
        """
        if dispatches is not None:
            made = [dispatch_summary(dispatch) for dispatch in dispatches]
            self._pending.append(_encode({"turn": self._turn, "moment_s": moment_s, "dispatches": made}))
        elif self._pending:
            self._pending.append(_encode({"turn": self._turn, "moment_s": moment_s}))
        if self._pending:
            self.flush()

    def flush(self) -> None:
        """Pass pending lines to the operating system, where they survive this process."""
        if self._pending:
            self._turn += 1
            content, self._pending = "\n".join([*self._pending, ""]), []
            self._lines.append(content.encode("utf-8", "replace"))

    def close(self) -> None:
        """Write the events of an interrupted turn, and close the file."""
        try:
            self.flush()
        except OutputError as error:
            logger.error("the end of the journal is lost: %s", error)
        self._lines.close()


class NoJournal:
    """For benchmarks, simulations and tests, which keep no journal."""

    def append(self, event: Event) -> None:
        pass

    def end_turn(self, moment_s: float, dispatches: Sequence[Dispatch] | None) -> None:
        pass

    def close(self) -> None:
        pass


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


def journal_header(
    jobs: Sequence[JobInfo],
    start: RunStart,
    *,
    policy: str,
    profile: str | None = None,
    job_file: str | None = None,
) -> dict[str, Any]:
    """What a run starts from; `jobs_hash` covers the ids and spec hashes in their order.

    `profile` is `Profile.hash`, `job_file` the job file or the watched folder (ownership.py).
    """
    return {
        "policy": policy,
        "jobs": len(jobs),
        "jobs_hash": jobs_hash(jobs),
        "profile": profile,
        "job_file": job_file,
        **start.header(),
    }


def jobs_hash(jobs: Sequence[JobInfo]) -> str:
    """Of ids and spec hashes, in their order."""
    lines = "".join(f"{info.job_id} {info.spec_hash}\n" for info in jobs)
    return hashlib.sha256(lines.encode()).hexdigest()


def first_arrivals(path: Path) -> dict[tuple[str, str], float]:
    """Unix time at which each job, by (id, spec hash), first arrived, in any run of this journal.

    Skips lines that it cannot read.
    """
    arrivals: dict[tuple[str, str], float] = {}
    started_at = 0.0
    if not path.is_file():
        return arrivals
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if "gfgen_journal" not in line and "JobArrived" not in line:
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if "gfgen_journal" in entry:
                    started_at = float(entry["started_at"])
                else:
                    key = (entry["job_id"], entry["spec_hash"])
                    arrivals.setdefault(key, started_at + entry["time_s"])
    return arrivals


def first_job_file(path: Path) -> str | None:
    """The job file that the first run in this journal names; None if there is none, or no journal."""
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith('{"gfgen_journal"'):
                continue
            with contextlib.suppress(ValueError):
                if isinstance(job_file := json.loads(line).get("job_file"), str):
                    return job_file
    return None


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
        if is_header and entry["gfgen_journal"] not in _READABLE:
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
    if not isinstance(entry, dict) or entry.get("event") not in _TYPES:
        return None
    try:
        turn, kind = int(entry.pop("turn")), _TYPES[entry.pop("event")]
        if kind is events.TaskDone:
            entry["times"] = tuple([events.RankTimes(*times) for times in entry["times"]])
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
            times = [events.RankTimes(*[part[name] for name in events.RankTimes._fields]) for part in parts]
            return entry["turn"], events.TaskDone(entry["time_s"], number, tuple(times))
        void, lost = (any(part[name] for part in failures) for name in ("void", "lost"))
        return entry["turn"], events.TaskFailed(entry["time_s"], number, failures[0]["reason"], void, lost)


def _end_of_turn(entry: object) -> tuple[int, Turn] | None:
    """Turn and end of a turn; None for anything else."""
    if not isinstance(entry, dict) or "moment_s" not in entry:
        return None
    try:
        return int(entry["turn"]), Turn((), float(entry["moment_s"]), entry.get("dispatches"))
    except (KeyError, TypeError, ValueError):
        return None


def dispatch_summary(dispatch: Dispatch) -> list[Any]:
    """[number, job, index, ranks, degrees]"""
    layout, task = dispatch.layout, dispatch.task
    return [dispatch.number, task.job_id, task.index, list(layout.ranks), list(layout.degrees)]


def _move_away_foreign(path: Path) -> None:
    """Rename a journal of another version, or a file that is no journal."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(_MAX_HEADER_BYTES))
        if header["gfgen_journal"] in _READABLE:
            return
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if path.is_file() and path.stat().st_size:
        aside = next(name for n in itertools.count(1) if not (name := path.with_suffix(f".{n}.old")).exists())
        logger.warning("%s is not a journal of this version of gfgen: renamed to %s", path, aside.name)
        path.rename(aside)
