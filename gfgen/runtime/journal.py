"""The journal of a run: every event in the order in which it was applied, one JSON per line.

Its first line names the format's version, the policy and the jobs. A run's journal holds
all that its decisions depended on, so replaying it gives the same decisions.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from gfgen.errors import InputError
from gfgen.runtime import events
from gfgen.runtime.events import Event

VERSION = 1

_TYPES = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _TYPES.values()}


class Journal:
    """Appends events to a file; each line reaches the operating system at the end of a turn."""

    def __init__(self, path: Path, *, header: dict[str, Any]) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._write({"gfgen_journal": VERSION, **header})
        self.flush()

    def append(self, event: Event) -> None:
        kind = type(event)
        self._write({"event": kind.__name__, **{name: getattr(event, name) for name in _FIELDS[kind]}})

    def flush(self) -> None:
        """Hand what was appended to the operating system: it survives the death of this process."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(_ENCODER.encode(entry) + "\n")


class NoJournal:
    """Stands in where nothing is to be kept: benchmarks, simulations, tests."""

    def append(self, event: Event) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def first_arrivals(path: Path) -> dict[tuple[str, str], float]:
    """Unix time at which each job, by (id, spec hash), arrived first, in any run of this journal.

    Looks at headers and arrivals only, and passes over what it cannot read: a journal that
    does not serve costs nothing but the memory of when a job was first asked for.
    """
    arrivals: dict[tuple[str, str], float] = {}
    started_at = 0.0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return arrivals
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


def read_journal(path: Path) -> Iterator[dict[str, Any] | Event]:
    """The entries of a journal: a header (a dict) for each run that wrote to it, and events.

    A torn last line, left by a killed run, is passed over.
    Raises: InputError for a file that is no journal, or of another version.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            raise InputError(f"{path}: line {number} is not JSON: this is no journal of gfgen") from None
        if "event" in entry:
            kind = _TYPES[entry.pop("event")]
            yield kind(**entry)
        elif entry.get("gfgen_journal") == VERSION:
            yield entry
        else:
            raise InputError(f"{path}: line {number} is of another version of gfgen; move the file away")
