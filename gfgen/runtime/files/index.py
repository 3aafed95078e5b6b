"""Where the manifest has the line of each job, and which lines of job files stand for which jobs.

The manifest stays the truth: what counts of a job is read there. An index that is missing, damaged, or of
another manifest is made again. It knows a line of a job file by a hash of all that decides what it means.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gfgen.job.packed import FEW
from gfgen.job.reader import KEY_BYTES, DoneJob
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.files.manifest import (
    MANIFEST_NAME,
    SIMULATED,
    ManifestLine,
    ended_at,
    entry_of,
    stands,
    warn_of,
)

logger = logging.getLogger(__name__)

INDEX_NAME = ".gfgen.index"
VERSION = 1
CATCH_UP = 1_000  # ends of jobs, in a run
_MARK_BYTES = 4_096
_TABLES = """
CREATE TABLE ended (id TEXT PRIMARY KEY, start INT, size INT, status TEXT, at REAL) WITHOUT ROWID;
CREATE TABLE lines (key BLOB PRIMARY KEY, id TEXT, file TEXT, spec_hash TEXT, output TEXT, format TEXT,
    has_own_id INT) WITHOUT ROWID;
CREATE TABLE covered (size INT, changed_at INT, mark BLOB);
"""


class ManifestIndex(Observer):
    """`is_kept` makes the folder's index; without one it is in memory."""

    def __init__(self, folder: Path, *, is_kept: bool = False) -> None:
        self._folder, self._num_ended, self._manifest = folder, 0, -1
        try:
            self._open(str(folder / INDEX_NAME) if is_kept or (folder / INDEX_NAME).exists() else ":memory:")
        except sqlite3.OperationalError as error:  # another process writes it, or this one may not
            logger.info("%s is not used: %s", folder / INDEX_NAME, error)
            self._open(":memory:")
        except sqlite3.DatabaseError as error:
            self._make_again(error)

    def _make_again(self, error: sqlite3.Error) -> None:
        path = self._folder / INDEX_NAME
        logger.info("%s is damaged, and made again: %s", path, error)
        path.unlink()
        self._open(str(path))

    def _found(self, query: str, value: object) -> Any:
        try:
            return self._db.execute(query, (value,)).fetchone()
        except sqlite3.DatabaseError as error:
            self._make_again(error)
            return self._db.execute(query, (value,)).fetchone()

    def _open(self, place: str) -> None:
        self._db = sqlite3.connect(place, check_same_thread=False)  # callers take turns
        self._db.execute("PRAGMA cache_size = -32768")  # the keys of a million lines come in no order
        if self._db.execute("PRAGMA user_version").fetchone() == (0,):
            self._db.executescript(f"BEGIN;{_TABLES}PRAGMA user_version = {VERSION};COMMIT;")
        elif self._db.execute("PRAGMA user_version").fetchone() != (VERSION,):
            raise sqlite3.DatabaseError("another version of gfgen made it")
        self.catch_up()

    def catch_up(self) -> None:
        """Cover the lines that were appended since; all of them, if the manifest is another one."""
        if self._manifest < 0:
            if not (path := self._folder / MANIFEST_NAME).exists():
                with self._db:
                    self._db.executescript("DELETE FROM ended; DELETE FROM covered;")
                return
            self._manifest = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stat, db = os.fstat(self._manifest), self._db
        covered = db.execute("SELECT size, changed_at, mark FROM covered").fetchone() or (0, 0, b"")
        if covered[:2] == (stat.st_size, stat.st_mtime_ns):
            return
        start = covered[0] if stat.st_size > covered[0] and self._mark(covered[0]) == covered[2] else 0
        with db, open(os.dup(self._manifest), "rb") as file:
            db.execute("DELETE FROM covered")
            if start == 0:
                db.execute("DELETE FROM ended")
            end = self._cover(file, start)
            db.execute("INSERT INTO covered VALUES (?, ?, ?)", (end, stat.st_mtime_ns, self._mark(end)))

    def _mark(self, end: int) -> bytes:
        """The last bytes of the covered part, which tell whether the manifest is still the same."""
        start = max(0, end - _MARK_BYTES)
        return os.pread(self._manifest, end - start, start)

    def _cover(self, file: BinaryIO, start: int) -> int:
        """Note all whole lines from there on; returns where they end."""
        file.seek(start)
        others = []
        while lines := list(itertools.islice(file, FEW)):
            rows = []
            for line in lines:
                if not line.endswith(b"\n"):  # torn, and the last one
                    break
                if (entry := entry_of(line)) is not None:
                    status = SIMULATED if entry.get(SIMULATED) else entry.get("status")
                    rows.append((entry["id"], start, len(line), status, ended_at(entry)))
                elif line.strip():
                    others.append(line)
                start += len(line)
            self._db.executemany("INSERT OR REPLACE INTO ended VALUES (?, ?, ?, ?, ?)", rows)
        warn_of(others, self._folder / MANIFEST_NAME)
        return start

    def get(self, job_id: str, default: Any = None) -> Any:
        """The latest line of a job in the manifest."""
        if self._manifest < 0:
            return default
        found = self._found("SELECT start, size FROM ended WHERE id = ?", job_id)
        return default if found is None else self._read(*found)

    def _read(self, start: int, size: int) -> ManifestLine:
        found: ManifestLine = json.loads(os.pread(self._manifest, size, start))
        return found

    def counts(self, *, since: float = -1.0) -> Counter[str]:
        """Jobs by status that have ended after this Unix time."""
        return Counter(
            dict(self._db.execute("SELECT status, COUNT(*) FROM ended WHERE at > ? GROUP BY 1", (since,)))
        )

    def ids_with(self, status: str) -> set[str]:
        return {job_id for (job_id,) in self._db.execute("SELECT id FROM ended WHERE status = ?", (status,))}

    def ends_at(self) -> dict[str, float]:
        """Unix times of the latest ends."""
        return dict(self._db.execute("SELECT id, at FROM ended"))

    def note(self, jobs: Mapping[str, JobInfo], specs: Sequence[JobSpec], keys: bytes | bytearray) -> None:
        """Let the lines of these `specs`, with their `ParsedJobs.keys`, stand for the jobs among them."""
        rows = []
        for number, spec in enumerate(specs):
            key, job = bytes(keys[KEY_BYTES * number : KEY_BYTES * (number + 1)]), jobs.get(spec.id)
            if job is not None and any(key):
                rows.append((key[:-1], spec.id, job.file, job.spec_hash, spec.output, spec.format, key[-1]))
        with contextlib.suppress(sqlite3.Error):  # such as a full disk: the next run checks these lines
            self._db.executemany("INSERT OR REPLACE INTO lines VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def keep(self) -> None:
        """Keep what was noted; other processes wait until then."""
        with contextlib.suppress(sqlite3.Error):
            self._db.commit()

    def done(self, key: bytes) -> DoneJob | None:
        """The job of a line with this hash, if it is done and its file is there."""
        if self._manifest < 0:
            return None
        found = self._found(
            "SELECT id, file, spec_hash, output, format, has_own_id, start, size"
            " FROM lines JOIN ended USING (id) WHERE key = ? AND status = 'done'",
            key,
        )
        if found is None:
            return None
        job_id, file, spec_hash, output, format_, has_own_id, *place = found
        entry = self._read(*place)
        if entry.get("id") != job_id or not stands(entry, self._folder, file=file, spec_hash=spec_hash):
            return None
        return DoneJob(job_id, output, format_, bool(has_own_id))

    def ended(self, outcome: JobOutcome) -> None:
        self._num_ended += 1
        if self._num_ended % CATCH_UP == 0:
            with contextlib.suppress(sqlite3.Error):  # the manifest has it, too
                self.catch_up()

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self.catch_up()
        self._db.close()
        if self._manifest >= 0:
            os.close(self._manifest)
