"""One process of a run, the channel to it, and where it is in its life."""

from __future__ import annotations

import logging
import multiprocessing.process
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.messages import WarmUp
from gfgen.runtime.processes.lifecycle import GONE, TRANSITIONS, Phase
from gfgen.runtime.processes.watchdog import Patience

logger = logging.getLogger(__name__)


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
    killed_s: float | None = None
    verdict: str | None = None
    """Why it was killed, or why it says that it ends."""

    def enter(self, phase: Phase) -> None:
        """Go on to another phase."""
        assert phase in TRANSITIONS[self.phase], f"{self.name} goes from {self.phase} to {phase}"
        self.has_started |= phase in (Phase.INTRODUCING, Phase.SERVING)
        self.phase, self.since_s = phase, time.monotonic()

    def tell(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message without waiting for the process.

        If the process is gone, nothing is sent: the end of its channel tells later. If its socket is full, it
        is stopped or stuck and is killed. The socket holds about 200 KB (hundreds of small messages, five
        with the longest prompts), so large messages in bursts have to wait for answers, as `warm_up` does.
        """
        try:
            self.channel.send(message, fds, wait=False)
        except BlockingIOError:
            logger.warning("%s takes no messages and is killed", self.name)
            self.kill()
        except OSError:
            logger.debug("%s is gone", self.name)

    def kill(self, why: str | None = None) -> None:
        """Kill the process; does not wait for its end. The first reason stands."""
        if self.phase in GONE:
            return
        if self.phase is not Phase.ENDING:
            self.enter(Phase.ENDING)
            self.verdict = self.verdict or why
            self.killed_s = time.monotonic()
        self.process.kill()

    @property
    def should_have_ended(self) -> bool:
        """It was killed so long ago that its end will not come, nor the end of its channel."""
        return self.killed_s is not None and time.monotonic() > self.killed_s + self.ends_within_s

    def reap(self, *, patience_s: float) -> str:
        """Wait for the end of the process, and kill it if that does not come; returns how it ended.

        A process that survives this is left to itself. A killed process returns from the kernel no more.
        What it launched on a GPU before waits for signals that will not come, so it writes to nobody's
        arena.
        """
        self.channel.close()
        self.process.join(patience_s)
        if self.process.is_alive() and not self.killed_s:
            logger.warning("%s did not end within %g s and is killed", self.name, patience_s)
            self.kill()
        if self.killed_s:
            self.process.join(max(0.0, self.killed_s + self.ends_within_s - time.monotonic()))
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
    """How long its start was put off because its predecessor could not start."""
    due_s: float = 0.0
    """Once it is gone: when its successor is started, by the machine's monotonic clock."""


@dataclass(slots=True, eq=False, kw_only=True)
class RankProcess(Child):
    """The process of a rank."""

    rank: int
    incarnation: int = 1
    has_arenas: bool = False
    """It knows its peers' arenas, and they know its own or have been sent it."""
    unknown_to: set[int] = field(default_factory=set)
    """Ranks that have yet to map its arena."""
    counts_tokens: bool = False
    """It could pad texts."""
    startup_s: float = 0.0
    """How long it took to load its models."""
    loading: str | None = None
    """The checkpoint that it loads now."""
    num_to_load: int = 0
    """Changes of models that it has not answered."""
    warm_ups: deque[WarmUp] = field(default_factory=deque)
    """Steps that have to get ready; it has been told of the first of them."""
    load_s: float = 0.0
    """What the last change of models has taken so far."""
    jobs: set[str] = field(default_factory=set)
    """Jobs that this worker knows."""
    is_to_blame: bool = True
    """Its death counts against its rank."""

    def warm_up(self, items: Sequence[WarmUp]) -> None:
        """Let it get these steps ready, each after it has answered the one before."""
        is_idle = not self.warm_ups
        self.warm_ups.extend(items)
        if is_idle and items:
            self.tell(items[0])

    def has_warmed_up(self) -> None:
        """It has answered, and can be told of the next step."""
        if self.warm_ups:
            self.warm_ups.popleft()
        if self.warm_ups:
            self.tell(self.warm_ups[0])

    def forget_warm_ups(self) -> None:
        """Drop the steps that it was not told of."""
        while len(self.warm_ups) > 1:
            self.warm_ups.pop()


def _forget(process: BaseProcess) -> None:
    """Let this process end without the child: `multiprocessing` waits for all its children at the exit."""
    children: set[BaseProcess] = multiprocessing.process._children  # type: ignore[attr-defined]
    children.discard(process)
