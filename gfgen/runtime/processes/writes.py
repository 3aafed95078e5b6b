"""Frames on their way from a worker to a file, one for each writer; the others wait for whichever is free."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gfgen.models.geometry.weight_files import weights_id
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import Event, FramesLost, OutputFailed, OutputWritten
from gfgen.runtime.files.metadata import describe
from gfgen.runtime.ipc.content import remove_unfinished
from gfgen.runtime.ipc.messages import WriteDone, WriteFailed, WriteRequest
from gfgen.runtime.processes.child import Lost, Phase, WriterProcess
from gfgen.runtime.processes.pool import WorkerPool

logger = logging.getLogger(__name__)

MAX_WRITES = 2  # a file is given up after this many writers have died with it
RETRY_S = 5.0  # pause before a file for which the disk had no room is written again
LONG_S = 0.2  # a file that waits longer gets a new writer, which is there after about as long
SLOWEST_BYTES_PER_S = 1e6  # a slower writer hangs: encoding takes about 1 s for 50 MB on one core


@dataclass(slots=True, eq=False)
class _File:
    job: AdmittedJob
    number: int
    frames: int
    storing: set[int] = field(default_factory=set)
    is_decoded: bool = False
    since_s: float = 0.0
    writer: WriterProcess | None = None
    num_tries: int = 0
    retry_s: float | None = None  # when to try again, if the disk was full


class Writes:
    """Hands frames to idle writers; with `waits_for_space`, a full disk delays a file and fails no job."""

    def __init__(self, pool: WorkerPool, output_dir: Path, *, waits_for_space: bool = False) -> None:
        self._waits_for_space = waits_for_space
        self._pool = pool
        self._output_dir = output_dir
        self._files: dict[str, _File] = {}

    def new_frames(self, job: AdmittedJob, number: int) -> int:
        """Memory for the frames of a decode; the rank makes it larger if only the decode knows their size."""
        self.release(job.job_id)
        fd = os.memfd_create("gfgen-frames", os.MFD_CLOEXEC)
        os.truncate(fd, job.trajectory.artifact("frames").size_bytes)
        self._files[job.job_id] = _File(job, number, fd)
        return fd

    def expect(self, job_id: str, rank: int) -> None:
        self._files[job_id].storing.add(rank)

    def decoded(self, job_id: str) -> None:
        """The decode has ended: its file can be written once all frames have come."""
        file = self._files[job_id]
        file.is_decoded, file.since_s = True, self._pool.clock.now_s

    def stored(self, number: int, rank: int) -> None:
        """A rank's frames of a decode have come."""
        for file in self._files.values():
            if file.number == number:
                file.storing.discard(rank)

    def storing(self, rank: int) -> set[int]:
        return {file.number for file in self._files.values() if rank in file.storing}

    def lose_frames(
        self, numbers: Collection[int], reason: str, now_s: float, *, lost: bool
    ) -> Iterator[FramesLost]:
        """Frames of these decodes never come: those that had ended have to run again."""
        files = [file for file in self._files.values() if file.number in numbers and file.is_decoded]
        yield from self._lose(files, reason, now_s, lost=lost)

    def look(self, now_s: float) -> Iterator[FramesLost]:
        """Give out waiting files unless the run stops, and kill processes that take too long for one."""
        decoded = [file for file in self._files.values() if file.is_decoded]
        for file in decoded:
            waited_s = self._pool.clock.now_s - file.since_s
            slowest_s = os.fstat(file.frames).st_size / SLOWEST_BYTES_PER_S
            if file.writer is not None and waited_s > self._pool.patience.write_s + slowest_s:
                file.writer.kill("it does not finish a file")
            if waited_s > self._pool.patience.task_s:
                for rank in file.storing:
                    self._pool.workers[rank].kill("it does not store its frames")
        if decoded and self._pool.is_stopping:
            full = [file for file in decoded if file.retry_s is not None and file.writer is None]
            yield from self._lose(full, "the disk was full when the run stopped", now_s)
        self._give_out()

    def events_of(self, writer: WriterProcess, what: Any, now_s: float) -> Iterator[Event]:
        """The events that a writer's message, or its end, means for the run."""
        match what:
            case WriteDone():
                self.release(what.job_id)
                idx = self._pool.writers.index(writer)
                facts = (what.path, what.size_bytes, what.write_s, idx, what.sha256, what.files, what.made)
                yield OutputWritten(now_s, what.job_id, *facts)
            case WriteFailed(is_full=True) if self._waits_for_space and what.job_id in self._files:
                self._postpone(self._files[what.job_id], what.reason)
            case WriteFailed():
                self.release(what.job_id)
                yield OutputFailed(now_s, what.job_id, what.reason)
            case Lost():
                yield from self._writer_lost(writer, what, now_s)

    def _writer_lost(self, writer: WriterProcess, lost: Lost, now_s: float) -> Iterator[Event]:
        """Let another writer write the file of a dead one, unless two have died with it."""
        when = "" if writer.has_started else " after a pause"
        logger.warning("%s is gone (%s); a new one is started%s", writer.name, lost.reason, when)
        for file in [file for file in self._files.values() if file.writer is writer]:
            file.writer = None
            if writer.process.pid is not None:
                remove_unfinished(self._path_of(file), pid=writer.process.pid)
            if file.num_tries >= MAX_WRITES:
                yield OutputFailed(now_s, file.job.job_id, f"its writer died twice: {lost.reason}")
        self._give_out()
        if self._pool.is_stopping and not writer.has_started:  # the run would never end
            yield from self._lose(self._waiting(), f"{writer.name} cannot start: {lost.reason}", now_s)

    def _postpone(self, file: _File, reason: str) -> None:
        """Write it later; frames stay in memory, and further decodes wait (State.holds_back)."""
        if file.retry_s is None:
            logger.error("job %s: %s; it is written when there is room", file.job.job_id, reason)
        file.writer, file.num_tries = None, file.num_tries - 1
        file.retry_s = self._pool.clock.now_s + RETRY_S

    def _lose(
        self, files: Sequence[_File], reason: str, now_s: float, *, lost: bool = True
    ) -> Iterator[FramesLost]:
        for job_id in [file.job.job_id for file in files]:
            self.release(job_id)
            yield FramesLost(now_s, job_id, reason, lost=lost)

    def _give_out(self) -> None:
        """Give every idle writer a file that waits; more writers, if files wait for long."""
        busy = [file.writer for file in self._files.values()]
        idle = [each for each in self._pool.writers if each.phase is Phase.SERVING and each not in busy]
        for writer, file in zip(idle, self._waiting(), strict=False):
            file.writer, file.since_s, file.num_tries = writer, self._pool.clock.now_s, file.num_tries + 1
            writer.tell(self._request(file), (file.frames,))
        if any(self._pool.clock.now_s > file.since_s + LONG_S for file in self._waiting()):
            self._pool.add_writer()

    def _waiting(self) -> list[_File]:
        now_s = self._pool.clock.now_s
        complete = [each for each in self._files.values() if each.is_decoded and not each.storing]
        tried = [each for each in complete if each.writer is None and each.num_tries < MAX_WRITES]
        return [each for each in tried if each.retry_s is None or each.retry_s <= now_s]

    def _request(self, file: _File) -> WriteRequest:
        job, weights = file.job, None
        with contextlib.suppress(OSError):  # they cannot be read any more
            is_random = self._pool.settings.has_random_weights
            weights = "random" if is_random else weights_id(job.checkpoint)
        return WriteRequest(
            job_id=job.job_id,
            shape=job.trajectory.frames_shape,
            path=str(self._path_of(file)),
            fps=job.spec.fps,
            metadata=describe(job.spec, weights=weights),
            replaces=job.replaces,
            replaces_numbered=job.replaces_numbered,
            made_for={"id": job.job_id, "spec_hash": job.info.spec_hash, "job_file": job.info.job_file},
        )

    def _path_of(self, file: _File) -> Path:
        return self._output_dir / file.job.info.file

    def release(self, job_id: str) -> None:
        """The file is there, or the job has ended: keep nothing of it."""
        if job_id in self._files:
            os.close(self._files.pop(job_id).frames)

    def close(self) -> None:
        for job_id in list(self._files):
            self.release(job_id)
