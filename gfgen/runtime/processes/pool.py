"""The processes of a machine: workers, one for each rank, and writers; from their start to their end.

`WorkerPool.turn` is the one loop over their channels. child.py has the phases of a process. A start turns
the loop until nobody starts any more (starting.py), and a run takes what it brings as events (workers.py). A
pool outlives a run: the next one starts on warm workers.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import selectors
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from gfgen.models.geometry.weight_files import weights_mark
from gfgen.models.geometry.weights import WHOLE
from gfgen.runtime.ipc import messages
from gfgen.runtime.ipc.messages import Channel
from gfgen.runtime.ipc.settings import RankArenas, RankSettings
from gfgen.runtime.processes.child import (
    GONE,
    STARTS,
    AwakeClock,
    Child,
    Lost,
    Patience,
    Phase,
    RankProcess,
    WriterProcess,
)
from gfgen.runtime.processes.launcher import Launcher
from gfgen.system import machine

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
DEATHS_WINDOW_S = 600.0  # a rank that dies so often in this time is retired: its device is at fault
_EXIT_S = 5.0  # how long a process may take to end after the pool has closed its channel; then it is killed
_REAP_S = 1.0  # the same if the process has closed its channel
_TICK_S = 0.25  # a turn of the loop takes this long at most if nothing happens
WRITER_PAUSE_S = 1.0  # the delay before another writer replaces one that could not start
MAX_FAILURES = 2  # of one rank to load one model
MAX_SPARED = 4  # failures of one rank to load one model that it is not blamed for. Each costs a start.

ChildT = TypeVar("ChildT", bound=Child)


def most_writers(*, are_on_gpus: bool, num_cores: int) -> int:
    """One for each four cores: a writer keeps some of them busy while it encodes (`outputs.encoder_threads`),
    and each rank one. CPU ranks need the cores themselves."""
    return max(1, num_cores // 4) if are_on_gpus else 1


class WorkerPool:
    """One worker per rank, with its arena, and writers, as many as the work and the cores ask for."""

    def __init__(
        self,
        settings: RankSettings,
        checkpoints: Sequence[Path],
        *,
        worker_main: str | None = None,
        writer_main: str = "gfgen.runtime.files.writer:main",
        num_writers: int | None = None,
        preload: Sequence[str] | None = None,
        keep_fds: Sequence[int] = (),
    ) -> None:
        self.settings = settings
        self.models = HeldModels(checkpoints)
        has_copies = settings.placements or settings.kept or settings.patch_copies_on_host
        has_copies = has_copies or settings.precision.layers
        patience = Patience().with_copies() if has_copies else Patience()
        self.patience = patience.with_shared_gpus(settings.ranks_per_gpu)
        """With its ranks; more where they share GPUs or copy weights."""
        self.clock = AwakeClock()
        self._launcher = Launcher(
            settings, worker_main=worker_main, writer_main=writer_main, preload=preload, keep_fds=keep_fds
        )
        self._launcher.host_copies = {
            path: Connection(settings.placements.get(path, WHOLE).new_copy(settings.kept.get(path, 0)))
            for path in {**settings.placements, **settings.kept}
        }
        self._launcher.boards = {
            path: [Channel.pair() for _ in range(settings.num_ranks)]
            for path, placement in settings.placements.items()
            if placement.shared
        }
        self._arenas = RankArenas(settings)
        self._selector = selectors.DefaultSelector()
        self.workers: list[RankProcess] = []
        self.writers: list[WriterProcess] = []
        self.islands = tuple([tuple(each) for each in settings.islands or [range(settings.num_ranks)]])
        """Sets of ranks that map each other's arenas, and so can share a layout."""
        self.meeting = Meeting(self._arenas, self.workers, self.islands)
        self.deaths: dict[int, list[float]] = defaultdict(list)  # by rank: when it died and was to blame
        self.last_number = 0  # the last dispatch that these workers got, in any run
        self.steps_at_hand: Callable[[], Sequence[messages.WarmUp]] = tuple
        """Tasks of the present models, which a worker that joins a run or has loaded them prepares later."""
        self.needed: Callable[[], Set[str]] | None = None  # models whose host copies stay; None: all
        self._kept: tuple[str, ...] = ()  # models whose copies ranks may have mapped without holding them
        self.is_stopping = False  # the run is about to end: no rank is replaced
        self._left_out: set[int] = set()  # ranks that were not replaced for that reason
        self._waiting: set[int] = set()  # ended ranks that start when others have tried to load a model
        if num_writers is None:
            num_writers = most_writers(are_on_gpus=settings.are_on_gpus, num_cores=machine.num_cores())
        self.num_writers = num_writers
        try:
            for rank in range(settings.num_ranks):
                self.workers.append(self._start_worker(rank, incarnation=1))
            for idx in range(min(num_writers, settings.num_ranks)):
                self.writers.append(self._start_writer(idx))
        except BaseException:  # otherwise this process waits for those that load their models
            self.close(at_once=True)
            raise

    # What there is --------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return len(self.workers)

    @property
    def children(self) -> list[Child]:
        return [each for each in (*self.workers, *self.writers) if each.phase not in GONE]

    @property
    def living(self) -> list[RankProcess]:
        return [worker for worker in self.workers if worker.phase not in GONE]

    @property
    def retired(self) -> set[int]:
        """Ranks without a successor: they died too often, or their process does not end."""
        return {worker.rank for worker in self.workers if worker.phase in GONE} - self._waiting

    # The loop -------------------------------------------------------------------------------

    def listen(self, file: Any) -> None:
        """Let `turn` say when there is something to read in this file."""
        self._selector.register(file, selectors.EVENT_READ, file)

    def ignore(self, file: Any) -> None:
        self._selector.unregister(file)

    def turn(self, timeout_s: float = _TICK_S) -> Iterator[tuple[Any, Any]]:
        """What happens: (process, message), (process, Joined, Loaded or Lost), and (file, None)."""
        found = self._selector.select(min(max(0.0, timeout_s), _TICK_S))
        self.clock.look()
        for key, _ in found:
            if not isinstance(key.data, Child):
                yield key.data, None
            elif key.data.phase not in GONE:
                yield from self._hear(key.data)
        for child in self.children:
            if child.should_have_ended:
                yield from self._lose(child)
        for idx, writer in enumerate(self.writers):
            pause_s = 0.0 if writer.has_started else WRITER_PAUSE_S
            if writer.phase in GONE and self.clock.now_s >= writer.since_s + pause_s:
                self.writers[idx] = self._start_writer(idx)
        self._start_waiting()
        for worker in self.meeting.introduce():
            for became in worker.join(self.steps_at_hand()):
                yield worker, became

    def _hear(self, child: Child) -> Iterator[tuple[Child, Any]]:
        received = child.channel.receive()
        if received is None:
            yield from self._lose(child)
            return
        message, fds = received
        changes = child.hear(message)
        if isinstance(child, RankProcess):
            match message:
                case messages.PeerReplaced():
                    self.meeting.note_mapped(child.rank, message)
                case messages.WorkerReady():
                    self._arenas.take(child.rank, fds)
            if isinstance(message, messages.WorkerReady | messages.ModelsSet) and not child.is_to_load:
                self.models.succeeded(child.rank)
                if self.needed and not any(each.is_to_load or each.phase in STARTS for each in self.living):
                    copies, mapped = self._launcher.host_copies, {*self.models.checkpoints, *self._kept}
                    for path in copies.keys() - mapped - self.needed():
                        mmap.mmap(copies[path].fileno(), 0).madvise(mmap.MADV_REMOVE)
        yield child, message
        for became in changes:
            yield child, became

    # Starts ---------------------------------------------------------------------------------

    def begin_start(self) -> None:
        """Ranks start, also those that nobody replaced because a run was about to end."""
        self.models.judge(is_changing=True)
        self.is_stopping = False
        self._start_waiting()
        for rank in self._left_out & self.retired:
            self.replace_worker(rank, is_to_blame=False)
        self._left_out.clear()

    def begin_run(self) -> None:
        """Another run begins: no rank is inside an arena, and a rank that dies is to blame for it."""
        self.is_stopping = False
        self.models.judge(is_changing=False)
        self.meeting.held_back.clear()

    def set_models(self, checkpoints: Iterable[Path]) -> None:
        """Let all workers hold these models and no others, each after its earlier tasks."""
        self.models.change(checkpoints)
        needed = self.settings.kept if self.needed is None else self.needed()
        self._kept = tuple([path for path in self.settings.kept if path in needed])
        later = self.steps_at_hand()
        for worker in self.living:
            worker.load(messages.SetModels(self.models.checkpoints, self._kept), later)

    def prepare_later(self, items: Sequence[messages.WarmUp]) -> None:
        """Let all workers prepare these between tasks."""
        for worker in self.living:
            if worker.has_joined:
                worker.prepare_later(items)

    def _start_waiting(self) -> None:
        loading = [worker.rank for worker in self.living if worker.phase in STARTS or worker.is_to_load]
        for rank in sorted(self._waiting):
            if not (self.is_stopping or self.models.awaits_others(rank, loading=loading)):
                self._waiting.remove(rank)
                self.replace_worker(rank, is_to_blame=False)

    def _start_worker(self, rank: int, *, incarnation: int) -> RankProcess:
        started = self._launcher.start_worker(rank, self.models.checkpoints)
        return self._made(RankProcess, f"rank {rank}", *started, rank=rank, incarnation=incarnation)

    def add_writer(self) -> None:
        """Start another one, unless there are as many as there may be or one is starting."""
        if len(self.writers) < self.num_writers and all(each.has_started for each in self.writers):
            self.writers.append(self._start_writer(len(self.writers)))

    def _start_writer(self, idx: int) -> WriterProcess:
        return self._made(WriterProcess, f"writer {idx}", *self._launcher.start_writer(idx))

    def _made(
        self, kind: type[ChildT], name: str, process: BaseProcess, channel: Channel, **facts: Any
    ) -> ChildT:
        facts |= {"clock": self.clock, "ends_within_s": self.patience.killed_s}
        child = kind(name=name, process=process, channel=channel, **facts)
        self._selector.register(channel, selectors.EVENT_READ, child)
        return child

    # Ends -----------------------------------------------------------------------------------

    def _lose(self, child: Child) -> Iterator[tuple[Child, Lost]]:
        """A process has ended, or does not end: start another."""
        ending = self._bury(child)
        reason = child.verdict or ending
        if child.verdict and child.phase is Phase.STUCK:
            reason = f"{reason}; {ending}"
        if not isinstance(child, RankProcess):
            yield child, Lost(reason)
            return
        if child.loading is not None:
            reason = f"it cannot load its models: {reason}"
        ranks = {child.rank, *(each.rank for each in self.living)}
        why = f"{child.name}: {reason}"
        is_to_blame = self.models.lost(child.rank, why, loading=child.loading, ranks=ranks)
        if self.is_stopping:
            if child.phase is not Phase.STUCK:
                self._left_out.add(child.rank)
        elif is_to_blame or child.phase is Phase.STUCK:
            self.replace_worker(child.rank, is_to_blame=child.is_to_blame and is_to_blame)
        else:
            self._waiting.add(child.rank)
        yield child, Lost(reason, is_retired=child.rank in self.retired)

    def _bury(self, child: Child) -> str:
        """Reap a process and expect nothing of it; returns how it ended."""
        self._selector.unregister(child.channel)
        if isinstance(child, RankProcess):
            self.meeting.lose(child.rank)
        return child.reap(patience_s=_REAP_S)

    def retire(self, worker: RankProcess) -> None:
        """Kill a worker without replacing it."""
        worker.kill()
        self._bury(worker)

    def replace_worker(self, rank: int, *, is_to_blame: bool = True) -> None:
        """Start a new process for a rank whose old one is reaped, unless the rank is retired.

        It is retired if it died too often by its own fault, or if the old process does not end, which still
        holds the device.
        """
        deaths, now_s = self.deaths[rank], time.monotonic()
        if is_to_blame:
            deaths.append(now_s)
        num_deaths = len([death_s for death_s in deaths if death_s > now_s - DEATHS_WINDOW_S])
        if num_deaths >= MAX_DEATHS:
            logger.error("rank %d died %d times in %g min", rank, num_deaths, DEATHS_WINDOW_S / 60)
        if num_deaths >= MAX_DEATHS or self.workers[rank].phase is Phase.STUCK:
            return
        incarnation = self.workers[rank].incarnation + 1
        self._arenas.renew(rank, incarnation=incarnation)
        self.workers[rank] = self._start_worker(rank, incarnation=incarnation)

    def close(self, *, at_once: bool = False) -> None:
        """Close the channels of all processes, which ends them, and kill those that do not end."""
        self._selector.close()
        for child in self.children:
            child.channel.close()
            if at_once:
                child.kill()
        for child in self.children:
            child.reap(patience_s=_EXIT_S)
        self._arenas.close()
        for copy in self._launcher.host_copies.values():
            copy.close()
        for board in itertools.chain(*self._launcher.boards.values()):
            board[0].close()
            board[1].close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)


class HeldModels:
    """The models of a pool's ranks, and whose fault it is if one cannot be loaded: a rank's, or the model's.

    A worker that fails to load, or dies in it, is replaced. It is the model's fault when no rank has
    succeeded and one has tried again. Until then no rank is blamed, and one that has tried again waits for
    the others.
    """

    def __init__(self, checkpoints: Sequence[Path]) -> None:
        self.checkpoints = tuple(map(str, checkpoints))  # a worker that starts now loads these
        self.unloadable: dict[str, str] = {}
        self._weights_marks = {path: weights_mark(path) for path in checkpoints}
        self._holders: set[int] = set()  # ranks that hold all models
        self.judge(is_changing=False)

    def weights_mark(self, checkpoint: Path) -> str:
        """Of a model's weight files as they were before a rank first loaded them."""
        if checkpoint not in self._weights_marks:
            self._weights_marks[checkpoint] = weights_mark(checkpoint)
        return self._weights_marks[checkpoint]

    def change(self, checkpoints: Iterable[Path]) -> None:
        """Ranks are to hold these models and no others; those that failed are tried again."""
        self.checkpoints = tuple(sorted(set(map(str, checkpoints))))
        self._holders.clear()
        self.judge(is_changing=True)
        for path in self.checkpoints:
            self.unloadable.pop(path, None)
            self.weights_mark(Path(path))

    def judge(self, *, is_changing: bool) -> None:
        """Forget earlier failures. From now on a model may be at fault if ranks start or change their models;
        otherwise a rank that dies is."""
        self._is_changing = is_changing
        self._failures: dict[str, Counter[int]] = {}  # by checkpoint: of ranks that have not loaded it since

    def succeeded(self, rank: int) -> None:
        """A rank holds all models."""
        self._holders.add(rank)
        for failures in self._failures.values():
            failures.pop(rank, None)

    def lost(self, rank: int, reason: str, *, loading: str | None, ranks: Iterable[int]) -> bool:
        """Whether a rank that died, perhaps when it was `loading` a model, is to blame, and not the model."""
        self._holders.discard(rank)
        if loading is None or not self._is_changing:
            return True
        failures = self._failures.setdefault(loading, Counter())
        failures[rank] += 1
        is_at_fault = max(failures.values()) >= MAX_FAILURES and all(failures[each] for each in ranks)
        if is_at_fault and loading in self.checkpoints:
            self.checkpoints = tuple([path for path in self.checkpoints if path != loading])
            self.unloadable[loading] = reason
        return loading in self.checkpoints and (bool(self._holders) or failures[rank] > MAX_SPARED)

    def awaits_others(self, rank: int, *, loading: Iterable[int]) -> bool:
        """Whether a rank that has tried a model again may start when others, which are `loading`, have tried
        it."""
        tried = [each for path, each in self._failures.items() if path in self.checkpoints]
        others = [each for each in loading if each != rank]
        return not self._holders and any(
            each[rank] >= MAX_FAILURES and not all(each[other] for other in others) for each in tried
        )


class Meeting:
    """Introduces workers to each other: all at once when they start, and later each new one to the others.

    A new worker takes tasks when all peers have answered. Otherwise a rank could restart its count of
    transfers after the first one from there, and wait for that one forever.
    """

    def __init__(
        self, arenas: RankArenas, workers: Sequence[RankProcess], islands: Sequence[Sequence[int]]
    ) -> None:
        self._arenas = arenas
        self._workers = workers
        self._islands = islands
        self._counts_tokens: bool | None = None  # whether ranks pad texts; the first meeting decides this
        self.held_back: set[int] = set()  # ranks that died; others may be inside their arenas

    def lose(self, rank: int) -> None:
        """A rank's worker is gone: nobody waits for its answer, and its successor is held back."""
        self.held_back.add(rank)
        for worker in self._workers:  # the successor is sent all arenas as they are then
            worker.unknown_to.discard(rank)

    def note_mapped(self, rank: int, message: messages.PeerReplaced) -> None:
        worker = self._workers[message.rank]
        if worker.incarnation == message.incarnation:
            worker.unknown_to.discard(rank)

    def introduce(self) -> list[RankProcess]:
        """Introduce the workers that have loaded their models; returns those that all peers know."""
        new = [worker for worker in self._workers if worker.phase is Phase.INTRODUCING]
        if new and self._counts_tokens is None:
            if any(worker.phase is Phase.STARTING for worker in self._workers):
                return []
            living = [worker for worker in self._workers if worker.phase not in GONE]
            self._counts_tokens = all(worker.counts_tokens for worker in living)
            for worker in new:
                self._send_arenas(worker)
        for worker in new:
            if not worker.has_arenas and worker.rank not in self.held_back:
                self._welcome(worker)
        return [worker for worker in new if worker.has_arenas and not worker.unknown_to]

    def _welcome(self, worker: RankProcess) -> None:
        """Send a new worker all arenas, and its own to the others."""
        self._send_arenas(worker)
        message = messages.ReplacePeer(worker.rank, worker.incarnation)
        for other in self._peers(worker.rank):
            peer = self._workers[other]
            # A peer without arenas gets all of them when it is introduced itself.
            if peer.phase not in GONE and peer.has_arenas:
                arena = self._arenas.arena(worker.rank, source=other)
                assert arena is not None, f"{worker.name} has no arena"
                worker.unknown_to.add(other)
                peer.tell(message, (arena,))

    def _send_arenas(self, worker: RankProcess) -> None:
        plan, island = self._arenas.plan, {worker.rank, *self._peers(worker.rank)}
        ranks, fds = self._arenas.known_to(worker.rank, among=island)
        incarnations = tuple([each.incarnation for each in self._workers])
        counts_tokens = bool(self._counts_tokens)
        worker.tell(
            messages.Arenas(plan.data_bytes, plan.post_bytes, incarnations, ranks, counts_tokens), fds
        )
        worker.has_arenas = True

    def _peers(self, rank: int) -> Set[int]:
        """The ranks with which this one exchanges."""
        return set(next(island for island in self._islands if rank in island)) - {rank}
