"""A node of a Ray cluster: the driver's end of its actor, and how files come to the driver's folder."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from gfgen.cluster.member import (
    MemberOptions,
    NodeActor,
    Noted,
    Ready,
    Start,
    attempt_folder,
    versions_here,
)
from gfgen.cluster.node import JobEnded, NodeNotes, Report
from gfgen.errors import GfgenError, InputError, ModelError, OutputError, WorkerError
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel
from gfgen.runtime.core.events import Clock, Event
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.ipc.content import Content, name_file, remove_replaced, temporary_name
from gfgen.session.feed import Cancel, Ended, Gone
from gfgen.session.ranks import Ranks

POLL_S = 5.0
"""A node answers within this time, with or without reports."""
SILENCE_S = 30.0
"""A node that is silent for this time after it should have answered is given up."""
START_S = 120.0
"""An actor that has not started by then is waiting for resources that others hold."""
MODELS_S = 7200.0
"""A node that has not found and downloaded a model, or not loaded the models, by then is given up."""
_THREADS = 8
"""Of an actor: calls that wait, and others meanwhile."""
CHUNK_BYTES = 8 * 2**20
"""Two of them are in the driver's memory at a time: the one that comes, and the one that is written."""

SHARED_NAME = ".nodes"
"""The folder in the output folder into which nodes write, where they share it."""
Read = Callable[[str, int, int], bytes]
"""(file, offset, size) -> a part of a file of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    address: str
    member: MemberOptions
    output_dir: Path
    is_shared: bool = False
    """Nodes write into the output folder."""
    num_nodes: int | None = None
    """At most so many; None: all."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """That a node must have."""
    scales: bool = False
    """Asks Ray's autoscaler for nodes."""


class RayDriver(Protocol):
    """What a node asks its cluster (ray_cluster.py)."""

    options: RayOptions
    ray: Any
    clock: Clock

    def report(self, report: Report) -> None: ...


class RayNode:
    def __init__(self, cluster: RayDriver, ray_id: str, name: str, resources: Mapping[str, float]) -> None:
        self.name, self.ray_id = name, ray_id
        self.ranks: Ranks | None = None
        """None until its actor has started."""
        self.ready: Ready | None = None
        self.actor: Any = None
        self._cluster = cluster
        self._resources = resources
        self._jobs: dict[int, AdmittedJob] = {}
        self._shared: Path | None = None
        self._ahead_s = 0.0
        self.joined_s = math.inf
        """When it began to take jobs, in monotonic time."""

    @property
    def num_ranks(self) -> int:
        assert self.ranks is not None, "it has not joined"
        return self.ranks.num_ranks

    @property
    def size(self) -> Mapping[str, float]:
        """What a machine like this one offers Ray."""
        kind = "GPU" if self._num_gpus else "CPU"
        return {kind: self._resources[kind]}

    @property
    def _num_gpus(self) -> float:
        return self._resources.get("GPU", 0) if self._cluster.options.member.ranks.device != "cpu" else 0

    def create(self) -> None:
        ray = self._cluster.ray
        options = self._cluster.options
        if options.is_shared:
            self._shared = options.output_dir.absolute() / SHARED_NAME / self.name
            shutil.rmtree(self._shared, ignore_errors=True)
            self._shared.mkdir(parents=True)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self.ray_id, soft=False)
        self.actor = (
            ray.remote(NodeActor)
            .options(
                num_cpus=0 if self._num_gpus else min(1, self._resources.get("CPU", 0)),  # it stands for all
                num_gpus=self._num_gpus,
                max_concurrency=_THREADS,
                max_restarts=0,
                scheduling_strategy=here,
            )
            .remote(options.member, self._shared)
        )
        try:
            versions, ranks = ray.get(self.actor.facts.remote(), timeout=START_S)
        except ray.exceptions.GetTimeoutError:
            raise InputError(f"its GPUs or CPUs are in use by others for {START_S:g} s") from None
        wrong = {name: own for name, own in versions_here().items() if own != versions.get(name)}
        if wrong:
            its = ", ".join(f"{name} {versions.get(name, 'none')}" for name in wrong)
            ours = ", ".join(f"{name} {own}" for name, own in wrong.items())
            raise InputError(f"it has {its} and the driver {ours}: install the same")
        self.ranks = ranks
        self._ahead_s = self._measured_ahead_s()

    def _measured_ahead_s(self) -> float:
        """How far its clock is ahead of the driver's."""
        asked_at = time.time()
        its: float = self._cluster.ray.get(self.actor.time.remote(), timeout=SILENCE_S)
        return its - (asked_at + time.time()) / 2

    def load(self, models: Sequence[str]) -> None:
        for name in models:
            self.find_model(name)
        answer = self._answer(self.actor.load.remote(models), "loaded the models")
        if not isinstance(answer, Ready):
            raise InputError(str(answer.error))
        self.ready = answer

    def find_model(self, name: str) -> ResolvedModel:
        """Raises: ModelError if it has no such model."""
        try:
            found: ResolvedModel = self._answer(self.actor.find_model.remote(name), f"found {name}")
        except ModelError as error:
            raise original(error) from None
        return found

    def _answer(self, call: Any, done: str) -> Any:
        """What a call returns, while the actor shows that it lives. Raises: InputError; Ray's errors."""
        ray, until_s = self._cluster.ray, time.monotonic() + MODELS_S
        while True:
            try:
                return ray.get(call, timeout=POLL_S)
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() > until_s:
                    raise InputError(f"it has not {done} for {MODELS_S:g} s") from None
            ray.get(self.actor.time.remote(), timeout=SILENCE_S)

    def start(self, job: AdmittedJob, *, attempt: int) -> None:
        self._jobs[attempt] = job
        self.actor.send.remote(Start(job.info, attempt))

    def cancel(self, attempt: int) -> None:
        self.actor.send.remote(Cancel(attempt))

    def tell(self, event: Event) -> None:
        self.actor.send.remote(event)

    def greet(self) -> None:
        """Let the actor know that its driver lives."""
        self._cluster.ray.get(self.actor.take_reports.remote(0.0), timeout=SILENCE_S)

    def follow(self) -> None:
        """Pass on what the node reports until it is gone."""
        ray = self._cluster.ray
        while True:
            found = ray.get(self.actor.take_reports.remote(POLL_S), timeout=POLL_S + SILENCE_S)
            for report in found:
                if isinstance(report, Gone):
                    raise WorkerError(str(report.error))
                if isinstance(report, Ended):
                    self._cluster.report(self._delivered(report))
                if isinstance(report, Noted) and self.ready is not None:
                    begins_s = self.ready.began_at - self._ahead_s - self._cluster.clock.started_at
                    self._cluster.report(NodeNotes(self.name, report.notes, begins_s))

    def _delivered(self, ended: Ended) -> JobEnded:
        ray, outcome, job = self._cluster.ray, ended.outcome, self._jobs.pop(ended.attempt)
        if outcome.status != "done":
            return JobEnded(self.name, ended.attempt, outcome)
        output_dir = self._cluster.options.output_dir
        delivery = FileDelivery(job, outcome, attempt=ended.attempt, output_dir=output_dir)
        if self._shared is not None:
            delivery.take(self._shared)
            return JobEnded(self.name, ended.attempt, outcome, delivery)
        try:
            delivery.fetch(
                lambda file, at, size: ray.get(self.actor.read.remote(file, at, size), timeout=SILENCE_S)
            )
        except OutputError as error:
            return JobEnded(self.name, ended.attempt, replace(outcome, status="failed", error=str(error)))
        finally:
            self.actor.forget.remote(ended.attempt)
        return JobEnded(self.name, ended.attempt, outcome, delivery)

    def end(self) -> None:
        """Let the node go; its actor ends at once if it does not answer."""
        ray = self._cluster.ray
        with contextlib.suppress(Exception):
            ray.get(self.actor.stop.remote(), timeout=SILENCE_S)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(Exception):
            self._cluster.ray.kill(self.actor)


def original(error: Exception) -> Exception:
    """What an actor raised; Ray raises an exception that is of its own class, too."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def said(error: Exception) -> str:
    if isinstance(error, GfgenError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    known = {
        "ActorDiedError": "its actor died, or the machine",
        "ActorUnavailableError": "it cannot be reached",
        "GetTimeoutError": "it does not answer",
    }
    if "creation task" in str(error):  # the actor's own error is in the last line
        return lines[-1][:300]
    return known.get(kind) or (lines[-1][:300] if lines else kind)


class FileDelivery:
    """Complete files of one attempt under temporary names."""

    def __init__(self, job: AdmittedJob, outcome: JobOutcome, *, attempt: int, output_dir: Path) -> None:
        self._job, self._outcome, self._attempt = job, outcome, attempt
        self._path = output_dir / job.info.file
        self._names = [name for name, _, _ in outcome.files] or [self._path.name]
        self._temporary: dict[str, Path] = {}

    def fetch(self, read: Read) -> None:
        """Copy the files into the output folder. Raises: OutputError; what `read` raises."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for name in self._names:
                # Like those of writers, so that the next run removes what this one leaves.
                pid = int(f"{os.getpid()}{self._attempt:06}")
                temporary = self._temporary[name] = temporary_name(self._path.with_name(name), pid=pid)
                with temporary.open("wb") as stream:
                    offset = 0
                    while chunk := read(self._on_node(name), offset, CHUNK_BYTES):
                        stream.write(chunk)
                        offset += len(chunk)
        except OSError as error:
            self.drop()
            raise OutputError(f"cannot write {self._path}: {error.strerror or error}") from error

    def take(self, folder: Path) -> None:
        """Use the files where they are, in a folder on the same file system."""
        self._temporary = {name: folder / self._on_node(name) for name in self._names}

    def publish(self) -> JobOutcome:
        info, sizes = self._job.info, {name: (size, digest) for name, size, digest in self._outcome.files}
        if self._outcome.written is not None and not sizes:
            sizes = {self._path.name: (self._outcome.written.size_bytes, self._outcome.written.sha256)}
        made_for = {"id": info.job_id, "spec_hash": info.spec_hash, "job_file": info.job_file}
        try:
            for name, temporary in self._temporary.items():
                is_only = len(self._temporary) == 1
                own = self._job.replaces if is_only else None
                replaces = self._job.replaces_numbered.get(name, own)
                path = self._path.with_name(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                if temporary.stat().st_size != sizes[name][0]:
                    raise OutputError(f"{path}: only a part of the file came from its node")
                found = name_file(temporary, path, replaces=replaces, made_for=made_for if is_only else None)
                if found != Content(*sizes[name]):
                    raise OutputError(f"{path}: the file changed on its way from its node; run again")
            remove_replaced(self._path, self._names, self._job.replaces_numbered)
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror or error}") from error
        finally:
            self.drop()
        return replace(self._outcome, info=info)

    def drop(self) -> None:
        for temporary in self._temporary.values():
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _on_node(self, name: str) -> str:
        return str(Path(attempt_folder(self._attempt), self._job.info.file).with_name(name))
