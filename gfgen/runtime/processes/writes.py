"""Frames on their way from a worker to a file: their memory, and the writer that encodes them.

A writer gets one file at a time. The others wait here for whichever writer is free first.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfgen.models.geometry.weight_files import weights_id
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import Event, FramesLost, OutputFailed, OutputWritten
from gfgen.runtime.files.metadata import describe
from gfgen.runtime.ipc.messages import WriteDone, WriteFailed, WriteRequest
from gfgen.runtime.processes.child import Joined, Lost, Phase, WriterProcess
from gfgen.runtime.processes.pool import WorkerPool

logger = logging.getLogger(__name__)

MAX_WRITES = 2
"""A file is given up after this many writers have died with it."""
RETRY_S = 5.0
"""Pause before a file for which the disk had no room is written again."""
SLOWEST_BYTES_PER_S = 1e6
"""A slower writer hangs: encoding takes about 1 s for 50 MB on one core."""


@dataclass(slots=True, eq=False)
class _Write:
    """Kept until the file is there, because the writer may die."""

    request: WriteRequest
    frames: int
    writer: WriterProcess | None = None
    begun_s: float = 0.0
    num_tries: int = 0
    retry_s: float | None = None
    """When to try again, if the disk was full."""


class Writes:
    """Hands frames to idle writers.

    With `waits_for_space`, a file for which the disk has no room waits until there is room or the run stops;
    otherwise its job fails.
    """

    def __init__(self, pool: WorkerPool, output_dir: Path, *, waits_for_space: bool = False) -> None:
        self._waits_for_space = waits_for_space
        self._pool = pool
        self._output_dir = output_dir
        self._frames: dict[str, int] = {}
        self._writes: dict[str, _Write] = {}

    def new_frames(self, job: AdmittedJob) -> int:
        """Memory for a job's frames, uint8 [F, H, W, 3]; replaces that of a failed attempt.

        The rank makes it larger if only the decode knows their size.
        """
        self._close_frames(job.job_id)
        fd = os.memfd_create("gfgen-frames", os.MFD_CLOEXEC)
        os.truncate(fd, job.trajectory.artifact("frames").size_bytes)
        self._frames[job.job_id] = fd
        return fd

    def begin(self, job: AdmittedJob) -> None:
        """The frames are complete: write them."""
        request = WriteRequest(
            job_id=job.job_id,
            shape=job.trajectory.frames_shape,
            path=str(self._output_dir / job.info.file),
            fps=job.spec.fps,
            metadata=describe(job.spec, weights=self._weights_of(job.checkpoint)),
            replaces=job.replaces,
            replaces_numbered=job.replaces_numbered,
            made_for={
                "id": job.job_id,
                "spec_hash": job.info.spec_hash,
                "job_file": job.info.job_file,
            },
        )
        self._writes[job.job_id] = _Write(request, self._frames.pop(job.job_id))
        self.give_out()

    def ended(self, job_id: str) -> None:
        """The writer has answered."""
        write = self._writes.pop(job_id, None)
        if write is not None:
            os.close(write.frames)
            self.give_out()

    def overdue(self, *, patience_s: float) -> Iterator[WriterProcess]:
        """Writers that have taken this much longer for a file than the slowest would."""
        for write in self._writes.values():
            allowed_s = patience_s + os.fstat(write.frames).st_size / SLOWEST_BYTES_PER_S
            if write.writer is not None and time.monotonic() > write.begun_s + allowed_s:
                yield write.writer

    def forgive(self, paused_s: float) -> None:
        """The control process did not run for this time, which counts for no writer."""
        for write in self._writes.values():
            write.begun_s += paused_s

    def events_of(self, writer: WriterProcess, what: Any, now_s: float) -> Iterator[Event]:
        """The events that a writer's message, or its start or end, means for the run."""
        match what:
            case WriteDone():
                self.ended(what.job_id)
                idx = self._pool.writers.index(writer)
                facts = (what.path, what.size_bytes, what.write_s, idx, what.sha256, what.files, what.made)
                yield OutputWritten(now_s, what.job_id, *facts)
            case WriteFailed(is_full=True) if self._waits_for_space and what.job_id in self._writes:
                self._postpone(self._writes[what.job_id], what.reason)
                yield from self.give_out_again(now_s)
            case WriteFailed():
                self.ended(what.job_id)
                yield OutputFailed(now_s, what.job_id, what.reason)
            case Joined():
                self.give_out()
            case Lost():
                yield from self._writer_lost(writer, what, now_s)

    def _writer_lost(self, writer: WriterProcess, lost: Lost, now_s: float) -> Iterator[Event]:
        """Let another writer write the file of a dead one, unless two have died with it."""
        from gfgen.runtime.files.outputs import (
            remove_unfinished,  # imports numpy, which --help can do without
        )

        when = f" in {lost.pause_s:g} s" if lost.pause_s else ""
        logger.warning("%s is gone (%s); a new one is started%s", writer.name, lost.reason, when)
        for write in [write for write in self._writes.values() if write.writer is writer]:
            write.writer = None
            if writer.process.pid is not None:
                remove_unfinished(Path(write.request.path), pid=writer.process.pid)
            if write.num_tries >= MAX_WRITES:
                yield OutputFailed(now_s, write.request.job_id, f"its writer died twice: {lost.reason}")
        self.give_out()
        if self._pool.is_stopping and not writer.has_started:  # the run would never end
            yield from self._lose(self._waiting(), f"{writer.name} cannot start: {lost.reason}", now_s)

    def _postpone(self, write: _Write, reason: str) -> None:
        """Write it later; frames stay in memory, and further decodes wait (State.holds_back)."""
        if write.retry_s is None:
            job_id = write.request.job_id
            logger.error("job %s: %s; it is written when there is room", job_id, reason)
        write.writer, write.num_tries = None, write.num_tries - 1
        write.retry_s = time.monotonic() + RETRY_S

    def give_out_again(self, now_s: float) -> Iterator[Event]:
        """Give out files for which the disk had no room; a run that stops loses their frames instead."""
        postponed = [w for w in self._writes.values() if w.retry_s is not None and w.writer is None]
        if not postponed:
            return
        if self._pool.is_stopping:
            yield from self._lose(postponed, "the disk was full when the run stopped", now_s)
        self.give_out()

    def _lose(self, writes: Sequence[_Write], reason: str, now_s: float) -> Iterator[Event]:
        """Their decodes have to run again."""
        for job_id in [write.request.job_id for write in writes]:
            os.close(self._writes.pop(job_id).frames)
            yield FramesLost(now_s, job_id, reason, lost=True)

    def release(self, job_id: str) -> None:
        """The job has ended: keep nothing of it."""
        self._close_frames(job_id)
        self.ended(job_id)

    def close(self) -> None:
        for job_id in {*self._frames, *self._writes}:
            self.release(job_id)

    def give_out(self) -> None:
        """Give every idle writer a file that waits."""
        busy = [write.writer for write in self._writes.values()]
        idle = [each for each in self._pool.writers if each.phase is Phase.SERVING and each not in busy]
        for writer, write in zip(idle, self._waiting(), strict=False):
            write.writer, write.begun_s, write.num_tries = writer, time.monotonic(), write.num_tries + 1
            writer.tell(write.request, (write.frames,))

    def _weights_of(self, checkpoint: Path) -> str | None:
        """What names a model's weights; None if its files cannot be read any more."""
        try:
            return "random" if self._pool.settings.has_random_weights else weights_id(checkpoint)
        except OSError:
            return None

    def _waiting(self) -> list[_Write]:
        waiting = [w for w in self._writes.values() if w.writer is None and w.num_tries < MAX_WRITES]
        return [w for w in waiting if w.retry_s is None or w.retry_s <= time.monotonic()]

    def _close_frames(self, job_id: str) -> None:
        if job_id in self._frames:
            os.close(self._frames.pop(job_id))
