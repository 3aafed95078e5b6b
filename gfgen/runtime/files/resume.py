"""Resume files: the state of unfinished jobs of a stopped run, from which the next run continues.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gfgen.models.fast.kernels import KernelChoice
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.dispatch import NOTHING_GIVEN_UP, GivenUp
from gfgen.runtime.ipc.slab import Slab, SlabPlan

logger = logging.getLogger(__name__)

FOLDER = ".resume"
VERSION = 2
_CHUNK_BYTES = 1 << 20
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A job continues at task `next_index`, whose input dispatch `producer` made.

    `last_number` is the last dispatch of the stopped run. The slab may name any number up to it, so the next
    run counts from there.
    """

    next_index: int
    producer: int
    last_number: int
    path: Path
    given_up: GivenUp = NOTHING_GIVEN_UP


def resume_path(output_dir: Path, job_id: str) -> Path:
    return output_dir / FOLDER / f"{job_id}.state"


def save(
    point: ResumePoint, job: AdmittedJob, slab_fd: int, *, weights: str, computed_with: Mapping[str, Any]
) -> None:
    """Write a job's resume file atomically; `weights` and `computed_with` come from the pool.

    Raises: OSError when it cannot be written.
    """
    path = point.path
    path.parent.mkdir(exist_ok=True)
    extents = list(_extents(slab_fd, SlabPlan.of(job.trajectory).size_bytes))
    header = {
        **_identity(job),
        "weights": weights,
        "next_index": point.next_index,
        "producer": point.producer,
    }
    header |= {"last_number": point.last_number, "extents": extents, "computed_with": dict(computed_with)}
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
            logger.info("job %s starts at the beginning: it has changed since it was stopped", job.job_id)
            continue
        if header.get("weights") != weights_mark(job.checkpoint):
            logger.info("job %s starts at the beginning: its model's weights have changed", job.job_id)
            continue
        if header.get("computed_with") != dict(computed_with):
            logger.info(
                "job %s starts at the beginning: it was stopped on another kind of device, or with other "
                "model options",
                job.job_id,
            )
            continue
        numbers = (header["next_index"], header["producer"], header["last_number"])
        steps, why = header.get("given_up", ((), None))
        points[job.job_id] = ResumePoint(*numbers, path, GivenUp(tuple(steps), why))
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
    """A slab with the state of a resume file; the caller owns the descriptor.

    Raises: OSError, ValueError or KeyError when the file cannot be read.
    """
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
    """The header fields that must match the job."""
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
    """Whether a file ends with the checksum of its content."""
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
