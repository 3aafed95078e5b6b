"""Run a workload on stock diffusers, first come first served.

The devices are divided into groups of processes. A group uses diffusers' own context parallelism, at the
largest degree that it accepts for every kind of job. The next job by arrival goes to the first free group.
Arrivals, timeouts and scores are those of gfgen's runs.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gfgen.bench.stock_worker import (
    FileWritten,
    JobMade,
    MakeJob,
    RankAnswer,
    StockRanks,
    StockSettings,
    TryJob,
    serve,
)
from gfgen.errors import PolicyError, WorkerError
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome
from gfgen.system.wording import counted

NAME = "diffusers"
PATIENCE_S = 600.0
"""For loading and for any answer: the first step of a shape may compile."""
ENDING_S = 2.0
"""For all ranks of a group to end; then they are killed."""


@dataclass(frozen=True, slots=True)
class StockOptions:
    """`diffusers[,degree=N][,uneven=true][,compiled=true]`"""

    text: str = NAME
    degree: int | None = None
    """Ranks per group; None: as many as diffusers accepts."""
    is_uneven: bool | None = None
    """Whether shards may differ in length; None: only if diffusers refuses otherwise."""
    is_compiled: bool = False


def is_stock(text: str) -> bool:
    return text.partition(",")[0].strip() == NAME


def stock_options(text: str, *, num_ranks: int | None = None) -> StockOptions:
    """Parse the options. Raises PolicyError for unknown ones, and for groups of more than `num_ranks`."""
    found = StockOptions(text)
    for assignment in text.split(",")[1:]:
        name, _, value = assignment.strip().partition("=")
        if name == "degree" and value.isascii() and value.isdigit() and int(value) > 0:
            found = replace(found, degree=int(value))
        elif name == "uneven" and value in ("true", "false"):
            found = replace(found, is_uneven=value == "true")
        elif name == "compiled" and value in ("true", "false"):
            found = replace(found, is_compiled=value == "true")
        else:
            raise PolicyError(
                f"{text}: {assignment.strip()!r} is not an option of {NAME}; it has degree=N, "
                "uneven=true and compiled=true"
            )
    if num_ranks is not None and (found.degree or 1) > num_ranks:
        raise PolicyError(f"{text}: the largest degree on {counted(num_ranks, 'rank')} is {num_ranks}")
    return found


def run_stock(
    jobs: Sequence[AdmittedJob],
    options: StockOptions,
    ranks: StockRanks,
    *,
    folder: Path,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[Sequence[JobOutcome], str]:
    """The outcomes, and the groups in words. Raises: WorkerError when a process dies or diffusers refuses."""
    with _accepted_groups(jobs, options, ranks, tell) as (groups, way):
        for group in groups:
            group.tell(*[TryJob(job.spec, is_to_decode=True) for job in _kinds(jobs)])
        for group in groups:
            if (error := group.error(len(_kinds(jobs)))) is not None:
                raise WorkerError(f"{options.text}: warming up: {error}")
        tell(f"{options.text}: {way}")
        outcomes = _Service(jobs, groups, folder, way).run()
    return outcomes, way


def make_alone(jobs: Sequence[AdmittedJob], ranks: StockRanks, folder: Path) -> Sequence[JobOutcome]:
    """The outcomes of jobs that one pipeline makes in turn, until one fails; `timings` have `step_s`.

    Raises: WorkerError when its process dies or cannot load the model.
    """
    outcomes: list[JobOutcome] = []
    with ExitStack() as stack:
        groups = _started(stack, StockOptions(), ranks, 1, is_uneven=False)
        for job in jobs:
            outcomes += _Service([job], groups, folder, NAME).run()
            if outcomes[-1].error is not None:
                break
    return outcomes


@dataclass(slots=True)
class _StockGroup:
    processes: list[BaseProcess]
    connections: list[Connection]
    job: AdmittedJob | None = None
    started_s: float = 0.0
    pending: set[int] = field(default_factory=set)

    def tell(self, *messages: Any) -> None:
        for connection in self.connections:
            for message in messages:
                connection.send(message)

    def error(self, num_answers: int = 1) -> str | None:
        """The first error among each rank's next answers. Raises: WorkerError for a dead or silent one."""
        missing = dict.fromkeys(self.connections, num_answers)
        while missing:
            ready = wait(list(missing), PATIENCE_S)
            if not ready:
                raise WorkerError(f"{NAME}: no answer after {PATIENCE_S:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                answer = _received(connection)
                assert isinstance(answer, RankAnswer), answer
                if answer.error is not None:  # other ranks may wait for this one in a collective
                    return answer.error
                missing[connection] -= 1
                if not missing[connection]:
                    del missing[connection]
        return None

    def close(self) -> None:
        """End the processes; kill those that hang in a collective."""
        for connection in self.connections:
            connection.close()
        until_s = time.monotonic() + ENDING_S
        for process in self.processes:
            process.join(max(0.0, until_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _received(connection: Connection) -> object:
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        raise WorkerError(f"{NAME}: a process died") from None


@contextmanager
def _accepted_groups(
    jobs: Sequence[AdmittedJob], options: StockOptions, ranks: StockRanks, tell: Callable[[str], None]
) -> Iterator[tuple[list[_StockGroup], str]]:
    """Groups of the largest degree at which every kind of job runs, and a description of them."""
    refusal = None
    for degree in [options.degree] if options.degree else _degrees(ranks.num_ranks):
        is_given = degree == 1 or options.is_uneven is not None
        for is_uneven in [bool(options.is_uneven)] if is_given else [False, True]:
            with ExitStack() as stack:
                groups = _started(stack, options, ranks, degree, is_uneven=is_uneven)
                refusal = _refusal(jobs, groups[0], is_uneven=is_uneven)
                if refusal is None:
                    yield groups, _words(degree, len(groups), options, is_uneven=is_uneven)
                    return
            shards = " with uneven shards" if is_uneven else ""
            tell(f"{options.text}: refused on {degree}{shards}: {refusal}")
    raise WorkerError(f"{options.text}: not accepted: {refusal}")


def _started(
    stack: ExitStack, options: StockOptions, ranks: StockRanks, degree: int, *, is_uneven: bool
) -> list[_StockGroup]:
    context = multiprocessing.get_context("spawn")
    stores = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gfgen-stock-")))
    visible = _visible_devices(ranks.num_ranks) if ranks.device != "cpu" else None
    groups = []
    for first in range(0, ranks.num_ranks - degree + 1, degree):
        group = _StockGroup([], [])
        stack.callback(group.close)
        groups.append(group)
        for rank in range(degree):
            ours, theirs = context.Pipe()
            settings = StockSettings(
                ranks,
                rank,
                degree,
                store=str(stores / f"store-{first}"),
                visible=None if visible is None else ",".join(visible[first : first + degree]),
                is_uneven=is_uneven,
                is_compiled=options.is_compiled,
                num_threads=_threads_of(ranks),
            )
            process = context.Process(target=serve, args=(theirs, settings), daemon=True)
            process.start()
            theirs.close()
            group.processes.append(process)
            group.connections.append(ours)
    for group in groups:
        if (error := group.error()) is not None:
            raise WorkerError(f"{NAME}: {error}")
    return groups


def _refusal(jobs: Sequence[AdmittedJob], group: _StockGroup, *, is_uneven: bool) -> str | None:
    """The first error of all kinds of job on one group, with the shortest text: shards must not be empty."""
    texts = sorted(_texts(jobs), key=lambda job: len(job.spec.prompt))
    for job in [*_kinds(jobs), *(texts[:1] if is_uneven else texts)]:
        group.tell(TryJob(job.spec))
        if (error := group.error()) is not None:
            return error
    return None


def _degrees(num_ranks: int) -> list[int]:
    return [degree for degree in range(num_ranks, 0, -1) if num_ranks % degree == 0]


def _kinds(jobs: Sequence[AdmittedJob]) -> list[AdmittedJob]:
    return list({job.shape: job for job in jobs}.values())


def _texts(jobs: Sequence[AdmittedJob]) -> list[AdmittedJob]:
    """One job of each prompt, if ranks share prompts without padding."""
    if not jobs or jobs[0].info.family != "qwen-image":
        return []
    smallest = min(jobs, key=lambda job: job.state_bytes)
    alike = [job for job in jobs if job.shape == smallest.shape]
    return list({job.spec.prompt: job for job in alike}.values())


def _words(degree: int, num_groups: int, options: StockOptions, *, is_uneven: bool) -> str:
    groups = f"{num_groups} group{'s' if num_groups > 1 else ''} of {degree}"
    shards = ", uneven shards (ulysses_anything)" if is_uneven and degree > 1 else ""
    return f"{groups}{shards}{', blocks compiled' if options.is_compiled else ''}"


def _threads_of(ranks: StockRanks) -> int:
    """One per CPU rank, as in gfgen; with GPUs a share of the cores, as in a plain script."""
    return 1 if ranks.device == "cpu" else max(1, len(os.sched_getaffinity(0)) // ranks.num_ranks)


def _visible_devices(num_ranks: int) -> list[str]:
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    return own.split(",")[:num_ranks] if own else [str(rank) for rank in range(num_ranks)]


@dataclass(eq=False)
class _Service:
    jobs: Sequence[AdmittedJob]
    groups: Sequence[_StockGroup]
    folder: Path
    way: str

    def __post_init__(self) -> None:
        self._coming = deque(sorted(self.jobs, key=lambda job: job.spec.arrival_s))
        self._open = {job.job_id: job for job in self.jobs}
        self._started_s: dict[str, float] = {}
        self._busy_s: dict[str, float] = {}
        self._step_s: dict[str, float | None] = {}
        self._outcomes: list[JobOutcome] = []
        self._began_s = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    def run(self) -> list[JobOutcome]:
        while self._open:
            self._time_out()
            self._start()
            self._listen()
        return self._outcomes

    def _time_out(self) -> None:
        """Fail jobs after their timeout. Running ones continue, since nothing can stop them."""
        for job in list(self._open.values()):
            timeout_s = job.spec.timeout_s
            if timeout_s is not None and self.now_s > job.spec.arrival_s + timeout_s:
                if job in self._coming:
                    self._coming.remove(job)
                self._end(job.job_id, f"timed out {timeout_s:g} s after its arrival")

    def _start(self) -> None:
        for group in self.groups:
            if group.job is None and self._coming and self._coming[0].spec.arrival_s <= self.now_s:
                job = group.job = self._coming.popleft()
                group.started_s = self._started_s[job.job_id] = self.now_s
                group.pending = set(range(len(group.connections)))
                group.tell(MakeJob(job.spec, self.folder / job.info.file))

    def _listen(self) -> None:
        senders = {
            connection: (group, rank)
            for group in self.groups
            for rank, connection in enumerate(group.connections)
        }
        for connection in wait(list(senders), self._patience_s()):
            assert isinstance(connection, Connection)
            group, rank = senders[connection]
            self._take(group, rank, _received(connection))

    def _patience_s(self) -> float:
        specs, is_idle = [job.spec for job in self._open.values()], any(x.job is None for x in self.groups)
        due_s = [self._coming[0].spec.arrival_s] if self._coming and is_idle else []
        due_s += [spec.arrival_s + spec.timeout_s for spec in specs if spec.timeout_s is not None]
        return max(0.0, min(due_s, default=PATIENCE_S) - self.now_s) + 1e-3

    def _take(self, group: _StockGroup, rank: int, message: object) -> None:
        match message:
            case JobMade():
                group.pending.discard(rank)
                if message.error is not None:
                    if group.pending:  # the other ranks may wait for this one in a collective
                        raise WorkerError(f"{NAME}: job {message.job_id}: {message.error}")
                    self._end(message.job_id, message.error)
                if not group.pending:
                    self._busy_s[message.job_id] = self.now_s - group.started_s
                    self._step_s[message.job_id] = message.step_s
                    group.job = None
            case FileWritten():
                self._end(message.job_id, message.error)
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _end(self, job_id: str, error: str | None) -> None:
        job = self._open.pop(job_id, None)
        if job is None:
            return
        arrival_s, deadline_s = job.spec.arrival_s, job.spec.deadline_s
        self._outcomes.append(
            JobOutcome(
                info=job.info,
                status="failed" if error else "done",
                arrival_s=arrival_s,
                started_s=self._started_s.get(job_id),
                ended_s=self.now_s,
                deadline_s=None if deadline_s is None else arrival_s + deadline_s,
                busy_s=self._busy_s.get(job_id, 0.0),
                layouts=(self.way,),
                error=error,
                timings={"step_s": self._step_s.get(job_id)},
            )
        )
