"""What a run starts from besides its jobs; resume files, the state of unfinished jobs of a stopped run.

The output folder's `.resume/` has one file per job: a line of JSON, the used parts of the job's slab, and the
SHA-256 of both. The next run uses it only if the job, its weights, the slab layout and the kind of device are
unchanged (GPUs use other dtypes than CPUs). Otherwise the job starts at the beginning.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from gfgen.layout import Degrees
from gfgen.models.fast.kernels import KernelChoice
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import NOTHING_GIVEN_UP, GivenUp
from gfgen.runtime.ipc.slab import Slab, SlabPlan

logger = logging.getLogger(__name__)

FOLDER = ".resume"
VERSION = 2
_CHUNK_BYTES = 1 << 20
_CHECKSUM_BYTES = hashlib.sha256().digest_size
GRACE_S = 30.0  # how long running tasks may take to end when the run is to stop, before they are stopped, too

FIRST_USE_S = 0.5  # `RunStart.first_use_s` of ranks on GPUs, which load kernels and choose convolutions


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A job continues at `next_index`, with what `producer` made; dispatches go on from `last_number`."""

    next_index: int
    producer: int
    last_number: int
    path: Path
    given_up: GivenUp = NOTHING_GIVEN_UP


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """The circumstances of a run. Together with its jobs and events they determine every decision."""

    num_ranks: int
    lookahead_s: float = 0.0
    """How long before the predicted end of a task its successor may be queued, besides a share of the task.
    0: a task is dispatched only when its input exists."""
    max_degree: int | None = None
    """Most ranks of one task. None: the size of the largest island."""
    started_at: float = 0.0
    last_number: int = 0  # the last dispatch that these ranks have seen in an earlier run
    arrived_at: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Unix time at which each job, by (id, spec hash), first arrived."""
    resume: Mapping[str, ResumePoint] = field(default_factory=dict)
    closes_s: float | None = None  # no job begins that is predicted to end after this time on the run's clock
    grace_s: float = GRACE_S
    resident: Collection[str] | None = None  # that ranks hold at first; others wait for a turn. None: all
    islands: Sequence[Sequence[int]] | None = None
    """Sets of ranks that exchange with each other. None: all do."""
    near: Sequence[Sequence[int]] | None = None
    """Sets of ranks that reach each other's memory. None: the islands."""
    reads_s: Mapping[str, float] = field(default_factory=dict)
    """By model whose blocks are read for each forward: the time that the reads of one take."""
    num_writers: int = 1  # processes that write files; looks ahead count with them
    first_use_s: float = 0.0  # of the first step or decode of a kind, until the run has learned it
    warm: Collection[tuple[str, str, Degrees]] = ()  # models, shapes and degrees whose first uses are over

    def header(self) -> dict[str, Any]:
        return {
            "ranks": self.num_ranks,
            "guard_s": self.lookahead_s,
            "started_at": self.started_at,
            "last_number": self.last_number,
            "resumed": {
                job_id: (point.next_index, point.producer, point.last_number)
                for job_id, point in self.resume.items()
            },
            "closes_s": self.closes_s,
            "resident": None if self.resident is None else sorted(self.resident),
            "islands": self.islands,
            "near": self.near,
            "reads_s": dict(self.reads_s),
            "first_use_s": self.first_use_s,
            "warm": sorted(self.warm),
        }


def resume_path(output_dir: Path, job_id: str) -> Path:
    return output_dir / FOLDER / f"{job_id}.state"


def begun(output_dir: Path) -> set[str]:
    """Ids of the jobs that have resume files."""
    return {path.stem for path in (output_dir / FOLDER).glob("*.state")}


def save(
    point: ResumePoint, job: AdmittedJob, slab_fd: int, *, weights: str, computed_with: Mapping[str, Any]
) -> None:
    """Write a job's resume file atomically; `weights` and `computed_with` are the pool's. Raises: OSError."""
    path = point.path
    path.parent.mkdir(exist_ok=True)
    extents = list(_extents(slab_fd, SlabPlan.of(job.trajectory).size_bytes))
    numbers = {name: getattr(point, name) for name in ("next_index", "producer", "last_number")}
    header = {**_identity(job), "weights": weights, **numbers}
    header |= {"extents": extents, "computed_with": dict(computed_with)}
    if point.given_up.steps:
        header["given_up"] = [point.given_up.steps, point.given_up.why]
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            line, checksum = json.dumps(header).encode() + b"\n", hashlib.sha256()
            for piece in itertools.chain([line], _pieces(slab_fd, extents)):
                checksum.update(piece)
                file.write(piece)
            file.write(checksum.digest())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def find(
    output_dir: Path,
    jobs: Sequence[AdmittedJob],
    *,
    weights_mark: Callable[[Path], str],
    computed_with: Mapping[str, Any],
) -> dict[str, ResumePoint]:
    """The jobs that can continue on workers with these weights and devices."""
    points = {}
    for job in jobs:
        path = resume_path(output_dir, job.job_id)
        header = _header(path, job.job_id)
        if header is None:
            continue
        if any(header.get(key) != value for key, value in _identity(job).items()):
            changed = "it has changed since it was stopped"
        elif header.get("weights") != weights_mark(job.checkpoint):
            changed = "its model's weights have changed"
        elif header.get("computed_with") != dict(computed_with):
            changed = "it was stopped on another kind of device, or with other model options"
        else:
            numbers = (header["next_index"], header["producer"], header["last_number"])
            steps, why = header.get("given_up", ((), None))
            points[job.job_id] = ResumePoint(*numbers, path, GivenUp(tuple(steps), why))
            continue
        logger.info("job %s starts at the beginning: %s", job.job_id, changed)
    return points


def kernels_of(output_dir: Path, jobs: Sequence[AdmittedJob]) -> KernelChoice | None:
    """The kernels with which the first of these jobs that has a resume file was computed."""
    for job in jobs:
        with (
            contextlib.suppress(OSError, ValueError, AttributeError),
            resume_path(output_dir, job.job_id).open("rb") as file,
        ):
            found: KernelChoice = json.loads(file.readline())["computed_with"].get("kernels", "own")
            return found
    return None


def restore(point: ResumePoint, job: AdmittedJob) -> int:
    """A slab with the state of a resume file. Raises: OSError, ValueError, KeyError if it cannot be read."""
    with point.path.open("rb") as file:
        header = json.loads(file.readline())
        fd = Slab.create(SlabPlan.of(job.trajectory), name=job.job_id)
        try:
            for offset, length in header["extents"]:
                for start in range(offset, offset + length, _CHUNK_BYTES):
                    os.pwrite(fd, file.read(min(_CHUNK_BYTES, offset + length - start)), start)
        except BaseException:
            os.close(fd)
            raise
    return fd


def forget(output_dir: Path, job_id: str) -> None:
    """Remove the resume file of a job that has ended. A file that cannot be removed does no harm."""
    path = resume_path(output_dir, job_id)
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        logger.warning("the old resume file %s cannot be removed: %s", path, error.strerror)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def forget_others(output_dir: Path, job_ids: Collection[str]) -> None:
    """Remove the files of all other jobs, and partial files of a killed run."""
    for path in (output_dir / FOLDER).glob("*.partial"):
        with contextlib.suppress(OSError):
            path.unlink()
    for path in (output_dir / FOLDER).glob("*.state"):
        if path.stem not in job_ids:
            forget(output_dir, path.stem)


def _identity(job: AdmittedJob) -> dict[str, Any]:
    plan = SlabPlan.of(job.trajectory)
    return {
        "gfgen_resume": VERSION,
        "job_id": job.job_id,
        "spec_hash": job.info.spec_hash,
        "num_tasks": job.trajectory.num_tasks,
        "offsets": list(plan.offsets),
        "size_bytes": plan.size_bytes,
    }


def _header(path: Path, job_id: str) -> dict[str, Any] | None:
    """The header of an undamaged resume file of this job; None for any other file."""
    try:
        with path.open("rb") as file:
            if _has_checksum(file):
                file.seek(0)
                header: dict[str, Any] = json.loads(file.readline())
                if header["job_id"] == job_id:
                    return header
                why = f"it is of job {header['job_id']}"
            else:
                why = "its checksum is wrong: it is damaged, or an earlier version of gfgen wrote it"
    except FileNotFoundError:
        return None
    except OSError as error:
        why = error.strerror or str(error)
    logger.warning("%s cannot be used (%s): job %s starts at the beginning", path, why, job_id)
    return None


def _has_checksum(file: BinaryIO) -> bool:
    checksum = hashlib.sha256()
    left = os.fstat(file.fileno()).st_size - _CHECKSUM_BYTES
    while left > 0 and (piece := file.read(min(_CHUNK_BYTES, left))):
        checksum.update(piece)
        left -= len(piece)
    return file.read(_CHECKSUM_BYTES + 1) == checksum.digest()


def _pieces(fd: int, extents: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    for offset, length in extents:
        for start in range(offset, offset + length, _CHUNK_BYTES):
            yield os.pread(fd, min(_CHUNK_BYTES, offset + length - start), start)


def _extents(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the data extents of a sparse file."""
    position = 0
    while position < size_bytes:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        position = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, position - start
