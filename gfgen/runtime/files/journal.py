"""The journal of a run: every event in the order in which it was applied, one JSON per line.

Its first line names format, policy, ranks, guard, jobs, the profile by its hash, and jobs that an earlier run
had begun. Events of one turn have its number, and were applied before the policy was asked once; a line with
its moment and dispatches ends the turn. With the job file that is all that decisions depended on, so it can
be replayed. `tests/journal_reader.py` reads earlier versions, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gfgen.errors import OutputError
from gfgen.graph import Stage
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobInfo
from gfgen.runtime.files.index import ManifestIndex
from gfgen.runtime.files.manifest import MANIFEST_NAME, SIMULATED, ManifestLine, ended_at, read_manifest
from gfgen.runtime.files.resume import RunStart
from gfgen.system.linefile import LineFile

logger = logging.getLogger(__name__)

JOURNAL_NAME = "journal.jsonl"
VERSION = 2
READABLE = (1, VERSION)  # versions that one file may contain
_MAX_HEADER_BYTES, _BLOCK_BYTES = 65536, 2**24
_HEADER = b'{"gfgen_journal"'

EVENT_TYPES = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in EVENT_TYPES.values()}
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """Appends events to a file at the end of each turn. Raises: OutputError; then the run must stop."""

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
        for name in ("files", "made", "seed"):  # only jobs with several files, of unknown size or random seed
            if name in entry and not entry[name]:
                del entry[name]
        self._pending.append(_encode(entry))

    def end_turn(self, moment_s: float, dispatches: Sequence[Dispatch] | None) -> None:
        """Write the turn's events, and its dispatches, decided at `moment_s`, if the policy was asked."""
        if dispatches is None and not self._pending:
            return
        made = ""
        if dispatches is not None:
            made = f',"dispatches":{_encode([dispatch_summary(each) for each in dispatches])}'
        self._pending.append(f'{{"turn":{self._turn},"moment_s":{moment_s}{made}}}')
        self.flush()

    def flush(self) -> None:
        """Pass pending lines to the operating system, where they survive this process."""
        if self._pending:
            self._turn += 1
            content, self._pending = "\n".join([*self._pending, ""]), []
            self._lines.append(content.encode("ascii"))

    def close(self) -> None:
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


def journal_header(
    jobs: Sequence[JobInfo],
    start: RunStart,
    *,
    policy: str,
    profile: str | None = None,
    job_file: str | None = None,
    claimed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a run starts from: `jobs_hash` of ids and spec hashes, `claimed` for the names of later runs."""
    return {
        "policy": policy,
        "jobs": len(jobs),
        "jobs_hash": jobs_hash(jobs),
        "profile": profile,
        "job_file": job_file,
        **(claimed or {}),
        **start.header(),
    }


def jobs_hash(jobs: Sequence[JobInfo]) -> str:
    """Of ids and spec hashes, in their order."""
    lines = "".join(f"{info.job_id} {info.spec_hash}\n" for info in jobs)
    return hashlib.sha256(lines.encode()).hexdigest()


def first_arrivals(path: Path, *, forced_from: int | None = None) -> dict[tuple[str, str], float]:
    """Unix time of the first arrival of each (id, spec hash), in all runs or those since `forced_from`."""
    found: dict[tuple[str, str], float] = {}
    for started_at, entry in arrivals(path, forced_from=forced_from):
        found.setdefault((entry["job_id"], entry["spec_hash"]), started_at + entry["time_s"])
    return found


def arrivals(
    path: Path, *, forced_from: int | None = None, is_last: bool = False
) -> Iterator[tuple[float, dict[str, Any]]]:
    """The arrivals in a journal, or in its last run, each with the Unix time at which its run started."""
    started_at, is_asked = 0.0, True
    for entry in _entries(path, b"gfgen_journal", b"JobArrived", is_last=is_last):
        if "gfgen_journal" in entry:
            found = entry.get("started_at")
            started_at = float(found) if isinstance(found, (int, float)) else started_at
            is_asked = forced_from in (None, entry.get("forced_from"))
        elif is_asked and entry.keys() >= {"job_id", "spec_hash", "time_s"}:
            yield started_at, entry


def left_ids(
    path: Path, lines: Mapping[str, ManifestLine] | ManifestIndex, *, is_last: bool = False
) -> set[str]:
    """Jobs of a journal's runs, or of the last one, that have not ended, and those that a filter wants again;
    `lines` are the manifest's."""
    if isinstance(lines, ManifestIndex):
        again, ends_at = lines.ids_with("again"), lines.ends_at()
    else:
        again = {job_id for job_id, line in lines.items() if line.get("status") == "again"}
        ends_at = {job_id: ended_at(line) for job_id, line in lines.items()}
    arrived = {each["job_id"]: at for at, each in arrivals(path, is_last=is_last)}
    return again | {job_id for job_id, at in arrived.items() if ends_at.get(job_id, 0.0) <= at - 1}


def num_waiting(path: Path, lines: Mapping[str, ManifestLine]) -> int:
    """Jobs of a journal's last run that have neither arrived nor ended."""
    last = [{}, *headers(path)][-1]
    begun_at = float(last.get("started_at") or 0.0)
    known = {each["job_id"] for at, each in arrivals(path) if at == begun_at}
    known |= {job_id for job_id, line in lines.items() if ended_at(line) > begun_at - 1}
    return max(0, int(last.get("jobs") or 0) - len(known))


def to_make_again(folder: Path) -> list[str]:
    """Finished jobs that the last run in a folder, if it has --force, was to make again and has not."""
    path, manifest = folder / JOURNAL_NAME, folder / MANIFEST_NAME
    if (start := [{}, *headers(path)][-1].get("forced_from")) is None:
        return []
    lines, made = read_manifest(manifest), read_manifest(manifest, start=start)
    left = left_ids(path, lines, is_last=True)
    others = [job_id for job_id, line in lines.items() if not (job_id in made or line.get(SIMULATED))]
    return sorted(others, key=lambda job_id: job_id not in left)[: len(left) + num_waiting(path, lines)]


def first_job_file(path: Path) -> str | None:
    """The job file that the first run in this journal names; None if there is none, or no journal."""
    return next((header["job_file"] for header in headers(path) if header.get("job_file")), None)


def headers(path: Path) -> Iterator[dict[str, Any]]:
    """The headers of the runs in a journal, oldest first."""
    return _entries(path, _HEADER)


def _entries(path: Path, *marks: bytes, is_last: bool = False) -> Iterator[dict[str, Any]]:
    """The lines with one of these texts, or those of the last run, except those that cannot be read."""
    start = num_read = 0
    for block in _blocks(path) if is_last else ():
        start = num_read + place if (place := block.rfind(_HEADER)) >= 0 else start
        num_read += len(block)
    for block in _blocks(path, start=start):
        places = {mark: block.find(mark) for mark in marks}
        while found := [place for place in places.values() if place >= 0]:
            begin = block.rfind(b"\n", 0, min(found)) + 1
            end = block.find(b"\n", begin) + 1 or len(block)
            places |= {mark: block.find(mark, end) for mark, place in places.items() if 0 <= place < end}
            with contextlib.suppress(ValueError):
                if isinstance(entry := json.loads(block[begin:end]), dict):
                    yield entry


def _blocks(path: Path, *, start: int = 0) -> Iterator[bytes]:
    """Whole lines of a file from a byte on; none if it cannot be read, or may have no end, as a device.

    It is not mapped: a mapped file that another process truncates ends this process (SIGBUS).
    """
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                file.seek(start)
                while block := file.read(_BLOCK_BYTES) + file.readline():
                    yield block


def dispatch_summary(dispatch: Dispatch) -> list[Any]:
    """[number, job, index, ranks, degrees], and the stage of a step that runs no transformer."""
    layout, task = dispatch.layout, dispatch.task
    choice = [task.stage.value] if task.stage is Stage.APPROXIMATE else []
    return [dispatch.number, task.job_id, task.index, list(layout.ranks), list(layout.degrees), *choice]


def _move_away_foreign(path: Path) -> None:
    """Rename a journal of another version, or a file that is no journal."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(_MAX_HEADER_BYTES))
        if header["gfgen_journal"] in READABLE:
            return
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if path.is_file() and path.stat().st_size:
        aside = next(name for n in itertools.count(1) if not (name := path.with_suffix(f".{n}.old")).exists())
        logger.warning("%s is not a journal of this version of gfgen: renamed to %s", path, aside.name)
        path.rename(aside)
