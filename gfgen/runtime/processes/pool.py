"""Worker and writer processes: starting, replacing and ending them.

CUDA and its like must not be initialised before a process starts, and importing torch takes
seconds: so processes are forked from a fork server that has the imports done and has run
nothing yet. A pool outlives a run: the next one starts on warm workers.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.process
import os
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.selector import tuned_tables
from gfgen.models.geometry.checkpoint import model_name
from gfgen.models.geometry.weight_files import weights_mark
from gfgen.runtime.ipc.arenas import RankArenas, default_plan
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.messages import (
    Arenas,
    Loading,
    ModelsSet,
    PeerReplaced,
    ReplacePeer,
    SetModels,
    WarmedUp,
    WarmUp,
    WorkerFailed,
    WorkerReady,
)
from gfgen.runtime.processes.loads import Loads
from gfgen.runtime.processes.watchdog import Patience
from gfgen.system import descriptors, forkserver
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
DEATHS_WINDOW_S = 600.0
"""A rank that dies so often within this time is retired: something is wrong with its device."""
WORKER_MAINS = {"cpu": "gfgen.runtime.worker.host:main", "cuda": "gfgen.runtime.worker.gpu:main"}
"""By what a rank computes on: where its process begins."""
_PROGRAMS = ("gfgen.runtime.worker.host", "gfgen.runtime.files.writer")
PRELOADS = {
    "cpu": (*_PROGRAMS, "gfgen.models.families.wan_adapter", "gfgen.models.families.qwen_adapter"),
    "cuda": _PROGRAMS,
}
"""What the fork server imports, once, before it forks the first process; by what ranks compute on. Ranks on
GPUs import diffusers by themselves, all at the same time: whatever it asks CUDA then, no fork inherits."""
MAX_FORKS = 3
"""Tries to start a process when it, or the fork server, is killed before it is known."""
TELL_S = 10.0
"""While ranks start, a line says so often what they are doing."""
_EXIT_S = 5.0
"""How long a process may take to end after its channel is closed, before it is killed."""
WRITER_PAUSE_S, MAX_WRITER_PAUSE_S = 0.1, 10.0
"""Before there is another writer in place of one that could not start; doubles each time."""


def default_writers(*, num_ranks: int, num_cores: int) -> int:
    """As many as there are GPUs, which may all decode at once, as long as each has four cores: a writer keeps
    some busy while it encodes (`outputs.encoder_threads`), and each rank one."""
    return max(1, min(num_ranks, num_cores // 4))


@dataclass(slots=True, eq=False)
class Child:
    """A process and the channel to it."""

    name: str
    process: BaseProcess
    channel: Channel
    rank: int | None = None
    """None for a writer."""
    incarnation: int = 1
    is_ready: bool = False
    has_arenas: bool = False
    """A worker that knows the others' arenas, and whose own the others know or will be told of."""
    counts_tokens: bool = False
    """It could pad texts."""
    unknown_to: set[int] = field(default_factory=set)
    """Ranks that were told of this new incarnation, and are yet to map its arena."""
    startup_s: float = 0.0
    """How long it took to load its models."""
    started_s: float = field(default_factory=time.monotonic)
    asked_to_load_s: float | None = None
    """Since when it has had models to load, or steps to get ready; None when it has none."""
    loading: str | None = None
    """The checkpoint that it said it begins to load; None when it is ready."""
    num_to_warm: int = 0
    """Kinds of steps that it has yet to get ready before it counts as loaded."""
    untold_warm_ups: deque[WarmUp] = field(default_factory=deque)
    """Kinds of steps to get ready that it is told of one by one."""
    is_warming: bool = False
    """It was told of one, and has not answered yet."""
    load_s: float = 0.0
    """What it has taken for the models of the last change so far."""
    jobs: set[str] = field(default_factory=set)
    """Jobs that this worker knows."""
    killed_s: float | None = None
    """When it was killed, by the machine's monotonic clock."""
    ends_within_s: float = Patience().killed_s
    """How long it may take to end once it is killed."""
    is_stuck: bool = False
    """It was killed and does not end. It runs nothing of ours any more, but its device is not free."""

    @property
    def is_starting_for_s(self) -> float:
        """How long it has been getting ready; 0 when it is."""
        return 0.0 if self.is_ready else time.monotonic() - self.started_s

    @property
    def is_loading_for_s(self) -> float:
        """How long it has been about to hold other models; 0 when it is not."""
        return 0.0 if self.asked_to_load_s is None else time.monotonic() - self.asked_to_load_s

    def tell(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message, without ever waiting for the process.

        To one that is gone, nothing: the end of its channel tells later. One whose socket takes no more is
        taken for stopped or stuck, and is killed. It takes about 200 KB (hundreds of small messages, five
        with the longest prompts), so what comes in bursts and may be large has to wait for answers, as
        `warm_up` does.
        """
        try:
            self.channel.send(message, fds, wait=False)
        except BlockingIOError:
            logger.warning("%s takes no messages and is killed", self.name)
            self.kill()
        except OSError:
            logger.debug("%s is gone", self.name)

    def warm_up(self, items: Sequence[WarmUp]) -> None:
        """Let it get these steps ready: it is told of each when it has answered the one before."""
        self.untold_warm_ups.extend(items)
        self._tell_of_warm_up()

    def forget_warm_ups(self) -> None:
        """What it was not told of yet is no longer wanted."""
        self.num_to_warm = max(0, self.num_to_warm - len(self.untold_warm_ups))
        self.untold_warm_ups.clear()

    def has_warmed_up(self) -> None:
        """It has answered, and can be told of the next."""
        self.is_warming = False
        self._tell_of_warm_up()

    def _tell_of_warm_up(self) -> None:
        if self.untold_warm_ups and not self.is_warming:
            self.is_warming = True
            self.tell(self.untold_warm_ups.popleft())

    def kill(self) -> None:
        """Kill the process; does not wait for its end."""
        self.killed_s = self.killed_s or time.monotonic()
        self.process.kill()

    @property
    def should_have_ended(self) -> bool:
        """It was killed so long ago that its end will not come, nor the end of its channel."""
        return self.killed_s is not None and time.monotonic() > self.killed_s + self.ends_within_s

    def reap(self, *, patience_s: float) -> str:
        """Wait for the process's end, kill it if it does not come; returns how it ended.

        One that does not end then either is left to itself (`is_stuck`). A killed process returns from
        the kernel no more. What it launched on a GPU before waits for signals that will not come, so
        it writes to nobody's arena.
        """
        self.channel.close()
        self.process.join(patience_s)
        if self.process.is_alive() and not self.killed_s:
            logger.warning("%s did not end within %g s and is killed", self.name, patience_s)
            self.kill()
        if self.killed_s:
            self.process.join(max(0.0, self.killed_s + self.ends_within_s - time.monotonic()))
        if self.process.is_alive():
            self.is_stuck = True
            _forget(self.process)
            ending = f"killed, and has not ended {self.ends_within_s:g} s later: a driver or a disk holds it"
            logger.error("%s (process %s): %s", self.name, self.process.pid, ending)
            return ending
        code = self.process.exitcode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


class WorkerPool:
    """One worker per rank, and writers; each rank's arena for exchanges with the others."""

    patience = Patience()
    """With its ranks; longer where they share GPUs."""

    def __init__(
        self,
        *,
        num_ranks: int,
        checkpoints: Sequence[Path],
        worker_main: str | None = None,
        writer_main: str = "gfgen.runtime.files.writer:main",
        device: str = "cpu",
        has_random_weights: bool = False,
        vae_dtype: str = "auto",
        has_graphs: bool = False,
        memory_limit: int | None = None,
        num_gpus: int = 0,
        islands: Sequence[Sequence[int]] | None = None,
        num_writers: int | None = None,
        preload: Sequence[str] | None = None,
        plan: ArenaPlan | None = None,
        are_all_needed: bool = False,
        keep_fds: Sequence[int] = (),
    ) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # their warnings are not the user's to mend
        os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
        # So that nothing that the fork server imports initialises CUDA by asking whether it is there: it does
        # not survive a fork. NVML, which is asked then, does.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        descriptors.allow_most()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADS[device] if preload is None else preload))
        self._keep_fds = keep_fds
        """What all processes keep open until they end."""
        forkserver.ensure_running(keep_fds)
        self._worker_main = worker_main or WORKER_MAINS[device]
        self._writer_main = writer_main
        are_on_gpus = device != "cpu"
        self._plan = plan or default_plan(num_ranks=num_ranks, are_on_gpus=are_on_gpus)
        self._settings: dict[str, Any] = {
            "checkpoints": tuple(map(str, checkpoints)),
            "device": device,
            "has_random_weights": has_random_weights,
            "vae_dtype": vae_dtype,
            "arena_bytes": (self._plan.data_bytes, self._plan.post_bytes),
            "has_graphs": has_graphs,
            "memory_limit": memory_limit,
            "num_gpus": num_gpus,
            "tuned_tables": tuned_tables() if are_on_gpus else {},
        }
        if num_gpus:
            self.patience = self.patience.with_shared_gpus(-(-num_ranks // num_gpus))
        self.islands = tuple([tuple(island) for island in islands or [range(num_ranks)]])
        """Sets of ranks that map each other's arenas, and so can share a layout."""
        self._weights_marks = {path: weights_mark(path) for path in checkpoints}
        self._are_all_needed = are_all_needed
        """Whether a rank that cannot be had ends the start, as where something is measured."""
        self._deaths: dict[int, list[float]] = {rank: [] for rank in range(num_ranks)}
        self.num_ranks = num_ranks
        self.last_number = 0
        """Of the last dispatch that these workers were given, in any run."""
        self.unloadable: dict[str, str] = {}
        """Checkpoints that no rank could load when the workers started, and why."""
        self.retired: set[int] = set()
        """Ranks that died too often, or whose process does not end; they stay away."""
        self._left_out: set[int] = set()
        """Of those: the ones that only a run goes without that is about to end."""
        self._arenas = RankArenas(self._plan, num_ranks=num_ranks, are_on_gpus=are_on_gpus)
        self._counts_tokens: bool | None = None
        """Whether ranks pad texts: settled when they meet, and for all that come later."""
        self.workers: list[Child] = []
        self.writers: list[Child] = []
        self._writer_pauses: dict[int, float] = {}
        """By writer: how long was waited with its successor, which has not started well since, in seconds."""
        self._writers_due: dict[int, float] = {}
        """By writer that is gone: when its successor is started, by the machine's monotonic clock."""
        if num_writers is None:
            cores = len(os.sched_getaffinity(0))
            num_writers = default_writers(num_ranks=num_ranks, num_cores=cores) if are_on_gpus else 1
        try:
            for rank in range(num_ranks):
                self.workers.append(self._start_worker(rank, incarnation=1))
            for idx in range(num_writers):
                self.writers.append(self._start_writer(idx))
        except BaseException:  # those that were started would load their models first, and are waited for
            self.close(at_once=True)
            raise
        if not are_on_gpus:
            self._send_arenas(self.workers)

    @property
    def children(self) -> list[Child]:
        """All processes that are meant to live."""
        return [*self.living, *self.living_writers]

    @property
    def living(self) -> list[Child]:
        """The workers of all ranks that are not retired."""
        return [worker for rank, worker in enumerate(self.workers) if rank not in self.retired]

    @property
    def living_writers(self) -> list[Child]:
        """The writers but for those whose successors are yet to be started."""
        return [writer for idx, writer in enumerate(self.writers) if idx not in self._writers_due]

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Of the models that a worker which starts now holds."""
        held: tuple[str, ...] = self._settings["checkpoints"]
        return held

    @property
    def computed_with(self) -> Mapping[str, Any]:
        """What must be the same for another pool to go on with a job's state: what its tensors are like,
        and which weights made them."""
        return {name: self._settings[name] for name in ("device", "vae_dtype", "has_random_weights")}

    def weights_mark(self, checkpoint: Path) -> str:
        """Of a model's weight files as they were before a rank first loaded them."""
        if checkpoint not in self._weights_marks:
            self._weights_marks[checkpoint] = weights_mark(checkpoint)
        return self._weights_marks[checkpoint]

    @property
    def incarnations(self) -> tuple[int, ...]:
        """By rank."""
        return tuple([worker.incarnation for worker in self.workers])

    def wait_ready(
        self,
        signals: SignalPipe | None = None,
        *,
        patience_s: float | None = None,
        tell_s: float = TELL_S,
    ) -> None:
        """Wait until every worker has loaded its models, but for those that none of them can (`unloadable`),
        and all know each other. The log tells every `tell_s` seconds how far they are.

        One that fails is started again; a rank that fails too often, or does not get ready in time, is
        retired, unless all are needed.

        Raises: WorkerError when no rank or no model is left, or one that is needed, with the reason;
        InterruptedRunError when a signal comes first.
        """
        patience_s = self.patience.starting_s if patience_s is None else patience_s
        began_s = time.monotonic()
        deadline_s, told_s = began_s + patience_s, began_s
        loads = self._new_loads()
        self._bring_back()
        speakers = self.speakers(
            signals,
            doing="the models were loading; nothing was started",
            left_s=lambda: min(deadline_s, told_s + tell_s) - time.monotonic(),
        )
        with contextlib.closing(speakers):
            while not self._know_each_other():
                worker = next(speakers)
                if worker is None and (now_s := time.monotonic()) < deadline_s:
                    logger.info("still starting after %.0f s: %s", now_s - began_s, self._how_far())
                    told_s = now_s
                elif worker is None:
                    why = f"the models are not loaded after {patience_s:g} s"
                    self._leave_behind(why)
                elif reason := self._note_start(worker, loads):
                    self._start_again(worker, loads, reason)

    def _how_far(self) -> str:
        """'1 of 4 ranks ready, 3 loading qwen-image', say."""
        num_ready = sum(worker.is_ready for worker in self.living)
        others = Counter(
            "not loading yet" if worker.loading is None else f"loading {model_name(Path(worker.loading))}"
            for worker in self.living
            if not worker.is_ready
        )
        parts = [f"{num_ready} of {counted(self.num_ranks, 'rank')} ready"]
        return ", ".join([*parts, *(f"{number} {doing}" for doing, number in others.items())])

    def _know_each_other(self) -> bool:
        """Whether all are ready and have mapped all arenas; those that can are told to by this."""
        if not all(worker.is_ready for worker in self.living):
            return False
        late = [worker for worker in self.living if not worker.has_arenas]
        if self._arenas.are_on_gpus:
            self._send_arenas([worker for worker in late if worker.incarnation == 1])
        for worker in late:
            if not worker.has_arenas:
                self.welcome(worker)
        return not any(worker.unknown_to for worker in self.living)

    def warm_up(
        self,
        items: Sequence[WarmUp],
        signals: SignalPipe | None = None,
        *,
        patience_s: float | None = None,
    ) -> Iterator[tuple[WarmUp, WarmedUp]]:
        """Get steps ready on every worker; tells of each item when all have it, or one cannot.

        One that dies is started again, as in `wait_ready`, and finds out in its tasks.

        Raises: WorkerError when no rank is left, or one that is needed, or when none answers in time;
        InterruptedRunError at a signal.
        """
        patience_s = self.patience.warm_up_s if patience_s is None else patience_s
        by_number = {item.number: item for item in items}
        awaited = {item.number: {worker.rank for worker in self.living} for item in items}
        for worker in self.living:
            worker.warm_up(items)
        loads = self._new_loads()
        speakers = self.speakers(
            signals, doing="ranks were warmed up; nothing was started", left_s=lambda: patience_s
        )
        with contextlib.closing(speakers):
            while awaited:
                speaker = next(speakers)
                if speaker is None:
                    raise WorkerError(f"no rank has run a step within {patience_s:g} s of the last one")
                for answer in self._warmed_up(speaker, loads, awaited):
                    awaited[answer.number].discard(speaker.rank)
                    if answer.reason is not None or not awaited[answer.number]:
                        del awaited[answer.number]
                        yield by_number[answer.number], answer
        self.wait_ready(signals)

    def _warmed_up(self, worker: Child, loads: Loads, numbers: Collection[int]) -> Sequence[WarmedUp]:
        """What a worker has to say of items with these numbers: of all of them, where it has died."""
        if not worker.is_ready:  # it takes the place of one that has died
            if reason := self._note_start(worker, loads):
                self._start_again(worker, loads, reason)
            return ()
        received = self.receive(worker)
        if received is None:
            reason = f"{worker.name} died while it was warmed up: {worker.reap(patience_s=_EXIT_S)}"
            self._start_again(worker, loads, reason)
            return [WarmedUp(number, 0.0) for number in numbers]
        answer = received[0]
        return [answer] if isinstance(answer, WarmedUp) and answer.number in numbers else ()

    def receive(self, child: Child) -> tuple[Any, Sequence[int]] | None:
        """The next message of a child, with its descriptors; None when the child is gone."""
        received = child.channel.receive()
        if received is not None and isinstance(received[0], PeerReplaced):
            peer = self.workers[received[0].rank]
            if peer.incarnation == received[0].incarnation and child.rank is not None:
                peer.unknown_to.discard(child.rank)
        elif received is not None and isinstance(received[0], WarmedUp):
            child.has_warmed_up()
        return received

    def speakers(
        self, signals: SignalPipe | None, *, doing: str, left_s: Callable[[], float]
    ) -> Generator[Child | None, None, None]:
        """Workers that have something to say, as it comes, without end; None when nobody does in time.

        Raises: InterruptedRunError when a signal comes.
        """
        with selectors.DefaultSelector() as selector:
            if signals is not None:
                selector.register(signals, selectors.EVENT_READ)
            while True:
                self._listen_to_workers(selector)
                ready = selector.select(max(0.0, left_s()))
                if not ready:
                    yield None
                for key, _ in ready:
                    if key.data is not None or signals is None:
                        yield key.data
                    elif numbers := signals.take():
                        raise InterruptedRunError(f"stopped while {doing}", signal_number=numbers[0])

    def _listen_to_workers(self, selector: selectors.BaseSelector) -> None:
        """To those of now: some may have been replaced, or retired."""
        heard = {key.data: key.fileobj for key in selector.get_map().values() if key.data is not None}
        for worker in heard.keys() - set(self.living):
            selector.unregister(heard[worker])
        for worker in self.living:
            if worker not in heard:
                selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _new_loads(self) -> Loads:
        return Loads({path: Path(path) for path in self.checkpoints})

    def _note_start(self, worker: Child, loads: Loads) -> str | None:
        """A starting worker has said something, or has died; why it does not get ready, if it does not."""
        received = self.receive(worker)
        if received is None:
            return f"{worker.name} died while it started: {worker.reap(patience_s=_EXIT_S)}"
        if isinstance(received[0], WorkerFailed):
            worker.reap(patience_s=_EXIT_S)
            return f"{worker.name} cannot start: {received[0].reason}"
        if isinstance(received[0], Loading):
            worker.loading = received[0].checkpoint
        elif isinstance(received[0], ModelsSet | WarmedUp):  # of a worker that was ready, or is by now
            worker.asked_to_load_s = worker.loading = None
        elif isinstance(received[0], WorkerReady):  # else it answers an earlier run, which has ended
            self.take_ready(worker, received[0], received[1])
            if worker.rank is not None and not self.unloadable:
                loads.succeeded(worker.rank)
        return None

    def _start_again(self, worker: Child, loads: Loads, reason: str) -> None:
        """Another process for a rank that could not start, without the model that it was at if no rank can
        load that; none for a rank that is retired.

        Raises: WorkerError when nothing is left to go on with.
        """
        rank, checkpoint = worker.rank, worker.loading
        assert rank is not None
        loads.lost(rank)
        ranks = set(range(self.num_ranks)) - self.retired
        if checkpoint is not None and loads.failed(checkpoint, rank, ranks=ranks):
            if not set(self.checkpoints) - {checkpoint}:
                raise WorkerError(reason)
            self.do_without(checkpoint)
            self.unloadable[checkpoint] = reason
        is_of_no_rank = checkpoint is not None and (checkpoint in self.unloadable or loads.spares(rank))
        # The run's clock is yet to start: what happens here counts in its first ten minutes.
        successor = self.replace_worker(rank, now_s=0.0, is_to_blame=not is_of_no_rank)
        if successor is None and (self._are_all_needed or not self.living):
            raise WorkerError(reason)
        logger.warning("%s; %s", reason, "it stays away" if successor is None else "a new worker is started")

    def _leave_behind(self, reason: str) -> None:
        """Retire the ranks that are not ready.

        Raises: WorkerError when nothing is left to go on with.
        """
        late = [worker for worker in self.living if not worker.is_ready]
        late = late or [self.workers[rank] for each in self.living for rank in each.unknown_to]
        reason = f"{', '.join(worker.name for worker in late)}: {reason}"
        if self._are_all_needed or len(late) == len(self.living):
            raise WorkerError(reason)
        for worker in late:
            assert worker.rank is not None
            worker.kill()
            worker.reap(patience_s=_EXIT_S)
            self._expect_nothing_of(worker.rank)
            self.retired.add(worker.rank)
        logger.error("%s; the others go on without", reason)

    def take_ready(self, worker: Child, ready: WorkerReady, fds: Sequence[int]) -> None:
        """A worker has loaded its models and brings its arena, if it makes that itself."""
        assert worker.rank is not None
        self._arenas.take(worker.rank, fds)
        worker.is_ready, worker.startup_s, worker.loading = True, ready.startup_s, None
        worker.counts_tokens = ready.counts_tokens

    def replace_worker(self, rank: int, *, now_s: float, is_to_blame: bool = True) -> Child | None:
        """A new process for a rank whose old one is reaped; None when the rank is retired.

        It is when it died too often by its own fault, or when the old process does not end and so holds
        its device.
        The new one is to be told of the others, and they of it, by `welcome`: when it is ready, and nobody is
        inside its predecessor's arena any more.
        """
        self._expect_nothing_of(rank)
        deaths = self._deaths[rank]
        if is_to_blame:
            deaths.append(now_s)
        num_deaths = len([death for death in deaths if death > now_s - DEATHS_WINDOW_S])
        if num_deaths >= MAX_DEATHS:
            logger.error("rank %d died %d times in %g min", rank, num_deaths, DEATHS_WINDOW_S / 60)
        if num_deaths >= MAX_DEATHS or self.workers[rank].is_stuck:
            self.retired.add(rank)
            return None
        incarnation = self.workers[rank].incarnation + 1
        self._arenas.renew(rank, incarnation=incarnation)
        self.workers[rank] = self._start_worker(rank, incarnation=incarnation)
        return self.workers[rank]

    def leave_out(self, rank: int) -> None:
        """Go without a rank, whose old process is reaped, until workers are waited for the next time."""
        self._expect_nothing_of(rank)
        if not self.workers[rank].is_stuck:
            self._left_out.add(rank)
        self.retired.add(rank)

    def _bring_back(self) -> None:
        """Start the ranks that the last run did without while it stopped."""
        left_out, self._left_out = self._left_out, set()
        for rank in left_out:
            self.retired.discard(rank)
            self.replace_worker(rank, now_s=0.0, is_to_blame=False)

    def _expect_nothing_of(self, rank: int) -> None:
        """It is dead: its successor is given all arenas as they are then."""
        for worker in self.workers:
            worker.unknown_to.discard(rank)

    def set_models(self, checkpoints: Collection[Path], *, warm_ups: Sequence[WarmUp] = ()) -> None:
        """Let all workers hold these models and no others, each after what it was given before.

        Those that are ready are to get these steps ready, too; one that still starts finds out in its tasks.
        """
        message = SetModels(tuple(sorted(map(str, checkpoints))))
        for path in message.checkpoints:  # they are tried again
            self.unloadable.pop(path, None)
            self.weights_mark(Path(path))
        self._settings["checkpoints"] = message.checkpoints
        for rank, worker in enumerate(self.workers):
            if rank not in self.retired:
                items = warm_ups if worker.is_ready and worker.has_arenas else ()
                worker.asked_to_load_s = time.monotonic()
                worker.forget_warm_ups()
                worker.num_to_warm += len(items)  # one that is new may be about to answer for others
                worker.load_s = 0.0
                worker.tell(message)
                worker.warm_up(items)

    def do_without(self, checkpoint: str) -> None:
        """Start no worker with this model."""
        self._settings["checkpoints"] = tuple([path for path in self.checkpoints if path != checkpoint])

    def forgive(self) -> None:
        """Count deaths from here on: another run begins, which has not seen them."""
        for deaths in self._deaths.values():
            deaths.clear()

    def welcome(self, worker: Child) -> None:
        """Let a new incarnation that is ready map all arenas, and all others map its own.

        It may take tasks when all of them have (`unknown_to` is empty): a rank that begins to count anew
        after the first transfer from there waits for that for ever.
        """
        assert worker.rank is not None
        arena = self._arenas.arena(worker.rank)
        assert arena is not None, f"{worker.name} is not ready"
        self._send_arenas([worker])
        message = ReplacePeer(worker.rank, worker.incarnation)
        for other, peer in enumerate(self.workers):
            # One that has none yet will be given all of them when it is welcome itself.
            if other in self._others(worker.rank) and other not in self.retired and peer.has_arenas:
                worker.unknown_to.add(other)
                peer.tell(message, (arena,))

    def replace_writer(self, writer: Child) -> float:
        """Let a new process take the place of a writer whose old one is reaped; returns in how many seconds.

        That is at once, unless the old one could not start: whatever the reason, it may be there for long.
        """
        idx = self.writers.index(writer)
        last_s, pause_s = self._writer_pauses.pop(idx, 0.0), 0.0
        if not writer.is_ready:
            pause_s = min(MAX_WRITER_PAUSE_S, max(WRITER_PAUSE_S, 2 * last_s))
            self._writer_pauses[idx] = pause_s
        self._writers_due[idx] = time.monotonic() + pause_s
        self.start_writers()
        return pause_s

    def start_writers(self) -> bool:
        """Start the writers that are due; tells whether there were any."""
        due = [idx for idx, due_s in self._writers_due.items() if time.monotonic() >= due_s]
        for idx in due:
            self.writers[idx] = self._start_writer(idx)
            del self._writers_due[idx]
        return bool(due)

    def close(self, *, at_once: bool = False) -> None:
        """End all processes: they leave when their channel closes, and are killed if not."""
        for child in self.children:
            child.channel.close()
            if at_once:
                child.kill()
        for child in self.children:
            child.reap(patience_s=_EXIT_S)
        self._arenas.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)

    def _start_worker(self, rank: int, *, incarnation: int) -> Child:
        child = self._start(f"rank {rank}", self._worker_main, {"rank": rank, **self._settings})
        child.rank, child.incarnation = rank, incarnation
        return child

    def _start_writer(self, idx: int) -> Child:
        return self._start(f"writer {idx}", self._writer_main, None)

    def _start(self, name: str, target: str, settings: Mapping[str, Any] | None) -> Child:
        tries_left = MAX_FORKS
        while True:
            tries_left -= 1
            try:
                return self._fork(name, target, settings)
            except (OSError, EOFError) as error:
                was_killed = isinstance(error, ConnectionError | EOFError)
                if not (was_killed and tries_left):
                    raise WorkerError(f"{name} cannot be started: {error}; run again to go on") from error
                logger.warning("%s was killed as it was started (%s); it is started again", name, error)

    def _fork(self, name: str, target: str, settings: Mapping[str, Any] | None) -> Child:
        """One try. A process that has begun though nobody knows it ends with its channel."""
        forkserver.ensure_running(self._keep_fds)  # anew, should it have died
        ours, theirs = Channel.pair()
        process = self._context.Process(
            target=_enter, args=(target, theirs, settings), name=f"gfgen {name}", daemon=True
        )
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Child(name, process, Channel(ours), ends_within_s=self.patience.killed_s)

    def _send_arenas(self, workers: Sequence[Child]) -> None:
        if self._counts_tokens is None:
            self._counts_tokens = all(worker.counts_tokens for worker in self.living)
        for worker in workers:
            assert worker.rank is not None
            island = {worker.rank, *self._others(worker.rank)}
            ranks, fds = self._arenas.known_to(worker.rank, among=island)
            message = Arenas(
                self._plan.data_bytes, self._plan.post_bytes, self.incarnations, ranks, self._counts_tokens
            )
            worker.tell(message, fds)
            worker.has_arenas = True

    def _others(self, rank: int) -> Set[int]:
        """The ranks with which this one exchanges."""
        return set(next(island for island in self.islands if rank in island)) - {rank}


def _forget(process: BaseProcess) -> None:
    """Let this process end without it: `multiprocessing` waits for all its children at the exit."""
    children: set[BaseProcess] = multiprocessing.process._children  # type: ignore[attr-defined]
    children.discard(process)


def _enter(target: str, end: socket.socket, settings: Mapping[str, Any] | None) -> None:
    """First function of a child process: import its main and go there."""
    module_name, _, attribute = target.partition(":")
    module = __import__(module_name, fromlist=[attribute])
    main: Callable[..., None] = getattr(module, attribute)
    if settings is None:
        main(end)
    else:
        main(end, module.WorkerSettings(**settings))
