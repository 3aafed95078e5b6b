"""One process of a run: its phases from start to end, the transitions between them, and the channel to it.

The end of its channel shows at once that a process has died. Others are stopped, swapped out, or caught in a
loop or in a driver. `RankProcess.why_hung` judges a worker by its phase and its silence, with `Patience`.
"""

from __future__ import annotations

import logging
import multiprocessing.process
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.ipc import messages
from gfgen.runtime.ipc.messages import Channel
from gfgen.system import machine

logger = logging.getLogger(__name__)

LONGEST_LOOK_S = 0.4  # the most that counts between two looks; the loop looks every quarter of a second


class AwakeClock:
    """Seconds in which this process looked at the others; while it is stopped or asleep, it hears nobody."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.paused_s = 0.0  # how long it did not look
        self._looked_s = time.monotonic()

    def look(self) -> None:
        before_s, self._looked_s = self._looked_s, time.monotonic()
        self.now_s += (awake_s := min(self._looked_s - before_s, LONGEST_LOOK_S))
        self.paused_s += self._looked_s - before_s - awake_s


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait before a process counts as hung and is killed."""

    starting_s: float = 1800.0  # for loading the models, which takes minutes from a slow disk
    warm_up_s: float = 600.0  # between two answers of ranks that warm up before a run
    ping_s: float = 1.0
    silence_s: float = 10.0  # without any message, even after pings; a rank that computes answers
    task_s: float = 300.0  # a task may run this much longer than predicted, or `task_factor` times as long
    task_factor: float = 20.0
    wait_s: float = 30.0  # for a busy rank during a task, or `wait_factor` times the task's prediction
    wait_factor: float = 3.0
    longest_wait_s: float = 3600.0  # even if more was predicted; other waits end long before
    leaving_s: float = 15.0  # for leaving a task, besides `leaving_factor` times its prediction
    leaving_factor: float = 3.0
    stopping_s: float = 10.0  # for leaving an unwanted task, at a block, which takes minutes on a CPU
    killed_s: float = 10.0  # for the end of a killed process, which may hang in a driver or disk
    write_s: float = 60.0

    def for_task_s(self, dispatch: Dispatch) -> float:
        """How long after its predicted end a task may end; a rank hangs if it has not."""
        return max(self.task_s, self.task_factor * dispatch.predicted_s)

    def to_wait_s(self, dispatch: Dispatch) -> float:
        """How long a rank may wait for another one during this task, before both give it up."""
        return min(max(self.wait_s, self.wait_factor * dispatch.predicted_s), self.longest_wait_s)

    def to_leave_s(self, dispatches: Iterable[Dispatch]) -> float:
        """How long ranks may take to leave these tasks, which they cannot interrupt everywhere."""
        longest_s = max((each.predicted_s for each in dispatches), default=0.0)
        return self.leaving_s + self.leaving_factor * longest_s

    def with_copies(self) -> Patience:
        """The same for ranks that copy tens of gigabytes of weights within a task, while others wait."""
        return replace(self, wait_s=10 * self.wait_s, leaving_s=120.0, stopping_s=120.0)

    def with_shared_gpus(self, ranks_per_gpu: int) -> Patience:
        """The same for ranks that take turns on a GPU: everything takes that many times as long."""
        of_ranks = {each.name for each in fields(self)} - {"ping_s", "write_s"}
        return replace(self, **{name: ranks_per_gpu * getattr(self, name) for name in of_ranks})


class Phase(StrEnum):
    STARTING = "starting"  # it loads its models
    INTRODUCING = "introducing"  # its models are loaded; it and its peers map each other's arenas
    PREPARING = "preparing"  # it changes its models, or runs tasks like those of the first job
    SERVING = "serving"  # it takes tasks, or files
    ENDING = "ending"  # it was killed, and its channel has not ended
    STUCK = "stuck"  # it was killed and does not end. It runs none of our code, but its device is not free.
    ENDED = "ended"  # its process is reaped. A worker without a successor stays so: its rank is retired


_GOES_AWAY = {Phase.ENDING, Phase.ENDED}  # killed; its channel has ended
TRANSITIONS: Mapping[Phase, Set[Phase]] = {
    # A worker says that it is ready; a writer serves at once.
    Phase.STARTING: {Phase.INTRODUCING, Phase.SERVING, *_GOES_AWAY},
    # All peers know it. Other models were asked for meanwhile.
    Phase.INTRODUCING: {Phase.PREPARING, Phase.SERVING, *_GOES_AWAY},
    # All is ready; the next request is sent.
    Phase.PREPARING: {Phase.SERVING, Phase.PREPARING, *_GOES_AWAY},
    # Other models are asked for, or tasks have to get ready before a run.
    Phase.SERVING: {Phase.PREPARING, *_GOES_AWAY},
    # Reaped; still there after its time to end.
    Phase.ENDING: {Phase.ENDED, Phase.STUCK},
    Phase.STUCK: set(),
    Phase.ENDED: set(),
}
"""By phase: the phases that may follow."""
STARTS = frozenset({Phase.STARTING, Phase.INTRODUCING})
GONE = frozenset({Phase.ENDED, Phase.STUCK})


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker takes tasks from now on."""


class Loaded(NamedTuple):
    load_s: float
    copied: tuple[str, ...] = ()


class Lost(NamedTuple):
    """A process is gone, and its successor is being started unless the rank is retired."""

    reason: str
    is_retired: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Child:
    """A process and the channel to it. Times are readings of its clock."""

    name: str
    process: BaseProcess
    channel: Channel
    clock: AwakeClock = field(default_factory=AwakeClock)
    phase: Phase = Phase.STARTING
    since_s: float = field(init=False)
    has_started: bool = False
    ends_within_s: float = Patience().killed_s
    verdict: str | None = None
    oom_kills: int = field(default_factory=machine.oom_kills)  # at its start

    def __post_init__(self) -> None:
        self.since_s = self.clock.now_s

    def enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.name} goes from {self.phase} to {phase}"
        self.has_started |= phase in (Phase.INTRODUCING, Phase.SERVING)
        self.phase, self.since_s = phase, self.clock.now_s

    def tell(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message without waiting; if the process is gone, the end of its channel shows it.

        With a full socket (200 KB, hundreds of messages) it is stuck, and is killed. So large messages in
        bursts have to wait for answers, as in `prepare`.
        """
        try:
            self.channel.send(message, fds, wait=False)
        except BlockingIOError:
            logger.warning("%s takes no messages and is killed", self.name)
            self.kill()
        except OSError:
            logger.debug("%s is gone", self.name)

    def hear(self, message: Any) -> Sequence[Joined | Loaded]:
        """Take what it says of itself; returns what it has become by that."""
        raise NotImplementedError

    def kill(self, why: str | None = None) -> None:
        """Kill the process without waiting for its end. The first reason counts."""
        if self.phase in GONE:
            return
        if self.phase is not Phase.ENDING:
            self.enter(Phase.ENDING)
            self.verdict = self.verdict or why
        self.process.kill()

    @property
    def should_have_ended(self) -> bool:
        """It was killed, and neither it nor its channel has ended in time."""
        return self.phase is Phase.ENDING and self.clock.now_s > self.since_s + self.ends_within_s

    def reap(self, *, patience_s: float) -> str:
        """Wait for the end of the process, or kill it; how it ended. One stuck in the kernel is left."""
        self.channel.close()
        self.process.join(patience_s)
        if self.process.is_alive() and self.phase is not Phase.ENDING:
            logger.warning("%s did not end within %g s and is killed", self.name, patience_s)
            self.kill()
        if self.phase is Phase.ENDING:
            self.process.join(max(0.0, self.since_s + self.ends_within_s - self.clock.now_s))
        if self.process.is_alive():
            self.enter(Phase.STUCK)
            _forget(self.process)
            ending = f"killed, and has not ended {self.ends_within_s:g} s later: a driver or a disk holds it"
            logger.error("%s (process %s): %s", self.name, self.process.pid, ending)
            return ending
        self.enter(Phase.ENDED)
        code = self.process.exitcode
        is_killed = code in (-signal.SIGKILL, 255) and self.verdict is None  # 255: the fork server was killed
        why = machine.why_killed(self.oom_kills) if is_killed else None
        return why or (f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}")


class WriterProcess(Child):
    __slots__ = ()

    def hear(self, message: Any) -> Sequence[Joined]:
        if isinstance(message, messages.WriterReady) and self.phase is Phase.STARTING:
            self.enter(Phase.SERVING)
        return ()


@dataclass(slots=True, eq=False, kw_only=True)
class RankProcess(Child):
    rank: int
    incarnation: int = 1
    has_arenas: bool = False  # it knows its peers' arenas, and they know its own or will get it
    unknown_to: set[int] = field(default_factory=set)  # ranks that have not mapped its arena yet
    counts_tokens: bool = False
    startup_s: float = 0.0  # how long it took to load its models
    weights_s: float = 0.0  # the part of `startup_s` for loading; before, it gets its device ready
    read_bytes_per_s: float = 0.0  # as it said last, unless it had no streamed blocks then
    loading: str | None = None
    loads_since_s: float | None = None
    requests: deque[messages.SetModels | messages.WarmUp] = field(default_factory=deque)
    """What it prepares before it takes tasks. It has the first of them if it is in that phase."""
    later: tuple[messages.WarmUp, ...] = ()  # what it prepares between tasks; it is told when it serves
    load_s: float | None = None  # of the last change of models so far, until it is complete
    copied: tuple[str, ...] = ()  # as in `ModelsSet`, of that change
    has_joined: bool = False
    jobs: set[str] = field(default_factory=set)
    is_to_blame: bool = True
    heard_s: float = field(init=False)  # when its last message came

    def __post_init__(self) -> None:
        self.since_s = self.heard_s = self.clock.now_s

    def hear(self, message: Any) -> Sequence[Joined | Loaded]:
        self.heard_s = self.clock.now_s
        if isinstance(message, messages.WorkerReady | messages.ModelsSet):
            self.read_bytes_per_s = message.read_bytes_per_s or self.read_bytes_per_s
        match message:
            case messages.WorkerFailed():
                self.verdict = self.verdict or message.reason
            case messages.Loading():
                self.loading = message.checkpoint
                if self.loads_since_s is None:
                    self.loads_since_s = self.heard_s
            case messages.WorkerReady():
                self.startup_s, self.counts_tokens = message.startup_s, message.counts_tokens
                self.weights_s = self.heard_s - (self.loads_since_s or self.heard_s)
                self.loading = None
                if self.phase is Phase.STARTING:
                    self.enter(Phase.INTRODUCING)
            case messages.ModelsSet() | messages.WarmedUp() if self.phase is Phase.PREPARING:
                self.requests.popleft()
                self.loading = None
                if isinstance(message, messages.ModelsSet):
                    self.copied = message.copied
                if self.load_s is not None:
                    self.load_s += (
                        message.load_s if isinstance(message, messages.ModelsSet) else message.seconds
                    )
                return self._go_on()
        return ()

    @property
    def is_to_load(self) -> bool:
        """It has to change its models, or does."""
        return any(isinstance(request, messages.SetModels) for request in self.requests)

    def load(self, message: messages.SetModels, later: Sequence[messages.WarmUp]) -> None:
        """Let it change its models instead of all that it has not begun, and prepare these between tasks."""
        while len(self.requests) > (self.phase is Phase.PREPARING):
            self.requests.pop()
        self.load_s, self.later = 0.0, tuple(later)
        self.prepare([message])

    def prepare(self, requests: Sequence[messages.SetModels | messages.WarmUp]) -> None:
        """Let it do this before it takes tasks, one after the other; not before its peers know it."""
        self.requests.extend(requests)
        if self.phase is Phase.SERVING and requests:
            self._go_on()

    def prepare_later(self, items: Sequence[messages.WarmUp]) -> None:
        """Let it prepare these between tasks, after those that it was told before."""
        self.later += tuple(items)
        if self.phase is Phase.SERVING and self.later:
            self.tell(messages.WarmUpLater(self.later))
            self.later = ()

    def join(self, later: Sequence[messages.WarmUp]) -> Sequence[Joined | Loaded]:
        """Its peers know it: it takes tasks, after a change of its models if one was asked for."""
        if not self.requests:
            self.later = tuple(later)
        return self._go_on()

    def _go_on(self) -> Sequence[Joined | Loaded]:
        if self.requests:
            self.enter(Phase.PREPARING)
            self.tell(self.requests[0])
            return ()
        self.enter(Phase.SERVING)
        became: list[Joined | Loaded] = [] if self.has_joined else [Joined()]
        if self.load_s is not None:
            became.append(Loaded(self.load_s, self.copied))
        self.has_joined, self.load_s = True, None
        self.prepare_later(())
        return became

    def why_hung(self, patience: Patience) -> str | None:
        """The reason why it counts as hung in its phase; None if it does not."""
        if self.phase in (Phase.STARTING, Phase.PREPARING):
            is_slow = self.clock.now_s > self.since_s + patience.starting_s
            return "it does not get its models or their steps ready" if is_slow else None
        silent_s = self.clock.now_s - self.heard_s
        return f"no sign of life for {silent_s:.0f} s" if silent_s > patience.silence_s else None


def _forget(process: BaseProcess) -> None:
    """Let this process end without the child; `multiprocessing` waits for all of its children at exit."""
    children: set[BaseProcess] = multiprocessing.process._children  # type: ignore[attr-defined]
    children.discard(process)
