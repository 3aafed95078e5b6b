"""The journal of a run: every event in the order in which it was applied, one JSON per line.

Its first line names the format's version, the policy and the jobs. A run's journal holds
all that its decisions depended on, so replaying it gives the same decisions.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from gfgen.errors import InputError, OutputError
from gfgen.runtime import events
from gfgen.runtime.events import Event
from gfgen.runtime.linefile import LineFile

logger = logging.getLogger(__name__)

VERSION = 1
_MAX_HEADER_BYTES = 65536

_TYPES = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _TYPES.values()}


class Journal:
    """Appends events to a file; what a turn of the loop brought is written at its end, as a whole.

    Raises, when it opens and at every flush: OutputError on a full disk, or when the file is
    gone; the run has to stop then.
    """

    def __init__(self, path: Path, *, header: dict[str, Any]) -> None:
        _move_away_foreign(path)
        self._lines = LineFile(path)
        self._pending: list[str] = []
        self._write({"gfgen_journal": VERSION, **header})
        self.flush()

    def append(self, event: Event) -> None:
        kind = type(event)
        self._write({"event": kind.__name__, **{name: getattr(event, name) for name in _FIELDS[kind]}})

    def flush(self) -> None:
        """Hand what was appended to the operating system: it survives the death of this process."""
        if self._pending:
            content, self._pending = "\n".join([*self._pending, ""]), []
            self._lines.append(content.encode("utf-8", "replace"))

    def close(self) -> None:
        """Keep also what a turn that was broken off had brought."""
        try:
            self.flush()
        except OutputError as error:
            logger.error("the end of the journal is lost: %s", error)
        self._lines.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._pending.append(_ENCODER.encode(entry))


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
    for line in _lines_with(path, b"gfgen_journal", b"JobArrived"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if "gfgen_journal" in entry:
                started_at = float(entry["started_at"])
            else:
                key = (entry["job_id"], entry["spec_hash"])
                arrivals.setdefault(key, started_at + entry["time_s"])
    return arrivals


def _lines_with(path: Path, *words: bytes) -> Iterator[bytes]:
    """Lines of a file that have one of the words; one line in memory, however long the file is."""
    if not path.is_file():  # a device might never end
        return
    try:
        with path.open("rb") as file:
            yield from (line for line in file if any(word in line for word in words))
    except OSError as error:
        logger.warning("cannot read %s (%s): when its jobs arrived first is not known", path, error.strerror)


def read_journal(path: Path) -> Iterator[dict[str, Any] | Event]:
    """The entries of a journal: a header (a dict) for each run that wrote to it, and events.

    The last line of a run may be torn, since a run can be killed: it is passed over.
    Raises: InputError for a file that is no journal, or of another version.
    """
    torn: int | None = None
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        is_header = isinstance(entry, dict) and "gfgen_journal" in entry
        if not is_header and (number == 1 or torn is not None):
            raise InputError(f"{path}: line {torn or number} is not of a journal of gfgen")
        torn = None
        if is_header and entry["gfgen_journal"] != VERSION:
            raise InputError(f"{path}: line {number} is of another version of gfgen; move the file away")
        if is_header:
            yield entry
        elif (event := _event(entry)) is not None:
            yield event
        else:
            torn = number


def _event(entry: object) -> Event | None:
    """The event of a line; None for one that is torn or spoilt."""
    if not isinstance(entry, dict) or entry.get("event") not in _TYPES:
        return None
    try:
        return _TYPES[entry.pop("event")](**entry)
    except TypeError:
        return None


def _move_away_foreign(path: Path) -> None:
    """Let a journal of another version, or what is none, lie beside the one that begins."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(_MAX_HEADER_BYTES))
        if header["gfgen_journal"] == VERSION:
            return
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if path.is_file() and path.stat().st_size:
        aside = next(name for n in itertools.count(1) if not (name := path.with_suffix(f".{n}.old")).exists())
        logger.warning("%s is of another version of gfgen, or no journal: it is now %s", path, aside.name)
        path.rename(aside)
