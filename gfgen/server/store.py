"""Accepted jobs, batches and request keys in SQLite, in write-ahead mode.

A job in the store was accepted. Its status is `open` until it ends; after that a trigger forbids changes.
One thread does all writes: it puts everything that is queued into one transaction and replies once that is
on the disk, so 200 concurrent clients wait for one sync instead of 200. Callers read directly.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import queue
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gfgen.errors import OutputError
from gfgen.system.linefile import has_its_name
from gfgen.system.wording import size_in_words

logger = logging.getLogger(__name__)

STORE_NAME = "jobs.sqlite3"
VERSION = 2
DAY_S = 86400.0
BUSY_S = 10.0
"""SQLite lock timeout: a front that was killed may still hold the file for a moment."""
KEPT_REQUESTS_S = DAY_S
ROOM_BYTES = 2**20
"""Without this much a server counts as full: the next request may need it."""
MAX_GROUP = 256
SHOWN = ("peak_memory_mb", "steps_reused")
"""Keys of a manifest entry that responses have too."""
_READ = ("timings", "shape", *SHOWN)
Ended = Literal["completed", "failed", "cancelled"]
ENDED: tuple[Ended, ...] = get_args(Ended)
T = TypeVar("T")
_Queued = tuple[Callable[[sqlite3.Connection], Any], Future[Any]]

_SCHEMA = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT 'open',
    batch_id TEXT,
    facts TEXT NOT NULL,
    spec TEXT NOT NULL,
    created_at REAL NOT NULL,
    started_at REAL,
    completed_at REAL,
    size_bytes INTEGER,
    met_deadline INTEGER,
    step INTEGER NOT NULL DEFAULT 0,
    error_code TEXT,
    error_message TEXT,
    manifest TEXT,
    owner TEXT
);
CREATE INDEX jobs_open ON jobs (seq) WHERE status = 'open';
CREATE INDEX jobs_of_batch ON jobs (batch_id, seq) WHERE batch_id IS NOT NULL;
CREATE INDEX jobs_by_end ON jobs (completed_at) WHERE status != 'open';
CREATE TRIGGER ended_once BEFORE UPDATE OF status ON jobs WHEN OLD.status != 'open'
    BEGIN SELECT RAISE(ABORT, 'the job has ended'); END;
CREATE TABLE batches (
    id TEXT PRIMARY KEY,
    created_at REAL NOT NULL,
    completed_at REAL,
    is_cancelled INTEGER NOT NULL DEFAULT 0,
    total INTEGER NOT NULL,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    missed INTEGER NOT NULL DEFAULT 0,
    owner TEXT
);
CREATE TABLE requests (
    key TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    ids TEXT NOT NULL,
    created_at REAL NOT NULL
);
CREATE INDEX requests_by_age ON requests (created_at);
"""
_FAVOURITE = "COALESCE(json_extract(facts, '$.favourite'), 0)"
_USAGE = """
CREATE TABLE IF NOT EXISTS usage (owner TEXT, day INTEGER, rank_s REAL, PRIMARY KEY (owner, day))
"""
"""Seconds of ranks of ended jobs by key and day (UTC), also of jobs that are removed."""
_OWNERS = "ALTER TABLE jobs ADD COLUMN owner TEXT; ALTER TABLE batches ADD COLUMN owner TEXT;"


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The part of a job that is fixed when it is accepted."""

    id: str
    kind: Literal["video", "image"]
    model: str
    prompt: str
    size: str
    steps: int
    seed: int
    created_at: float
    arrives_at: float
    file: str
    """Name of its output, chosen by the server."""
    num_tasks: int
    frames: int | None = None
    fps: float | None = None
    priority: int = 0
    tag: str | None = None
    batch_id: str | None = None
    custom_id: str | None = None
    deadline_at: float | None = None
    input_file: str | None = None
    """Name of its input picture, which the server keeps until the job ends."""
    webhook: str | None = None
    """Where it is sent at its end, if its request said so."""
    owner: str | None = None
    """Name of the key that it came with; None for the admin's."""
    warnings: Sequence[str] = ()
    """What in it does not act as written."""
    favourite: bool = False
    num_refined: int = 0
    """The last of its steps that are of a second pass."""


NewJob = tuple[JobFacts, Mapping[str, Any]]
"""A job with the fields of the job file, without the model's defaults."""


@dataclass(frozen=True, slots=True)
class Ending:
    id: str
    status: Ended
    completed_at: float
    started_at: float | None = None
    size_bytes: int | None = None
    met_deadline: bool | None = None
    step: int = 0
    error_code: str | None = None
    error_message: str | None = None
    manifest: Mapping[str, Any] | None = None
    """Its entry; of a job of the store only what responses need."""


@dataclass(frozen=True, slots=True)
class StoredJob:
    facts: JobFacts
    ending: Ending | None


@dataclass(frozen=True, slots=True)
class BatchRow:
    id: str
    created_at: float
    completed_at: float | None
    is_cancelled: bool
    total: int
    completed: int
    failed: int
    cancelled: int
    missed: int
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class RequestKey:
    key: str
    fingerprint: str


class KeyTakenError(Exception):
    def __init__(self, ids: Sequence[str], *, is_same: bool) -> None:
        super().__init__(", ".join(ids))
        self.ids = tuple(ids)
        self.is_same = is_same


class RemovedError(OutputError):
    """Another program removed the store: what is written would be lost."""


class Store:
    """The jobs of one output folder. Every write raises OutputError if the disk is full or fails."""

    def __init__(self, path: Path, *, began_at: float) -> None:
        self._path = path
        self._reader = _connect(path)
        self._writer, self._file = _connect(path), os.stat(path)
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._logged_error: str | None = None
        """The last reported reason why writes fail."""
        self.epoch = int(1000 * began_at)
        """A number of this process: event ids begin with it."""
        self._thread = threading.Thread(target=self._write, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._writer.close()
        self._reader.close()

    async def accept(
        self,
        jobs: Sequence[NewJob],
        *,
        batch_id: str | None = None,
        key: RequestKey | None = None,
        owner: str | None = None,
        now: float,
    ) -> None:
        """Store all of these jobs or none; returns when they are on the disk.

        Raises: KeyTakenError if an earlier request with this key was accepted.
        """

        def work(db: sqlite3.Connection) -> None:
            if key is not None:
                _take_key(db, key, [batch_id] if batch_id else [facts.id for facts, _ in jobs], now)
            if batch_id is not None:
                row = (batch_id, now, len(jobs), owner)
                db.execute("INSERT INTO batches (id, created_at, total, owner) VALUES (?, ?, ?, ?)", row)
            rows = [
                (f.id, f.kind, f.batch_id, json.dumps(_values(f)), json.dumps(spec), f.created_at, f.owner)
                for f, spec in jobs
            ]
            names = "id, kind, batch_id, facts, spec, created_at, owner"
            db.executemany(f"INSERT INTO jobs ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

        await self._do(work)

    async def end_all(self, endings: Sequence[Ending], *, cancelled_batch: str | None = None) -> list[bool]:
        """Record how jobs ended; False for a job that had ended before or does not exist.

        A job that had ended in the same way without a manifest entry gets this one.
        """

        def work(db: sqlite3.Connection) -> list[bool]:
            db.execute("UPDATE batches SET is_cancelled = 1 WHERE id = ?", (cancelled_batch,))
            return [_end(db, ending) for ending in endings]

        return await self._do(work)

    async def change(self, job_id: str, *, is_open: bool, **facts: Any) -> bool:
        """Set facts of an open job, which is run with them, or of one that has ended; False: it is not so."""
        changed = "facts = json_patch(facts, :new)" + (", spec = json_patch(spec, :new)" if is_open else "")
        sql = f"UPDATE jobs SET {changed} WHERE id = :id AND status {'=' if is_open else '!='} 'open'"
        return await self._do(_statement(sql, {"new": json.dumps(facts), "id": job_id})) > 0

    async def remove(self, job_ids: Iterable[str]) -> None:
        ids = [(job_id,) for job_id in job_ids]

        def work(db: sqlite3.Connection) -> None:
            db.executemany("DELETE FROM jobs WHERE id = ? AND status != 'open'", ids)
            left = "SELECT batch_id FROM jobs WHERE batch_id NOT NULL"
            db.execute(f"DELETE FROM batches WHERE id NOT IN ({left})")

        await self._do(work)

    async def forget_requests(self, *, now: float) -> None:
        """Delete expired request keys; writes nothing if there are none."""
        too_old, values = "FROM requests WHERE created_at < ?", (now - KEPT_REQUESTS_S,)
        if self._reader.execute(f"SELECT 1 {too_old} LIMIT 1", values).fetchone() is not None:
            await self._do(_statement(f"DELETE {too_old}", values))

    async def check_writable(self) -> None:
        """Raises: OutputError if a write fails, or if there is no room for `ROOM_BYTES`."""
        await self._do(_statement(f"PRAGMA user_version = {VERSION}", ()))
        await asyncio.to_thread(_check_room, self._path.parent)

    def open_jobs(self) -> list[tuple[JobFacts, dict[str, Any]]]:
        rows = self._reader.execute("SELECT facts, spec FROM jobs WHERE status = 'open' ORDER BY seq")
        return [(_facts(facts), json.loads(spec)) for facts, spec in rows]

    def spec(self, job_id: str) -> dict[str, Any]:
        """The fields of the job file of a job that is there."""
        (spec,) = self._reader.execute("SELECT spec FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return json.loads(spec)  # type: ignore[no-any-return]

    def job(self, job_id: str) -> StoredJob | None:
        return next(iter(_jobs(self._reader, "WHERE id = ?", (job_id,))), None)

    def jobs(
        self,
        *,
        limit: int,
        is_ascending: bool = False,
        after: str | None = None,
        kind: str | None = None,
        batch_id: str | None = None,
        has_ended: bool | None = None,
        owner: str | None = None,
        is_favourite: bool | None = None,
        is_by_end: bool = False,
    ) -> list[StoredJob]:
        tests: list[str] = ["1"]
        values: list[Any] = []
        if after is not None:
            tests.append(f"seq {'>' if is_ascending else '<'} (SELECT seq FROM jobs WHERE id = ?)")
            values.append(after)
        named = {"kind": kind, "batch_id": batch_id, "owner": owner, _FAVOURITE: is_favourite}
        for name, value in named.items():
            if value is not None:
                tests.append(f"{name} = ?")
                values.append(value)
        if has_ended is not None:
            tests.append("status != 'open'" if has_ended else "status = 'open'")
        order = "completed_at" if is_by_end else "seq"
        order = f"ORDER BY {order} {'' if is_ascending else 'DESC'} LIMIT {int(limit)}"
        return _jobs(self._reader, f"WHERE {' AND '.join(tests)} {order}", values)

    def manifest(self, batch_id: str) -> list[tuple[StoredJob, dict[str, Any] | None]]:
        which = "WHERE batch_id = ? AND status != 'open' ORDER BY seq"
        rows = self._reader.execute(f"SELECT {_COLUMNS}, manifest FROM jobs {which}", (batch_id,))
        return [(_kept(columns), None if entry is None else json.loads(entry)) for *columns, entry in rows]

    def batch(self, batch_id: str) -> BatchRow | None:
        sql = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ?"
        return next((BatchRow(*row) for row in self._reader.execute(sql, (batch_id,))), None)

    def batches(self, *, limit: int, after: str | None, owner: str | None = None) -> list[BatchRow]:
        sql = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE (:owner IS NULL OR owner = :owner)"
        if after is not None:
            sql += " AND (created_at, id) < (SELECT created_at, id FROM batches WHERE id = :after)"
        values = {"after": after, "limit": limit, "owner": owner}
        rows = self._reader.execute(f"{sql} ORDER BY created_at DESC, id DESC LIMIT :limit", values)
        return [BatchRow(*row) for row in rows]

    def request(self, key: RequestKey, *, now: float) -> KeyTakenError | None:
        """What an earlier request with this key created, unless the key has expired."""
        return _request(self._reader, key, now)

    def outdated(self, *, before: float, keep_bytes: int) -> list[StoredJob]:
        """Jobs that ended before `before`, and those beyond the newest `keep_bytes`; no favourites."""
        total = "SUM(COALESCE(size_bytes, 0)) OVER (ORDER BY completed_at DESC, seq DESC) AS total"
        ended = f"(SELECT *, {total} FROM jobs WHERE status != 'open' AND NOT {_FAVOURITE})"
        return _jobs(self._reader, "WHERE completed_at < ? OR total > ?", (before, keep_bytes), table=ended)

    @property
    def first_at(self) -> float:
        """Unix time of its first job; infinite without one."""
        first_at = self._reader.execute("SELECT MIN(created_at) FROM jobs").fetchone()[0]
        return math.inf if first_at is None else float(first_at)

    def known(self, job_ids: Iterable[str], *statuses: str) -> set[str]:
        """The subset of these jobs that have one of these statuses."""
        sql = "SELECT id FROM jobs WHERE id IN (SELECT value FROM json_each(?))"
        sql += f" AND status IN ({', '.join('?' * len(statuses))})"
        return {row[0] for row in self._reader.execute(sql, (json.dumps(list(job_ids)), *statuses))}

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        future: Future[T] = Future()
        self._queue.put((work, future))
        return await asyncio.wrap_future(future)

    def _write(self) -> None:
        while True:
            group = [self._queue.get()]
            while len(group) < MAX_GROUP and not self._queue.empty():
                group.append(self._queue.get())
            if queued := [each for each in group if each is not None]:
                self._commit(queued)
            if None in group:
                return

    def _commit(self, queued: Sequence[_Queued]) -> None:
        """Run these in one transaction; one that fails rolls back only its own writes."""
        db, done = self._writer, []
        try:
            if not has_its_name(self._path, self._file):
                raise RemovedError(f"{self._path.name} was removed or replaced; start the server again")
            db.execute("BEGIN IMMEDIATE")
            for work, future in queued:
                done.append((future, _attempt(db, work)))
            db.execute("COMMIT")
            self._logged_error = None
        except Exception as error:  # most likely a full disk: nothing of the group was written
            if db.in_transaction:
                db.execute("ROLLBACK")
            if str(error) != self._logged_error:  # clients retry, and the log may be on the same disk
                logger.error("cannot write %s: %s; requests are refused meanwhile", self._path, error)
            self._logged_error = str(error)
            reason = OutputError(f"cannot write {self._path.name} ({error}); free some space and retry")
            done = [(future, error if isinstance(error, OutputError) else reason) for _, future in queued]
        for future, result in done:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def used_rank_s(store: Store, owner: str | None, *, day: int) -> float:
    """Seconds of ranks of the jobs of a key that have ended on a day since 1970."""
    sql = "SELECT rank_s FROM usage WHERE owner = ? AND day = ?"
    return float((store._reader.execute(sql, (owner, day)).fetchone() or (0.0,))[0])


def _check_room(folder: Path) -> None:
    """SQLite writes a small change over an older one, and needs no room for it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        less = f"less than {size_in_words(ROOM_BYTES)} can be written ({error.strerror}); free some space"
        raise OutputError(f"output folder: {less}") from None


def _statement(sql: str, values: Any) -> Callable[[sqlite3.Connection], int]:
    """Runs one statement; returns the number of changed rows."""
    return lambda db: db.execute(sql, values).rowcount


def _attempt(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], Any]) -> Any:
    """The result of the work, or the exception that concerns this work only."""
    db.execute("SAVEPOINT work")
    try:
        result = work(db)
    except (KeyTakenError, sqlite3.IntegrityError) as error:
        db.execute("ROLLBACK TO work")
        result = error
    db.execute("RELEASE work")
    return result


def _connect(path: Path) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version == 1:
            db.executescript(f"BEGIN IMMEDIATE; {_OWNERS} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise OutputError(
                f"{path} belongs to another version of gfgen; move it away or choose another --output"
            )
        db.execute(_USAGE)
        return db
    except sqlite3.Error as error:
        raise OutputError(f"cannot open {path}: {error}; move it away or choose another --output") from None


def _take_key(db: sqlite3.Connection, key: RequestKey, ids: Sequence[str], now: float) -> None:
    if taken := _request(db, key, now):
        raise taken
    names, row = "key, fingerprint, ids, created_at", (key.key, key.fingerprint, json.dumps(list(ids)), now)
    db.execute(f"INSERT OR REPLACE INTO requests ({names}) VALUES (?, ?, ?, ?)", row)


def _request(db: sqlite3.Connection, key: RequestKey, now: float) -> KeyTakenError | None:
    sql = "SELECT fingerprint, ids FROM requests WHERE key = ? AND created_at >= ?"
    row = db.execute(sql, (key.key, now - KEPT_REQUESTS_S)).fetchone()
    return None if row is None else KeyTakenError(json.loads(row[1]), is_same=row[0] == key.fingerprint)


def _end(db: sqlite3.Connection, ending: Ending) -> bool:
    values = _values(ending)
    values["manifest"] = None if ending.manifest is None else json.dumps(ending.manifest)
    names = [name for name in values if name != "id"]
    sql = f"UPDATE jobs SET {', '.join(f'{name} = :{name}' for name in names)}"
    row = db.execute(f"{sql} WHERE id = :id AND status = 'open' RETURNING batch_id", values).fetchone()
    is_first = is_new = row is not None
    if not is_first and ending.manifest is not None:  # it ended without the run's details, as a cancel does
        sql = "UPDATE jobs SET manifest = :manifest, started_at = COALESCE(:started_at, started_at) "
        sql += "WHERE id = :id AND status = :status AND manifest IS NULL"
        is_new = db.execute(sql, values).rowcount > 0
    if is_new:
        timings = (ending.manifest or {}).get("timings") or {}
        use = (int(ending.completed_at // DAY_S), timings.get("rank_s") or 0.0, ending.id)
        sql = "INSERT INTO usage SELECT owner, ?, ? FROM jobs WHERE id = ? AND owner IS NOT NULL "
        db.execute(f"{sql} ON CONFLICT (owner, day) DO UPDATE SET rank_s = rank_s + excluded.rank_s", use)
    if is_first and row[0] is not None:
        sql = f"UPDATE batches SET {ending.status} = {ending.status} + 1, missed = missed + ? WHERE id = ?"
        db.execute(sql, (ending.met_deadline is False, row[0]))
        sql = "UPDATE batches SET completed_at = ? WHERE id = ? AND completed + failed + cancelled = total"
        db.execute(sql, (ending.completed_at, row[0]))
    return is_first


_PATHS = ", ".join(f"'$.{name}'" for name in _READ)
_COLUMNS = (
    "facts, status, completed_at, started_at, size_bytes, met_deadline, step, error_code, error_message, "
    f"json_extract(manifest, {_PATHS})"
)
_BATCH_COLUMNS = ", ".join(each.name for each in fields(BatchRow))


def _jobs(db: sqlite3.Connection, which: str, values: Any, *, table: str = "jobs") -> list[StoredJob]:
    return [_kept(row) for row in db.execute(f"SELECT {_COLUMNS} FROM {table} {which}", values)]


def _values(record: JobFacts | Ending) -> dict[str, Any]:
    """By field; `asdict` copies all that is in them, which is a twentieth of a request's time."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _facts(text: str) -> JobFacts:
    values = json.loads(text)
    values.pop("seconds", None)  # of stores of version 1
    return JobFacts(**values | {"warnings": tuple(values.get("warnings", ()))})


def _kept(row: Sequence[Any]) -> StoredJob:
    text, status, completed_at, started_at, size_bytes, met, step, code, message, entry = row
    facts = _facts(text)
    if status == "open":
        return StoredJob(facts, None)
    met = None if met is None else bool(met)
    found = None if entry is None else dict(zip(_READ, json.loads(entry), strict=True))
    ending = Ending(facts.id, status, completed_at, started_at, size_bytes, met, step, code, message, found)
    return StoredJob(facts, ending)
