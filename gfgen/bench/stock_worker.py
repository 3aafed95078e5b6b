"""The process of one rank of a stock diffusers pipeline, which receives messages through a connection.

    TryJob(spec)            two steps of a job                      -> None, or why it refuses
    MakeJob(spec, path)     a job                                   -> JobMade; later FileWritten, by rank 0

Every rank answers. Nothing here imports torch before the process has set its visible devices.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gfgen.errors import in_one_line
from gfgen.job.spec import JobSpec

TRIED_STEPS = 2
"""Flow matching with one step divides by zero."""


@dataclass(frozen=True, slots=True)
class StockRanks:
    checkpoint: Path
    num_ranks: int
    device: str
    """"cpu", or "cuda": a rank has the visible device of its number."""
    has_random_weights: bool = False
    vae_dtype: str = "auto"
    moved: str | None = None
    """As of `StockPipeline`."""


@dataclass(frozen=True, slots=True)
class StockSettings:
    ranks: StockRanks
    rank: int
    num_ranks: int
    store: str
    visible: str | None = None
    is_uneven: bool = False
    is_compiled: bool = False
    num_threads: int = 1
    """Threads of torch on the host."""


@dataclass(frozen=True, slots=True)
class TryJob:
    """Try whether diffusers accepts this job; with its decode, this loads and compiles all that it needs."""

    spec: JobSpec
    is_to_decode: bool = False


@dataclass(frozen=True, slots=True)
class MakeJob:
    spec: JobSpec
    path: Path


@dataclass(frozen=True, slots=True)
class RankAnswer:
    error: str | None = None


@dataclass(frozen=True, slots=True)
class JobMade:
    """A rank is free again; the file may not be written yet."""

    job_id: str
    error: str | None = None
    step_s: float | None = None
    """As of `StockPipeline`."""


@dataclass(frozen=True, slots=True)
class FileWritten:
    job_id: str
    error: str | None = None


def serve(connection: Connection, settings: StockSettings) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the connection
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # no NVLink multicast (benchmarks/README.md)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    if settings.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.visible
    with suppress(OSError):  # the parent has closed the connection
        try:
            pipeline = _pipeline(settings)
        except Exception as error:
            connection.send(RankAnswer(in_one_line(error)))
            return
        connection.send(RankAnswer())
        writer = _FileWriter(connection)
        while (message := _received(connection)) is not None:
            writer.send(_answer(pipeline, message, writer if settings.rank == 0 else None))


def _pipeline(settings: StockSettings) -> Any:
    import torch

    from gfgen.models.stepping.check import StockPipeline, join_group

    torch.set_num_threads(settings.num_threads)
    ranks = settings.ranks
    device = ranks.device if ranks.device == "cpu" else f"cuda:{settings.rank}"
    if settings.num_ranks > 1:
        join_group(rank=settings.rank, num_ranks=settings.num_ranks, store=settings.store, device=device)
    return StockPipeline(
        ranks.checkpoint,
        device=device,
        num_ranks=settings.num_ranks,
        is_uneven=settings.is_uneven,
        is_compiled=settings.is_compiled,
        has_random_weights=ranks.has_random_weights,
        vae_dtype=ranks.vae_dtype,
        moved=ranks.moved,
    )


def _answer(pipeline: Any, message: object, writer: _FileWriter | None) -> RankAnswer | JobMade:
    match message:
        case TryJob(spec, is_to_decode):
            try:
                pipeline.generate(spec, steps=TRIED_STEPS, is_to_decode=is_to_decode)
            except Exception as error:  # a refusal is a result, too
                return RankAnswer(in_one_line(error))
            return RankAnswer()
        case MakeJob(spec, path):
            try:
                frames = pipeline.generate(spec)
            except Exception as error:
                return JobMade(spec.id, in_one_line(error))
            if writer is not None:
                writer.begin(spec, path, frames)
            return JobMade(spec.id, step_s=pipeline.step_s)
        case _:
            raise AssertionError(f"unknown message {message!r}")


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return None


class _FileWriter:
    """A thread that writes files while the device continues, to give plain diffusers every advantage."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._thread = ThreadPoolExecutor(1)

    def begin(self, spec: JobSpec, path: Path, frames: Any) -> None:
        self._thread.submit(self._write, spec, path, frames)

    def send(self, answer: object) -> None:
        with self._lock:
            self._connection.send(answer)

    def _write(self, spec: JobSpec, path: Path, frames: Any) -> None:
        error = None
        try:
            from gfgen.runtime.files.outputs import write_output
            from gfgen.runtime.files.writer import frames_by_file

            fps = spec.fps if len(frames) > 1 else None
            for each, part in frames_by_file(frames, path, fps=fps).items():
                write_output(part, each, fps=fps, metadata={})
        except Exception as problem:
            error = in_one_line(problem)
        with suppress(OSError):
            self.send(FileWritten(spec.id, error))
