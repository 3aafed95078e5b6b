"""The processes of a machine: workers, one for each rank, and writers; from their start to their end.

`WorkerPool.turn` is the one loop over their channels. A start waits in it until nobody starts any more; a run
takes what it brings as events (workers.py). lifecycle.py has the phases of a process. A pool outlives a
run: the next one starts on warm workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.selector import tuned_tables
from gfgen.models.geometry.checkpoint import model_name
from gfgen.models.geometry.weight_files import weights_mark
from gfgen.runtime.ipc.arenas import RankArenas, default_plan
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
    WriterReady,
)
from gfgen.runtime.processes.child import Child, RankProcess, WriterProcess
from gfgen.runtime.processes.launcher import Launcher
from gfgen.runtime.processes.lifecycle import GONE, STARTS, TRANSITIONS, Phase
from gfgen.runtime.processes.loads import Loads
from gfgen.runtime.processes.watchdog import Patience
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
DEATHS_WINDOW_S = 600.0
"""A rank that dies so often within this time is retired: something is wrong with its device."""
LOG_EVERY_S = 10.0
"""While ranks start, the log says this often how far they are."""
_MAY_LOAD = (Phase.WARMING, Phase.SERVING, Phase.LOADING)
_EXIT_S = 5.0
"""How long a process may take to end after the pool has closed its channel, before it is killed."""
_REAP_S = 1.0
"""The same after the process has closed its channel."""
WRITER_PAUSE_S, MAX_WRITER_PAUSE_S = 0.1, 10.0
"""Before there is another writer in place of one that could not start; doubles each time."""


ChildT = TypeVar("ChildT", bound=Child)


class File(Protocol):
    """Anything that a selector can watch."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Joined:
    """A process takes tasks, or files, from now on."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker holds the models of the last change, and has their steps ready."""

    load_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A process is gone, and its successor is being started unless the rank is retired."""

    reason: str
    was_told: bool = False
    """The reason is why it was killed, or its own words; else how the process ended."""
    is_retired: bool = False
    pause_s: float = 0.0
    """In how many seconds a writer's successor is started."""
    unloadable: Sequence[str] = ()
    """Names of the model that it was loading, now that no rank can load it."""


def default_writers(*, num_ranks: int, num_cores: int) -> int:
    """As many as there are GPUs, which may all decode at once, as long as each has four cores: a writer keeps
    some busy while it encodes (`outputs.encoder_threads`), and each rank one."""
    return max(1, min(num_ranks, num_cores // 4))


class WorkerPool:
    """One worker per rank, and writers; each rank's arena for exchanges with the others."""

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
        are_on_gpus = device != "cpu"
        plan = plan or default_plan(num_ranks=num_ranks, are_on_gpus=are_on_gpus)
        self.patience = Patience().with_shared_gpus(-(-num_ranks // num_gpus)) if num_gpus else Patience()
        """With its ranks; longer where they share GPUs."""
        self._launcher = Launcher(
            {
                "checkpoints": tuple(map(str, checkpoints)),
                "device": device,
                "has_random_weights": has_random_weights,
                "vae_dtype": vae_dtype,
                "arena_bytes": (plan.data_bytes, plan.post_bytes),
                "has_graphs": has_graphs,
                "memory_limit": memory_limit,
                "num_gpus": num_gpus,
                "tuned_tables": tuned_tables() if are_on_gpus else {},
            },
            worker_main=worker_main,
            writer_main=writer_main,
            preload=preload,
            keep_fds=keep_fds,
            ends_within_s=self.patience.killed_s,
        )
        self._arenas = RankArenas(plan, num_ranks=num_ranks, are_on_gpus=are_on_gpus)
        self._selector = selectors.DefaultSelector()
        self.islands = tuple([tuple(island) for island in islands or [range(num_ranks)]])
        """Sets of ranks that map each other's arenas, and so can share a layout."""
        self._weights_marks = {path: weights_mark(path) for path in checkpoints}
        self._are_all_needed = are_all_needed
        """A rank that cannot be had ends the start, as where something is measured."""
        self._deaths: dict[int, list[float]] = defaultdict(list)
        """By rank, by the machine's monotonic clock."""
        self.last_number = 0
        """Of the last dispatch that these workers were given, in any run."""
        self.loads: Loads | None = None
        """What became of the last change of models; None in a run that has changed none."""
        self.unloadable: dict[str, str] = {}
        """Checkpoints that no rank could load when the workers started, and why."""
        self.steps_at_hand: Callable[[], Sequence[WarmUp]] | None = None
        """Steps that a worker gets ready before it joins a run."""
        self.is_stopping = False
        """The run is about to end: no rank is replaced."""
        self._left_out: set[int] = set()
        """Ranks that were not replaced for that reason."""
        self._held_back: set[int] = set()
        """Ranks whose new workers nobody is to know yet: others may be inside the predecessor's arena."""
        self._counts_tokens: bool | None = None
        """Whether ranks pad texts: settled when they meet, and for all that come later."""
        self._news: list[tuple[RankProcess, Joined]] = []
        self.workers: list[RankProcess] = []
        self.writers: list[WriterProcess] = []
        if num_writers is None:
            cores = len(os.sched_getaffinity(0))
            num_writers = default_writers(num_ranks=num_ranks, num_cores=cores) if are_on_gpus else 1
        try:
            for rank in range(num_ranks):
                self.workers.append(self._listen(self._launcher.start_worker(rank, incarnation=1)))
            for idx in range(num_writers):
                self.writers.append(self._listen(self._launcher.start_writer(idx)))
        except BaseException:  # those that were started would load their models first, and are waited for
            self.close(at_once=True)
            raise

    # What there is --------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return len(self.workers)

    @property
    def children(self) -> list[Child]:
        """All processes that have not ended."""
        return [each for each in (*self.workers, *self.writers) if each.phase not in GONE]

    @property
    def living(self) -> list[RankProcess]:
        """The workers of all ranks that are not retired."""
        return [worker for worker in self.workers if worker.phase not in GONE]

    @property
    def retired(self) -> set[int]:
        """Ranks that died too often, or whose process does not end; they stay away."""
        return {worker.rank for worker in self.workers if worker.phase in GONE}

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Of the models that a worker which starts now holds."""
        held: tuple[str, ...] = self._launcher.settings["checkpoints"]
        return held

    @property
    def computed_with(self) -> Mapping[str, Any]:
        """What must be the same for another pool to go on with a job's state: what its tensors are like,
        and which weights made them."""
        settings = self._launcher.settings
        return {name: settings[name] for name in ("device", "vae_dtype", "has_random_weights")}

    def weights_mark(self, checkpoint: Path) -> str:
        """Of a model's weight files as they were before a rank first loaded them."""
        if checkpoint not in self._weights_marks:
            self._weights_marks[checkpoint] = weights_mark(checkpoint)
        return self._weights_marks[checkpoint]

    @property
    def incarnations(self) -> tuple[int, ...]:
        """By rank."""
        return tuple([worker.incarnation for worker in self.workers])

    # The loop -------------------------------------------------------------------------------

    def listen(self, file: File) -> None:
        """Let `turn` tell when there is something to read in this file."""
        self._selector.register(file, selectors.EVENT_READ, file)

    def ignore(self, file: File) -> None:
        self._selector.unregister(file)

    def _listen(self, child: ChildT) -> ChildT:
        self._selector.register(child.channel, selectors.EVENT_READ, child)
        return child

    def turn(self, timeout_s: float) -> Iterator[tuple[Any, Any]]:
        """What happens within this time: (process, its message), (process, what became of it), (file, None).

        A message comes after it has had its effect here.
        """
        news, self._news = self._news, []
        yield from news
        for key, _ in self._selector.select(0 if news else max(0.0, timeout_s)):
            if not isinstance(key.data, Child):
                yield key.data, None
            elif key.data.phase not in GONE:
                yield from self._hear(key.data)
        for child in self.children:
            if child.should_have_ended:
                yield from self._lose(child)
        self._start_due_writers()
        yield from self._introduce()

    def _hear(self, child: Child) -> Iterator[tuple[Child, Any]]:
        received = child.channel.receive()
        if received is None:
            yield from self._lose(child)
            return
        message, fds = received
        if isinstance(child, RankProcess):
            became = self._effect(child, message, fds)
        else:
            became = Joined() if isinstance(message, WriterReady) and child.phase is Phase.STARTING else None
            if became:
                child.enter(Phase.SERVING)
        yield child, message
        if became is not None:
            yield child, became

    def _effect(self, worker: RankProcess, message: Any, fds: Sequence[int]) -> Joined | Loaded | None:
        """Change the worker's record by its message; what it has become by that, if anything."""
        match message:
            case PeerReplaced():
                peer = self.workers[message.rank]
                if peer.incarnation == message.incarnation:
                    peer.unknown_to.discard(worker.rank)
            case WorkerFailed():
                worker.verdict = worker.verdict or message.reason
            case Loading():
                worker.loading = message.checkpoint
            case WorkerReady():
                self._arenas.take(worker.rank, fds)
                worker.startup_s, worker.counts_tokens = message.startup_s, message.counts_tokens
                worker.loading = None
                if not worker.num_to_load:  # else it holds those of before
                    self._note_loaded(worker)
                if worker.phase is Phase.STARTING:
                    worker.enter(Phase.INTRODUCING)
            case ModelsSet():
                self._note_loaded(worker)
                worker.num_to_load = max(0, worker.num_to_load - 1)
                worker.load_s += message.load_s
                return self._settled(worker)
            case WarmedUp() if worker.warm_ups:
                worker.has_warmed_up()
                worker.load_s += message.seconds
                return self._settled(worker)
        return None

    @staticmethod
    def _settled(worker: RankProcess) -> Joined | Loaded | None:
        """What a worker has become that has answered: nothing while it has more to answer."""
        if worker.num_to_load or worker.warm_ups:
            return None
        if worker.phase is Phase.INTRODUCING:  # it was told to load while it started
            return Loaded(worker.load_s)
        if worker.phase not in (Phase.WARMING, Phase.LOADING):
            return None
        became = Joined() if worker.phase is Phase.WARMING else Loaded(worker.load_s)
        worker.enter(Phase.SERVING)
        return became

    def _note_loaded(self, worker: RankProcess) -> None:
        """A worker holds the models of now, as far as anybody does."""
        worker.loading = None
        if self.loads is not None:
            self.loads.succeeded(worker.rank)

    # Starting -------------------------------------------------------------------------------

    def wait_ready(
        self,
        signals: SignalPipe | None = None,
        *,
        patience_s: float | None = None,
        tell_s: float = LOG_EVERY_S,
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
        self.loads = Loads({path: Path(path) for path in self.checkpoints})
        self.is_stopping = False
        left_out, self._left_out = self._left_out, set()
        for rank in left_out:
            self.replace_worker(rank, is_to_blame=False)
        heard = self.heard(
            signals,
            doing="the models were loading; nothing was started",
            left_s=lambda: min(deadline_s, told_s + tell_s) - time.monotonic(),
        )
        with contextlib.closing(heard):
            while any(worker.phase in STARTS for worker in self.living):
                found = next(heard)
                if found is not None:
                    self._note_start(*found, doing="started")
                elif (now_s := time.monotonic()) < deadline_s:
                    logger.info("still starting after %.0f s: %s", now_s - began_s, self._how_far())
                    told_s = now_s
                else:
                    self._leave_behind(f"the models are not loaded after {patience_s:g} s")

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
        ready = [worker for worker in self.living if Phase.WARMING in TRANSITIONS[worker.phase]]
        awaited = {item.number: {worker.rank for worker in ready} for item in items}
        for worker in ready if items else ():
            worker.enter(Phase.WARMING)
            worker.warm_up(items)
        heard = self.heard(
            signals, doing="ranks were warmed up; nothing was started", left_s=lambda: patience_s
        )
        with contextlib.closing(heard):
            while awaited:
                found = next(heard)
                if found is None:
                    raise WorkerError(f"no rank has run a step within {patience_s:g} s of the last one")
                worker, message = found
                self._note_start(worker, message, doing="was warmed up")
                answers = [message] if isinstance(message, WarmedUp) and message.number in awaited else []
                if isinstance(message, Lost):
                    answers = [WarmedUp(number, 0.0) for number in awaited]
                for answer in answers:
                    awaited[answer.number].discard(worker.rank)
                    if answer.reason is not None or not awaited[answer.number]:
                        del awaited[answer.number]
                        yield next(item for item in items if item.number == answer.number), answer
        self.wait_ready(signals)

    def heard(
        self, signals: SignalPipe | None, *, doing: str, left_s: Callable[[], float]
    ) -> Generator[tuple[Any, Any] | None, None, None]:
        """What `turn` brings of workers while no run goes on, without end; None when nothing comes in time.

        Raises: InterruptedRunError when a signal comes.
        """
        with contextlib.ExitStack() as stack:
            if signals is not None:
                self.listen(signals)
                stack.callback(self.ignore, signals)
            while True:
                self.let_in()
                began_s, wait_s, is_quiet = time.monotonic(), left_s(), True
                for source, what in self.turn(wait_s):
                    is_quiet = False
                    if source is signals and signals is not None:
                        if numbers := signals.take():
                            raise InterruptedRunError(f"stopped while {doing}", signal_number=numbers[0])
                    elif isinstance(source, RankProcess):
                        yield source, what
                if is_quiet and time.monotonic() >= began_s + wait_s:
                    yield None

    def _note_start(self, worker: RankProcess, happened: Any, *, doing: str) -> None:
        """Judge the death of a worker while nobody runs tasks.

        Raises: WorkerError when nothing is left to go on with.
        """
        if not isinstance(happened, Lost):
            return
        how = "cannot start" if happened.was_told else f"died while it {doing}"
        reason = f"{worker.name} {how}: {happened.reason}"
        self.unloadable |= dict.fromkeys(happened.unloadable, reason)
        is_missing = happened.is_retired and (self._are_all_needed or not self.living)
        if is_missing or (happened.unloadable and not self.checkpoints):
            raise WorkerError(reason)
        logger.warning(
            "%s; %s", reason, "it stays away" if happened.is_retired else "a new worker is started"
        )

    def _how_far(self) -> str:
        """'1 of 4 ranks ready, 3 loading qwen-image', say."""
        num_ready = sum(worker.has_started for worker in self.living)
        others = Counter(
            "not loading yet" if worker.loading is None else f"loading {model_name(Path(worker.loading))}"
            for worker in self.living
            if not worker.has_started
        )
        parts = [f"{num_ready} of {counted(self.num_ranks, 'rank')} ready"]
        return ", ".join([*parts, *(f"{number} {doing}" for doing, number in others.items())])

    def _leave_behind(self, reason: str) -> None:
        """Retire the ranks that are not ready.

        Raises: WorkerError when nothing is left to go on with.
        """
        late = [worker for worker in self.living if not worker.has_started]
        late = late or [self.workers[rank] for each in self.living for rank in each.unknown_to]
        late = list(dict.fromkeys(late))  # several may wait for the same one
        reason = f"{', '.join(worker.name for worker in late)}: {reason}"
        if self._are_all_needed or len(late) == len(self.living):
            raise WorkerError(reason)
        for worker in late:
            worker.kill()
            self._bury(worker)
        logger.error("%s; the others go on without", reason)

    # Meeting --------------------------------------------------------------------------------

    def let_in(self) -> None:
        """Nobody is inside the arena of a dead worker any more: its successor may be introduced."""
        self._held_back.clear()

    def _introduce(self) -> Iterator[tuple[RankProcess, Joined]]:
        """Let new workers and all others map each other's arenas; those that are known to all go on.

        A worker takes tasks when all have answered: a rank that begins to count anew after the first
        transfer from there waits for that for ever. The first meeting is of all at once, before any task.
        """
        new = [worker for worker in self.living if worker.phase is Phase.INTRODUCING]
        if new and self._counts_tokens is None:
            if any(worker.phase is Phase.STARTING for worker in self.living):
                return
            self._counts_tokens = all(worker.counts_tokens for worker in self.living)
            for worker in new:
                self._send_arenas(worker)
        for worker in new:
            if not worker.has_arenas and worker.rank not in self._held_back:
                self._welcome(worker)
            if worker.has_arenas and not worker.unknown_to:
                yield from self._go_on(worker)

    def _go_on(self, worker: RankProcess) -> Iterator[tuple[RankProcess, Joined]]:
        """A worker that all know joins, or gets ready what jobs at hand need."""
        steps = self.steps_at_hand() if self.steps_at_hand and not worker.num_to_load else ()
        if steps:
            worker.enter(Phase.WARMING)
            worker.warm_up(steps)
            return
        worker.enter(Phase.LOADING if worker.num_to_load else Phase.SERVING)
        yield worker, Joined()

    def _welcome(self, worker: RankProcess) -> None:
        """Send a new worker all arenas, and its own to the others."""
        arena = self._arenas.arena(worker.rank)
        assert arena is not None, f"{worker.name} has no arena"
        self._send_arenas(worker)
        message = ReplacePeer(worker.rank, worker.incarnation)
        for other in self._peers(worker.rank):
            peer = self.workers[other]
            # One that has none yet will be given all of them when it is welcome itself.
            if peer.phase not in GONE and peer.has_arenas:
                worker.unknown_to.add(other)
                peer.tell(message, (arena,))

    def _send_arenas(self, worker: RankProcess) -> None:
        plan, island = self._arenas.plan, {worker.rank, *self._peers(worker.rank)}
        ranks, fds = self._arenas.known_to(worker.rank, among=island)
        counts_tokens = bool(self._counts_tokens)
        worker.tell(Arenas(plan.data_bytes, plan.post_bytes, self.incarnations, ranks, counts_tokens), fds)
        worker.has_arenas = True

    def _peers(self, rank: int) -> Set[int]:
        """The ranks with which this one exchanges."""
        return set(next(island for island in self.islands if rank in island)) - {rank}

    # Models ---------------------------------------------------------------------------------

    def set_models(self, checkpoints: Collection[Path], *, warm_ups: Sequence[WarmUp] = ()) -> None:
        """Let all workers hold these models and no others, each after what it was given before.

        Those that are known get these steps ready, too; one that still starts finds out in its tasks.
        """
        message = SetModels(tuple(sorted(map(str, checkpoints))))
        for path in message.checkpoints:  # they are tried again
            self.unloadable.pop(path, None)
            self.weights_mark(Path(path))
        self._launcher.settings["checkpoints"] = message.checkpoints
        for worker in self.living:
            if worker.phase is Phase.ENDING:
                continue
            worker.num_to_load += 1
            worker.load_s = 0.0
            worker.forget_warm_ups()
            worker.tell(message)
            if worker.phase is Phase.WARMING:
                self._news.append((worker, Joined()))
            if worker.phase in _MAY_LOAD:
                worker.enter(Phase.LOADING)
                worker.warm_up(warm_ups)

    # Ends -----------------------------------------------------------------------------------

    def _lose(self, child: Child) -> Iterator[tuple[Child, Lost]]:
        """A process is gone, or will never be: start another."""
        ending = self._bury(child)
        reason, was_told = child.verdict or ending, child.verdict is not None
        if was_told and child.phase is Phase.STUCK:
            reason = f"{reason}; {ending}"
        if isinstance(child, WriterProcess):
            yield child, Lost(reason, was_told, pause_s=self._put_off(child))
            return
        assert isinstance(child, RankProcess)
        unloadable, is_spared = self._judge_load(child)
        self._held_back.add(child.rank)
        if self.is_stopping:
            if child.phase is not Phase.STUCK:
                self._left_out.add(child.rank)
        else:
            self.replace_worker(child.rank, is_to_blame=child.is_to_blame and not is_spared)
        yield child, Lost(reason, was_told, child.rank in self.retired, unloadable=unloadable)

    def _bury(self, child: Child) -> str:
        """Reap a process, and expect nothing of it; returns how it ended."""
        self._selector.unregister(child.channel)
        if isinstance(child, RankProcess):
            for worker in self.workers:  # its successor is given all arenas as they are then
                worker.unknown_to.discard(child.rank)
        return child.reap(patience_s=_REAP_S)

    def _judge_load(self, worker: RankProcess) -> tuple[Sequence[str], bool]:
        """The names of the model that a dead worker was loading, if no rank can load it; and whether the
        model is to blame for this death."""
        if self.loads is None:
            return (), False
        self.loads.lost(worker.rank)
        if worker.loading is None:
            return (), False
        ranks = {worker.rank, *(each.rank for each in self.living)}
        names = self.loads.failed(worker.loading, worker.rank, ranks=ranks)
        if names:
            left = tuple([path for path in self.checkpoints if path != worker.loading])
            self._launcher.settings["checkpoints"] = left
        return names, worker.loading not in self.checkpoints or self.loads.spares(worker.rank)

    def replace_worker(self, rank: int, *, is_to_blame: bool = True) -> None:
        """Start a new process for a rank whose old one is reaped, unless the rank is retired.

        It is when it died too often by its own fault, or when the old process does not end and so holds
        its device.
        """
        deaths, now_s = self._deaths[rank], time.monotonic()
        if is_to_blame:
            deaths.append(now_s)
        num_deaths = len([death_s for death_s in deaths if death_s > now_s - DEATHS_WINDOW_S])
        if num_deaths >= MAX_DEATHS:
            logger.error("rank %d died %d times in %g min", rank, num_deaths, DEATHS_WINDOW_S / 60)
        if num_deaths >= MAX_DEATHS or self.workers[rank].phase is Phase.STUCK:
            return
        incarnation = self.workers[rank].incarnation + 1
        self._arenas.renew(rank, incarnation=incarnation)
        self.workers[rank] = self._listen(self._launcher.start_worker(rank, incarnation=incarnation))

    def _put_off(self, writer: WriterProcess) -> float:
        """When a writer's successor is started: at once, unless the writer could not start.

        Whatever the reason, it may be there for long.
        """
        pause_s = 0.0
        if not writer.has_started:
            pause_s = min(MAX_WRITER_PAUSE_S, max(WRITER_PAUSE_S, 2 * writer.pause_s))
        writer.pause_s, writer.due_s = pause_s, time.monotonic() + pause_s
        self._start_due_writers()
        return pause_s

    def _start_due_writers(self) -> None:
        for idx, writer in enumerate(self.writers):
            if writer.phase in GONE and time.monotonic() >= writer.due_s:
                self.writers[idx] = self._listen(self._launcher.start_writer(idx, pause_s=writer.pause_s))

    def begin_run(self, steps_at_hand: Callable[[], Sequence[WarmUp]]) -> None:
        """Another run begins: nobody is inside any arena."""
        self.steps_at_hand, self.loads, self.is_stopping = steps_at_hand, None, False
        self.let_in()

    def forgive(self) -> None:
        """Count deaths from here on: another run begins, which has not seen them."""
        self._deaths.clear()

    def close(self, *, at_once: bool = False) -> None:
        """End all processes: they leave when their channel closes, and are killed if not."""
        self._selector.close()
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
