"""One process of a run: its phases from start to end, the transitions between them, and the channel to it."""

from __future__ import annotations

import logging
import multiprocessing.process
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.process import BaseProcess
from typing import Any

from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.messages import (
    Loading,
    ModelsSet,
    SetModels,
    WarmedUp,
    WarmUp,
    WorkerFailed,
    WorkerReady,
    WriterReady,
)
from gfgen.runtime.processes.watchdog import Patience

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    STARTING = "starting"
    """It loads its models."""
    INTRODUCING = "introducing"
    """Its models are loaded. It maps the arenas of its peers, and they map its own."""
    WARMING = "warming"
    """It runs steps like those of the jobs, so that they are ready."""
    SERVING = "serving"
    """It takes tasks, or files."""
    LOADING = "loading"
    """It changes its models after its earlier tasks, and prepares their steps."""
    ENDING = "ending"
    """It was killed, and its channel has not ended."""
    STUCK = "stuck"
    """It was killed and does not end. It runs none of our code, but its device is not free."""
    ENDED = "ended"
    """Its process is reaped. A worker without a successor stays in this phase: its rank is retired."""


_GOES_AWAY = {Phase.ENDING, Phase.ENDED}  # killed; its channel has ended
TRANSITIONS: Mapping[Phase, Set[Phase]] = {
    # A worker says that it is ready; a writer serves at once.
    Phase.STARTING: {Phase.INTRODUCING, Phase.SERVING, *_GOES_AWAY},
    # All peers know it. Other models were asked for meanwhile, or steps of jobs at hand have to get ready.
    Phase.INTRODUCING: {Phase.LOADING, Phase.WARMING, Phase.SERVING, *_GOES_AWAY},
    # The last step is ready; more steps have to get ready; other models are asked for.
    Phase.WARMING: {Phase.SERVING, Phase.WARMING, Phase.LOADING, *_GOES_AWAY},
    # Steps have to get ready before a run; other models are asked for.
    Phase.SERVING: {Phase.WARMING, Phase.LOADING, *_GOES_AWAY},
    # Models are loaded and the last step is ready; other models are asked for, or more steps.
    Phase.LOADING: {Phase.SERVING, Phase.LOADING, *_GOES_AWAY},
    # Reaped; still there after its time to end.
    Phase.ENDING: {Phase.ENDED, Phase.STUCK},
    Phase.STUCK: set(),
    Phase.ENDED: set(),
}
"""By phase: the phases that may follow."""
STARTS = frozenset({Phase.STARTING, Phase.INTRODUCING})
GONE = frozenset({Phase.ENDED, Phase.STUCK})

_SLOW = {
    Phase.STARTING: "it does not get ready",
    Phase.WARMING: "it does not get its steps ready",
    Phase.LOADING: "it does not get its models or their steps ready",
}
"""Phases in which a worker may be silent as long as its start may take, and why it is killed after that."""
_MAY_LOAD = (Phase.WARMING, Phase.SERVING, Phase.LOADING)


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
    """The reason is its own, or why it was killed; otherwise it is how the process ended."""
    is_retired: bool = False
    pause_s: float = 0.0
    """Seconds until a writer's successor starts."""
    unloadable: Sequence[str] = ()
    """Names of the model that it was loading and that no rank can load."""


@dataclass(slots=True, eq=False, kw_only=True)
class Child:
    """A process and the channel to it."""

    name: str
    process: BaseProcess
    channel: Channel
    phase: Phase = Phase.STARTING
    since_s: float = field(default_factory=time.monotonic)
    """When the phase began, by the machine's monotonic clock."""
    has_started: bool = False
    """It has left the first phase alive."""
    ends_within_s: float = Patience().killed_s
    """How long it may take to end once it is killed."""
    verdict: str | None = None
    """Why it was killed, or the reason that it gave for its end."""

    def enter(self, phase: Phase) -> None:
        """Go on to another phase."""
        assert phase in TRANSITIONS[self.phase], f"{self.name} goes from {self.phase} to {phase}"
        self.has_started |= phase in (Phase.INTRODUCING, Phase.SERVING)
        self.phase, self.since_s = phase, time.monotonic()

    def tell(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message without waiting for the process.

        If the process is gone, nothing is sent: the end of its channel shows that. If its socket is full, it
        is stopped or stuck, and is killed. The socket holds about 200 KB (hundreds of small messages, five
        with the longest prompts), so large messages in bursts have to wait for answers, as `warm_up` does.
        """
        try:
            self.channel.send(message, fds, wait=False)
        except BlockingIOError:
            logger.warning("%s takes no messages and is killed", self.name)
            self.kill()
        except OSError:
            logger.debug("%s is gone", self.name)

    def hear(self, message: Any) -> Joined | Loaded | None:
        """Take what it says of itself; returns what it has become by that, if anything."""
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
        return self.phase is Phase.ENDING and time.monotonic() > self.since_s + self.ends_within_s

    def reap(self, *, patience_s: float) -> str:
        """Wait for the end of the process, and kill it if it does not end; returns how it ended.

        A process that survives this is left to itself. A killed process never returns from the kernel. Its
        kernels on a GPU wait for signals that do not come, so they write to no arena.
        """
        self.channel.close()
        self.process.join(patience_s)
        if self.process.is_alive() and self.phase is not Phase.ENDING:
            logger.warning("%s did not end within %g s and is killed", self.name, patience_s)
            self.kill()
        if self.phase is Phase.ENDING:
            self.process.join(max(0.0, self.since_s + self.ends_within_s - time.monotonic()))
        if self.process.is_alive():
            self.enter(Phase.STUCK)
            _forget(self.process)
            ending = f"killed, and has not ended {self.ends_within_s:g} s later: a driver or a disk holds it"
            logger.error("%s (process %s): %s", self.name, self.process.pid, ending)
            return ending
        self.enter(Phase.ENDED)
        code = self.process.exitcode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


@dataclass(slots=True, eq=False, kw_only=True)
class WriterProcess(Child):
    """A process that encodes and writes files."""

    pause_s: float = 0.0
    """The delay of its start, because its predecessor could not start."""
    due_s: float = 0.0
    """When its successor starts after its end, by the machine's monotonic clock."""

    def hear(self, message: Any) -> Joined | None:
        if not isinstance(message, WriterReady) or self.phase is not Phase.STARTING:
            return None
        self.enter(Phase.SERVING)
        return Joined()


@dataclass(slots=True, eq=False, kw_only=True)
class RankProcess(Child):
    """The process of a rank."""

    rank: int
    incarnation: int = 1
    has_arenas: bool = False
    """It knows its peers' arenas, and they know its own or will get it."""
    unknown_to: set[int] = field(default_factory=set)
    """Ranks that have not mapped its arena yet."""
    counts_tokens: bool = False
    """It can pad texts."""
    startup_s: float = 0.0
    """How long it took to load its models."""
    loading: str | None = None
    """The checkpoint that it loads now."""
    num_to_load: int = 0
    """Changes of models that it has not answered."""
    warm_ups: deque[WarmUp] = field(default_factory=deque)
    """Steps to prepare; it has the message for the first of them."""
    load_s: float = 0.0
    """The time that the last change of models has taken so far."""
    jobs: set[str] = field(default_factory=set)
    """Jobs that this worker knows."""
    is_to_blame: bool = True
    """Its death counts against its rank."""
    heard_s: float = field(default_factory=time.monotonic)
    """When its last message came, or when a run began since then, by the machine's monotonic clock."""

    def hear(self, message: Any) -> Joined | Loaded | None:
        self.heard_s = time.monotonic()
        match message:
            case WorkerFailed():
                self.verdict = self.verdict or message.reason
            case Loading():
                self.loading = message.checkpoint
            case WorkerReady():
                self.startup_s, self.counts_tokens = message.startup_s, message.counts_tokens
                self.loading = None
                if self.phase is Phase.STARTING:
                    self.enter(Phase.INTRODUCING)
            case ModelsSet():
                self.loading = None
                self.num_to_load = max(0, self.num_to_load - 1)
                self.load_s += message.load_s
                return self._settled()
            case WarmedUp() if self.warm_ups:
                self.warm_ups.popleft()
                if self.warm_ups:
                    self.tell(self.warm_ups[0])
                self.load_s += message.seconds
                return self._settled()
        return None

    def _settled(self) -> Joined | Loaded | None:
        """What it has become after an answer: nothing while it has more to answer."""
        if self.num_to_load or self.warm_ups:
            return None
        if self.phase is Phase.INTRODUCING:  # models were changed while it started
            return Loaded(self.load_s)
        if self.phase not in (Phase.WARMING, Phase.LOADING):
            return None
        became = Joined() if self.phase is Phase.WARMING else Loaded(self.load_s)
        self.enter(Phase.SERVING)
        return became

    def join(self, steps: Sequence[WarmUp]) -> Joined | None:
        """Its peers know it: it takes tasks, or first prepares these steps of the jobs at hand."""
        if steps and not self.num_to_load:
            self.warm_up(steps)
            return None
        self.enter(Phase.LOADING if self.num_to_load else Phase.SERVING)
        return Joined()

    def warm_up(self, items: Sequence[WarmUp]) -> None:
        """Let it prepare these steps, each after it has answered the one before."""
        self.enter(Phase.WARMING)
        self._add_warm_ups(items)

    def load(self, message: SetModels, warm_ups: Sequence[WarmUp]) -> Joined | None:
        """Let it change its models, and prepare these steps unless it still starts."""
        if self.phase is Phase.ENDING:
            return None
        self.num_to_load += 1
        self.load_s = 0.0
        while len(self.warm_ups) > 1:  # all but the one that it works on
            self.warm_ups.pop()
        self.tell(message)
        became = Joined() if self.phase is Phase.WARMING else None
        if self.phase in _MAY_LOAD:
            self.enter(Phase.LOADING)
            self._add_warm_ups(warm_ups)
        return became

    def why_hung(self, patience: Patience, now_s: float) -> str | None:
        """The reason why it counts as hung in its phase; None if it does not."""
        if self.phase in _SLOW:
            return _SLOW[self.phase] if now_s > self.since_s + patience.starting_s else None
        silent_s = now_s - self.heard_s
        return f"no sign of life for {silent_s:.0f} s" if silent_s > patience.silence_s else None

    def forgive(self, paused_s: float) -> None:
        """The control process did not run for this time, in which it could hear nobody."""
        self.since_s += paused_s
        self.heard_s = min(time.monotonic(), self.heard_s + paused_s)

    def _add_warm_ups(self, items: Sequence[WarmUp]) -> None:
        is_idle = not self.warm_ups
        self.warm_ups.extend(items)
        if is_idle and items:
            self.tell(items[0])


def _forget(process: BaseProcess) -> None:
    """Let this process end without the child; `multiprocessing` waits for all of its children at exit."""
    children: set[BaseProcess] = multiprocessing.process._children  # type: ignore[attr-defined]
    children.discard(process)
