"""Puts the files of finished jobs into a store, in a thread: a run waits for it only at its end.

The run works in a local folder, whose manifest says what is finished. Jobs go to the store in numbered
batches: a shard, or the files of a minute, and then a part of the manifest. A batch is complete on the disk,
recorded as closed, stored, and recorded as stored, in this order; then its local files go. A writer that
finds a number taken reads what is there before it goes on. So no job is in two shards, even if two runs
write at once.
"""

from __future__ import annotations

import json
import logging
import re
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from gfgen.errors import GfgenError, InputError, LockedError, OutputError, in_one_line
from gfgen.job.inputs import is_url
from gfgen.job.spec import JobSpec, numbered_names
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.files.manifest import (
    MANIFEST_NAME,
    SIMULATED,
    ManifestLine,
    manifest_lines,
    of_each_file,
    read_files,
    read_manifest,
)
from gfgen.runtime.files.metadata import clean, describe
from gfgen.runtime.ipc.content import Content, content_of, is_unchanged
from gfgen.runtime.publish.shards import PART, SHARD, Shards, lines_of
from gfgen.runtime.publish.store import Bucket, Folder, StoreError, TakenError
from gfgen.system.linefile import LineFile, read_from

logger = logging.getLogger(__name__)

RECORD_NAME = "published.jsonl"
BATCH_S = 60.0  # between two batches of files that are in no shard, and between two renewals of the lease
PAUSE_S = 1.0  # before an upload is tried again; doubled each time, up to a minute
LEASE_S = 300.0  # it is not renewed during an upload. Another run takes it after this time.
LAST_S, STOPPED_S = 120.0, 5.0  # how long failing uploads are tried again after a run, or a stopped one
NUM_UPLOADS = 8


class Publisher(Observer):
    """Inside `opened` it holds the store; `finish` waits for what is left."""

    def __init__(self, url: str, state: Path, shards: Shards, *, is_filtered: bool = False) -> None:
        """is_filtered: results wait until their line has the decision of a filter."""
        self.url, self.state, self._shards, self._is_filtered = url, state, shards, is_filtered
        self.published: dict[str, str] = {}  # hashes of the jobs in the store, by id
        self._manifest, self._folder = state / MANIFEST_NAME, state / ".shards"
        self._header: dict[str, Any] = {}
        self._number = -1  # the last one in the store
        self._closed: dict[str, Any] | None = None  # the record of the batch that is not stored
        self._last: Mapping[str, str] = {}  # jobs of the last batch, whose files a killed run may have left
        self._waiting: dict[str, ManifestLine] = {}
        self._waiting_bytes, self._next_s, self._next_hold_s = 0, 0.0, 0.0
        self._unjudged: set[str] = set()
        self._others: list[ManifestLine] = []  # jobs that were not done, for the next part
        self._read_bytes, self._told_bytes, self._start_bytes = 0, 0, 0
        """Of the manifest: read, in parts as far as jobs were not done, and in the store, all of them."""
        self._specs: dict[str, JobSpec] = {}
        self._put: dict[str, Content] = {}  # files of the next batch that are in the store
        self._wake, self._ending = threading.Event(), threading.Event()
        self._until_s, self._pause_s, self._error = 0.0, PAUSE_S, ""
        self._thread: threading.Thread | None = None
        self._read_record()

    # In the thread of the run -----------------------------------------------------------------

    @contextmanager
    def opened(
        self, interrupting: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[None]:
        """Hold the store. Raises: LockedError; InputError when what is there does not go with the options."""
        self._interrupting = interrupting
        self._store = Bucket(self.url) if is_url(self.url) else Folder(self.url)
        self._read_record()  # again, with the folder's lock
        asked = {"output": self.url if is_url(self.url) else ".", "shards": self._shards.kind}
        if self._header and asked.items() - self._header.items():
            output = self.state if self._header["output"] == "." else self._header["output"]
            raise InputError(
                f"{self.state} is the folder of a run with -o {output} and --shards "
                f"{self._header['shards']}; give these, or name another --output and --state"
            )
        if not self._header and read_files(self._manifest):
            raise InputError(f"{self.state} has files of runs without shards or a store; name another folder")
        names = self._store.names(SHARD)
        if other := next((each for each in names if Path(each).suffix != self._shards.suffix), None):
            raise InputError(f"{self.url} has {other}: give the --shards of it, or another --output")
        self._folder.mkdir(exist_ok=True)
        self._lines = LineFile(self.state / RECORD_NAME)
        if not self._header:
            self._record(asked | {"owner": uuid.uuid4().hex})
        self._hold()
        try:
            self._begin()
            yield
        finally:
            self.finish(limit_s=STOPPED_S)
            if self._thread is None:  # otherwise it still writes, until the process ends
                with suppress(OutputError, LockedError):
                    self._store.hold(self._header["owner"], lease_s=0)
                self._lines.close()

    def _begin(self) -> None:
        """Learn what the store has, and what waits here."""
        names = [*self._store.names(SHARD), *self._store.names(PART)]
        found = [(re.fullmatch(r"[a-z]+-(\d{5,})\.[a-z]+", name), name) for name in names]
        known = read_manifest(self._manifest)
        for number, name in sorted({int(match[1]): name for match, name in found if match}.items()):
            if number > self._number:
                lost = [line for line in self._adopt(number, name) if line["id"] not in known]
                if lost:  # with its lines, the folder is as if the run had always been here
                    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lost)
                    with closing(LineFile(self._manifest)) as manifest:
                        manifest.append(text.encode("utf-8", "replace"))
                    self._told_bytes = self._manifest.stat().st_size
        own = [] if self._closed is None else self._names(self._closed["closed"])
        if own and not (self._folder / own[0]).exists():
            self._closed = None  # its jobs wait again
        for path in self._folder.iterdir():
            if path.name not in own:
                path.unlink()
        self._read_bytes = self._start_bytes
        self._take_in()

    def expect(self, jobs: Sequence[JobInfo]) -> None:
        """Start with the jobs of the run: shards have what they were, also those of earlier runs.

        Raises: InputError when the store has an object of others with the name of a job's file.
        """
        self._specs |= {info.job_id: info.spec for info in jobs if info.job_id in self._waiting}
        new = [info for info in jobs if self._shards.kind is None and info.job_id not in self.published]
        hashes = {name: x.spec_hash for x in new for name in numbered_names([x.file], x.spec.args)}
        if hashes and (name := self._store.taken(hashes)) is not None:
            raise InputError(
                f"{self.url}/{name} is there already, of another job; move it away, or name another output"
            )
        self._next_s = time.monotonic() + BATCH_S
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def ended(self, outcome: JobOutcome) -> None:
        if outcome.status == "done":
            self._specs[outcome.job_id] = outcome.info.spec
            self._wake.set()

    def finish(self, *, limit_s: float = LAST_S) -> str:
        """Close the open shard, and wait until the store has all; what is not stored and why, or nothing."""
        if self._thread is not None:
            self._until_s = time.monotonic() + limit_s
            self._ending.set()
            self._wake.set()
            with self._interrupting("files went to the store; the same command goes on"):
                self._thread.join()
            self._thread = None
        if not self._error:
            return ""
        return f"{self._error}; other files stay in {self.state}: run the same command again to go on"

    # In the publisher's thread ----------------------------------------------------------------

    def _work(self) -> None:
        while True:
            is_last = self._ending.is_set()
            try:
                self._publish(is_last=is_last)
                self._error = ""
                if is_last:
                    return
                self._wake.wait(BATCH_S)
                self._wake.clear()
            except (StoreError, OSError) as error:  # of the store, or such as a full disk
                self._error = str(error)
                pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, 60.0)
                if is_last and time.monotonic() + pause_s > self._until_s:
                    return
                logger.warning("%s; trying again in %.0f s", error, pause_s)
                time.sleep(pause_s) if is_last else self._ending.wait(pause_s)
            except Exception as error:
                logger.debug("publishing has failed", exc_info=True)
                self._error = str(error) if isinstance(error, GfgenError) else in_one_line(error)
                logger.error("nothing more goes to %s: %s", self.url, self._error)
                return

    def _hold(self) -> None:
        if time.monotonic() >= self._next_hold_s:
            self._store.hold(self._header["owner"], lease_s=LEASE_S)
            self._next_hold_s = time.monotonic() + BATCH_S

    def _publish(self, *, is_last: bool) -> None:
        """Store what is due. Raises: StoreError; TakenError; OSError for the local disk."""
        has_files = self._shards.kind is None
        while True:
            self._hold()
            if self._closed is not None:
                self._store_batch(self._closed)
            self._take_in()
            is_due = is_last or (has_files and time.monotonic() >= self._next_s)
            is_full = self._shards.is_full(len(self._waiting), self._waiting_bytes)
            if not (is_full or (is_due and (self._waiting or (has_files and self._others)))):
                return
            self._close()

    def _take_in(self) -> None:
        """Read what the manifest has since the last time, up to the end of a closed batch."""
        if self._closed is None and not (self._waiting or self._others or self._unjudged):
            self._start_bytes = self._read_bytes
        content = read_from(self._manifest, start=self._read_bytes)
        if self._closed is not None:
            content = content[: self._closed["end"] - self._read_bytes]
        content = content[: content.rfind(b"\n") + 1]
        cut = max(0, self._told_bytes - self._read_bytes)
        for is_told, lines in ((True, content[:cut]), (False, content[cut:])):
            for line in manifest_lines(lines, self._manifest):
                job_id, is_done = line["id"], line.get("status") == "done"
                if job_id in self.published:
                    if is_done and (not is_told or job_id in self._last):
                        self._remove(line)
                    continue
                self._drop(job_id)
                self._unjudged.discard(job_id)
                if not is_done:
                    self._others += [] if is_told else [line]
                elif self._is_filtered and "decision" not in line.get("filter", {}):
                    self._unjudged.add(job_id)
                elif not line.get(SIMULATED):
                    self._waiting[job_id] = line
                    self._waiting_bytes += _size_of(line)
        self._read_bytes += len(content)

    def _close(self) -> None:
        """Make a batch of the jobs that wait, as far as their files are as they were made."""
        number, batch, size_bytes = self._number + 1, list[ManifestLine](), 0
        names = self._names(number)
        for line in list(self._waiting.values()):
            if self._shards.is_full(len(batch), size_bytes):
                break
            if all(is_unchanged(self.state / each["file"], _content(each)) for each in of_each_file(line)):
                batch.append(line)
                size_bytes += _size_of(line)
            else:
                logger.warning("job %s: its file has changed or is gone, so it is not stored", line["id"])
                self._drop(line["id"])
        if self._shards.kind is None:
            batch = self._put_files(batch)
        elif batch:
            batch = [{**line, "shard": names[0]} for line in batch]
            specs = [self._specs.get(line["id"]) for line in batch]  # the run adds others meanwhile
            jobs = [{"job": clean(describe(spec))} if spec else {} for spec in specs]
            samples = ({**line, **job} for line, job in zip(batch, jobs, strict=True))
            self._shards.write(self._folder / names[0], samples, self.state)
        if batch or (self._others and self._shards.kind is None):
            self._write_lines(names[-1], [*batch, *self._others])
            positions = {"start": self._start_bytes, "end": self._read_bytes}
            self._record(
                {"closed": number, "jobs": {line["id"]: line["spec_hash"] for line in batch}, **positions}
            )
        self._next_s = time.monotonic() + BATCH_S

    def _put_files(self, batch: Sequence[ManifestLine]) -> list[ManifestLine]:
        """Store the files of these jobs; their lines, with what the store has.

        Raises: StoreError; TakenError, and then nothing more is stored before the name is free.
        """

        def put(line: ManifestLine) -> ManifestLine:
            found = []
            for each in of_each_file(line):
                if (name := each["file"]) not in self._put:
                    path = self.state / name
                    self._put[name] = self._store.put(name, path, _content(each), job=line["spec_hash"])
                there = self._put[name]
                found.append({"file": name, "size_bytes": there.size_bytes, "sha256": there.sha256})
            return {**line, **found[0], **({"outputs": found} if "outputs" in line else {})}

        with ThreadPoolExecutor(NUM_UPLOADS) as pool:
            return list(pool.map(put, batch))

    def _store_batch(self, closed: Mapping[str, Any]) -> None:
        """Put a batch into the store, or learn of the one that has its number."""
        first, *others = names = self._names(closed["closed"])
        try:
            self._put_whole(first)
        except TakenError as error:
            logger.warning("%s; its jobs are left out here", error)
            self._adopt(closed["closed"], first)
        else:
            for name in others:
                with suppress(TakenError):  # of a run that has found the shard
                    self._put_whole(name)
            self._record({"stored": closed["closed"]})
            self._others.clear()
        self._put.clear()
        self._pause_s = PAUSE_S
        for line in [self._waiting[job_id] for job_id in self._last if job_id in self._waiting]:
            self._drop(line["id"])
            self._specs.pop(line["id"], None)
            self._remove(line)
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def _adopt(self, number: int, name: str) -> list[ManifestLine]:
        """Learn which jobs a batch of another run has, and write its part if that run could not."""
        path = self._folder / f"of-another-{name}"
        self._store.fetch(name, path)
        lines = list[ManifestLine]()
        with suppress(tarfile.TarError, ValueError, KeyError, AttributeError):  # of others
            lines = list(lines_of(path))
        path.unlink()
        if not lines or any(not line.keys() >= {"id", "spec_hash"} for line in lines):
            raise InputError(f"{self.url} has {name}, which gfgen did not make: name another --output")
        if name.startswith(SHARD):
            part = self._names(number)[-1]
            self._write_lines(part, lines)
            with suppress(TakenError):
                self._put_whole(part)
        jobs = {line["id"]: line["spec_hash"] for line in lines if line.get("status") == "done"}
        self._record({"stored": number, "jobs": jobs})
        return lines

    def _names(self, number: int) -> list[str]:
        """Of the objects of a batch: a shard if there are any, and a part."""
        shard = f"{SHARD}{number:05}{self._shards.suffix}"
        return [*([shard] if self._shards.kind else []), f"{PART}{number:05}.jsonl"]

    def _write_lines(self, name: str, lines: Iterable[ManifestLine]) -> None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (self._folder / name).write_text(text, encoding="utf-8", errors="replace")

    def _put_whole(self, name: str) -> None:
        self._store.put(name, self._folder / name, content_of(self._folder / name))

    def _drop(self, job_id: str) -> None:
        if (line := self._waiting.pop(job_id, None)) is not None:
            self._waiting_bytes -= _size_of(line)

    def _remove(self, line: ManifestLine) -> None:
        for each in of_each_file(line):
            if is_unchanged(path := self.state / each["file"], _content(each)):
                path.unlink(missing_ok=True)

    def _record(self, entry: dict[str, Any]) -> None:
        self._lines.append(json.dumps(entry).encode() + b"\n")
        self._lines.sync()
        self._note(entry)

    def _read_record(self) -> None:
        for line in read_from(self.state / RECORD_NAME).splitlines():
            with suppress(ValueError):  # torn by a kill
                self._note(json.loads(line))

    def _note(self, entry: dict[str, Any]) -> None:
        if "closed" in entry:
            self._closed, self._start_bytes = entry, entry["start"]
        elif "stored" in entry:
            closed, self._closed = self._closed or {}, None
            if "jobs" not in entry:
                self._told_bytes = closed.get("end", 0)
            self._number, self._last = entry["stored"], entry.get("jobs", closed.get("jobs", {}))
            self.published |= self._last
        else:
            self._header = entry


def _content(file: Mapping[str, Any]) -> Content:
    return Content(file["size_bytes"], file["sha256"])


def _size_of(line: ManifestLine) -> int:
    return sum(each["size_bytes"] for each in of_each_file(line))
