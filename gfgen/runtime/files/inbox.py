"""A watched folder: runs the jobs of each job file once, as it arrives.

A file is known by its name and content, so that after a restart only unfinished jobs run. A thread scans the
folder. The control loop fetches new jobs with `take`, and reports which jobs have ended.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from gfgen.errors import Problem, in_one_line, listed
from gfgen.job.inputs import MAX_FILE_BYTES
from gfgen.job.reader import read_job_stream
from gfgen.job.spec import FRAME, JobSpec, input_files, name_key
from gfgen.runtime.core.admission import AdmittedJob, tell_of_warnings
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.runtime.files.index import ManifestIndex
from gfgen.runtime.files.manifest import WATCHED_NAME, is_finished
from gfgen.runtime.files.ownership import claim_files, job_file_name, with_names
from gfgen.system.linefile import LineFile, read_from
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
JOB_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
REFUSED_SUFFIXES = (".gz", ".ods", ".parquet", ".xlsx", ".yaml", ".yml")  # the reader says why
REPORT_SUFFIX = ".errors.txt"
SETTLED_S = 1.0  # a file that has not changed for this time is complete
UNFINISHED_S = 30.0  # the same for a file whose last line has no end
LOOK_S = 0.5

AdmitSpecs = Callable[[Sequence[JobSpec]], tuple[Sequence[AdmittedJob], Sequence[Problem]]]


@dataclass(slots=True)
class _FileScan:
    mark: tuple[int, int, int]
    since: float
    is_dealt_with: bool = False
    is_cut_off: bool = False


@dataclass(slots=True)
class _WatchedJob:
    source: str
    spec_hash: str
    file: str
    inputs: tuple[tuple[str, Path], ...]
    status: Literal["at work", "done", "failed"] = "at work"


@dataclass(eq=False)
class Inbox(Observer):
    folder: Path
    _: KW_ONLY
    output_dir: Path
    admit: AdmitSpecs  # gives the jobs that can run, and the problems of the others
    skip_invalid: bool = False
    overwrite: bool = False
    named_at: float | None = None
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._manifest = ManifestIndex(self.output_dir)
        self._sights: dict[str, _FileScan] = {}
        self._unreadable: set[str] = set()  # names of files that cannot be read, as the log says
        self._known: dict[str, _WatchedJob] = {}
        self._owners: dict[str, str] = {}  # by key of an output name: the key of the job that writes it
        self._taken: set[tuple[str, str]] = set()  # name and content of the files that this process has taken
        self._before = read_taken(self.output_dir / WATCHED_NAME)
        self._record = LineFile(self.output_dir / WATCHED_NAME)
        self._is_missing = False
        self._found: queue.SimpleQueue[list[AdmittedJob] | Exception] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="inbox", daemon=True)

    # The control loop's side ----------------------------------------------------------------

    def start(self, *, admit: AdmitSpecs) -> None:
        """Start watching; `admit` knows which models the ranks have loaded."""
        self.admit = admit
        self._thread.start()

    def take(self) -> list[AdmittedJob]:
        """The jobs that have arrived since the last call. Raises: the error that ended the thread."""
        jobs: list[AdmittedJob] = []
        while not self._found.empty():
            found = self._found.get()
            if isinstance(found, Exception):
                raise found
            jobs += found
        return jobs

    def ended(self, outcome: JobOutcome) -> None:
        known = self._known.get(name_key(outcome.info.job_id))
        if known is not None:
            known.status = "done" if outcome.status == "done" else "failed"

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._record.close()
        self._manifest.close()

    # The thread's side ----------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._closed.wait(LOOK_S):
                if jobs := self.look():
                    self._found.put(jobs)
        except Exception as error:
            self._found.put(error)

    def look(self) -> list[AdmittedJob]:
        jobs: list[AdmittedJob] = []
        for path in self._complete_files():
            try:
                content = None if self._is_list(path) else _read(path)
            except OSError as error:  # tried again at the next scan: permissions and disks may change
                self._sights[path.name].is_dealt_with = False
                if not isinstance(error, FileNotFoundError):  # taken away again since we saw it
                    self._tell_unreadable(path, error)
                continue
            self._unreadable.discard(path.name)
            if content is not None and not self._is_cut_off(path.name, content):
                jobs += self._take_file(path, content)
        return jobs

    def _is_list(self, path: Path) -> bool:
        """Whether this text is no job file, but a list of choices that one of them names as {@NAME}."""
        if path.suffix.lower() != ".txt":
            return False
        mention = f"{{@{path.name}}}".encode()
        others = [self.folder / name for name in self._sights if name != path.name]
        return any(mention in each.read_bytes() for each in others if each.is_file())

    def _is_cut_off(self, name: str, content: bytes) -> bool:
        """Whether the rest of the last line may still come: it has no end, and does not end as JSON does."""
        sight = self._sights[name]
        has_end = not content or content.endswith((b"\n", b"\r", b"\0", b"}", b"]"))
        if has_end or self.now() >= sight.since + UNFINISHED_S:
            return False
        if not sight.is_cut_off:
            logger.info("%s: its last line has no end yet; waiting for it, at most %g s", name, UNFINISHED_S)
        sight.is_dealt_with, sight.is_cut_off = False, True
        return True

    def _tell_unreadable(self, path: Path, error: OSError) -> None:
        if path.name not in self._unreadable:
            self._unreadable.add(path.name)
            logger.error("%s cannot be read (%s); trying again at every scan", path, error.strerror)

    def _complete_files(self) -> Iterator[Path]:
        """Files to read now: first those taken before, in their old order, then the others by age."""
        found = self._list_folder()
        self._sights = {name: sight for name, sight in self._sights.items() if name in found}
        order = {name: number for number, (name, _) in enumerate(self._before)}
        for name in sorted(found, key=lambda n: (order.get(n, len(order)), found[n].st_mtime_ns, n)):
            if self._is_complete(name, found[name]):
                yield self.folder / name

    def _list_folder(self) -> dict[str, os.stat_result]:
        try:
            with os.scandir(self.folder) as entries:
                files = [entry for entry in entries if _is_job_file(entry.name)]
        except OSError as error:
            if not self._is_missing:
                logger.warning(
                    "--watch %s: %s; waiting until the folder is back", self.folder, error.strerror
                )
            self._is_missing = True
            return {}
        self._is_missing = False
        self._unreadable.intersection_update(entry.name for entry in files)
        return {entry.name: seen for entry in files if (seen := self._stat_of(entry)) is not None}

    def _stat_of(self, entry: os.DirEntry[str]) -> os.stat_result | None:
        """The status of a file; None for any other entry, which is logged once."""
        try:
            found = entry.stat()
        except OSError as error:
            if entry.is_symlink() or not isinstance(error, FileNotFoundError):
                self._tell_unreadable(self.folder / entry.name, error)
            return None
        if not stat.S_ISREG(found.st_mode):  # a pipe might never end
            self._tell_unreadable(self.folder / entry.name, OSError(0, "it is no regular file"))
            return None
        return found

    def _is_complete(self, name: str, seen: os.stat_result) -> bool:
        """Whether to read the file now: it no longer changes, and this version was not read before."""
        now = self.now()
        mark = (seen.st_size, seen.st_mtime_ns, seen.st_ino)
        sight = self._sights.get(name)
        if sight is None and seen.st_mtime <= now - SETTLED_S:
            sight = _FileScan(mark, since=seen.st_mtime)  # it was complete before this scan
        elif sight is None or sight.mark != mark:
            sight = _FileScan(mark, since=now)
        self._sights[name] = sight
        if sight.is_dealt_with or now < sight.since + SETTLED_S:
            return False
        sight.is_dealt_with = True
        return True

    def _take_file(self, path: Path, content: bytes) -> list[AdmittedJob]:
        """The jobs of one file that have to run; none if the file is refused or was taken before."""
        key = (path.name, hashlib.sha256(content).hexdigest())
        if key in self._taken:
            return []
        try:
            jobs, problems = self._judge(path, content)
        except Exception as error:  # whatever is wrong with one file, the run goes on
            logger.debug("%s failed", path, exc_info=True)
            jobs, problems = [], [Problem(None, None, None, in_one_line(error))]
        todo = self._todo(jobs, key)
        at_work = [known.inputs for known in self._known.values() if known.status == "at work"]
        jobs, refused = claim_files(
            jobs,
            output_dir=self.output_dir,
            job_file=job_file_name(path, self.output_dir),
            done={job.job_id for job in jobs}.difference(todo),
            inputs={path: f"the {name} of a job at work" for inputs in at_work for name, path in inputs},
            overwrite=self.overwrite,
        )
        problems = sorted((*problems, *refused), key=lambda problem: problem.line or 0)
        is_refused = bool(problems) and not (self.skip_invalid and jobs)
        _report(path, problems, is_refused=is_refused)
        if is_refused:
            return []
        self._note(jobs, todo, source=path.name)
        self._taken.add(key)
        if key not in self._before:
            taken_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.now()))
            entry = {"version": SCHEMA_VERSION, "file": key[0], "sha256": key[1], "jobs": len(jobs)}
            self._record.append(json.dumps(entry | {"taken_at": taken_at}).encode() + b"\n")
        started = [job for job in jobs if job.job_id in todo]
        logger.info("took %s: %s, %d to do", path.name, counted(len(jobs), "job"), len(started))
        tell_of_warnings(((job.info.spec, job.info.warnings) for job in started), source=path.name)
        return started

    def _judge(self, path: Path, content: bytes) -> tuple[list[AdmittedJob], list[Problem]]:
        parsed = read_job_stream(
            io.BytesIO(content), source=path.name, folder=self.folder, suffix=path.suffix
        )
        admitted, refused = self.admit(parsed.specs)
        admitted = with_names(admitted, output_dir=self.output_dir, named_at=self.named_at)
        clashes = [self._clash(job, path.name) for job in admitted]
        jobs = [job for job, clash in zip(admitted, clashes, strict=True) if clash is None]
        return jobs, [*parsed.problems, *refused, *filter(None, clashes)]

    def _clash(self, job: AdmittedJob, source: str) -> Problem | None:
        """The problem if another job, unless it has ended and is replaced, has this one's id or output."""
        job_key = name_key(job.job_id)
        line, known = job.spec.line, self._known.get(job_key)
        owner = self._owners.get(name_key(job.info.file), job_key)
        if owner != job_key:
            taken = f"a job of {self._known[owner].source} already writes this file; name another"
            return Problem(line, "output", job.info.file.removesuffix(f"/{FRAME}.png"), taken)
        if known is None or known.spec_hash == job.info.spec_hash:
            return None
        if known.source != source:
            taken = f"{known.source} has another job with this id; each job needs its own"
            return Problem(line, "id", job.job_id, taken)
        if known.status == "at work":
            later = "the job is still running in its previous form; save the file again when it has ended"
            return Problem(line, "id", job.job_id, later)
        return None

    def _todo(self, jobs: Sequence[AdmittedJob], key: tuple[str, str]) -> set[str]:
        lines = self._manifest
        lines.catch_up()

        def has_ended(job: AdmittedJob) -> bool:
            line = lines.get(job.job_id)
            if key in self._before:  # taken before: a job with a line in the manifest has ended
                return line is not None and line.get("spec_hash") == job.info.spec_hash
            return is_finished(job.info, line, self.output_dir)

        return {job.job_id for job in jobs if not self._is_known(job) and not has_ended(job)}

    def _is_known(self, job: AdmittedJob) -> bool:
        known = self._known.get(name_key(job.job_id))
        return known is not None and known.spec_hash == job.info.spec_hash and known.status != "failed"

    def _note(self, jobs: Sequence[AdmittedJob], todo: Collection[str], *, source: str) -> None:
        for job in jobs:
            if self._is_known(job):
                continue
            known = _WatchedJob(source, job.info.spec_hash, job.info.file, input_files(job.spec))
            known.status = "at work" if job.job_id in todo else "done"
            self._known[name_key(job.job_id)] = known
            self._owners[name_key(job.info.file)] = name_key(job.job_id)


def _is_job_file(name: str) -> bool:
    is_hidden = name.startswith(".")
    is_ours = name.lower().endswith(JOB_FILE_SUFFIXES + REFUSED_SUFFIXES)
    return is_ours and not is_hidden and not name.endswith(REPORT_SUFFIX)


def _read(path: Path) -> bytes:
    """The content, and of a file that is too large so much that reading its jobs refuses it."""
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def _report(path: Path, problems: Sequence[Problem], *, is_refused: bool) -> None:
    """Log the first problems of a file, and write all of them beside the file; remove an older report."""
    report = path.with_name(path.name + REPORT_SUFFIX)
    outcome = "no job was started" if is_refused else "the other jobs were started"
    headline = f"{path.name}: {counted(len(problems), 'problem')}; {outcome}"
    try:
        if not problems:
            report.unlink(missing_ok=True)
            return
        lines = (headline, *listed(problems, limit=len(problems)))
        report.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        logger.warning("cannot write %s (%s)", report, error.strerror)
    if problems:
        logger.error("%s", headline)
    for line in listed(problems):
        logger.error("%s: %s", path.name, line)


def read_taken(path: Path) -> dict[tuple[str, str], None]:
    """Name and content hash of the files that earlier runs took, in that order."""
    taken: dict[tuple[str, str], None] = {}
    for number, line in enumerate(read_from(path).split(b"\n"), start=1):
        with suppress(ValueError, KeyError, TypeError):
            entry: dict[str, Any] = json.loads(line)
            taken[str(entry["file"]), str(entry["sha256"])] = None
            continue
        if line.strip():
            logger.warning("%s: line %d is damaged, so its file counts as new", path, number)
    return taken
