"""How long processes may take before they count as hung: in one task, to leave one, to answer. Pure.

The end of its channel shows at once that a process has died. Others are stopped, swapped out, or caught in a
loop or in a driver. `RankProcess.why_hung` judges a worker by its phase and its silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gfgen.runtime.core.dispatch import Dispatch

MAX_PAUSES = 32
"""Pauses of this process that do not count for others. If it is always slow, it must not forgive forever."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait before a process counts as hung and is killed."""

    starting_s: float = 1800.0
    """For loading the models, which takes minutes from a slow disk."""
    warm_up_s: float = 600.0
    """Between two answers of ranks that warm up before a run."""
    ping_s: float = 1.0
    silence_s: float = 10.0
    """Without any message, even after pings. Python that computes without the interpreter's lock answers."""
    task_s: float = 300.0
    """A task may run this much longer than predicted, or `task_factor` times as long."""
    task_factor: float = 20.0
    wait_s: float = 30.0
    """For one wait of a rank for another during a task, or `wait_factor` times the predicted duration of the
    task, because the other rank is busy with a part of the same task."""
    wait_factor: float = 3.0
    longest_wait_s: float = 3600.0
    """Even if more was predicted. The waits for a rank that dies, or is given up, end long before."""
    leaving_s: float = 15.0
    """For leaving a task that is given up, in addition to `leaving_factor` times its predicted duration."""
    leaving_factor: float = 3.0
    stopping_s: float = 10.0
    """For leaving an unwanted task. A rank looks for a stop at every block, but on a CPU a block of a huge
    job takes minutes."""
    killed_s: float = 10.0
    """For the end of a killed process. It takes a second or two to free a GPU. A process that hangs in a
    driver, or on a disk that is gone, does not end."""
    write_s: float = 60.0
    """For writing a file, in addition to the time of the slowest writer."""
    asleep_s: float = 3.0
    """If this process has not looked for this long, it was stopped: that time counts for no other process."""

    def with_offload(self) -> Patience:
        """The same for ranks that copy tens of gigabytes of weights within a task, while others wait."""
        return replace(self, wait_s=10 * self.wait_s, leaving_s=120.0, stopping_s=120.0)

    def with_shared_gpus(self, ranks_per_gpu: int) -> Patience:
        """The same for ranks that take turns on a GPU: everything takes that many times as long."""
        return replace(self, **{name: ranks_per_gpu * getattr(self, name) for name in _OF_RANKS})


_OF_RANKS = (
    *("starting_s", "warm_up_s", "silence_s", "task_s", "task_factor", "wait_s", "wait_factor"),
    *("longest_wait_s", "leaving_s", "leaving_factor", "stopping_s", "killed_s"),
)
"""Waits for ranks; the others are for this process and writers."""


@dataclass(slots=True)
class Watchdog:
    """Judges tasks, and knows when this process did not run. Times are seconds of the run's clock."""

    patience: Patience
    pinged_s: float = 0.0
    looked_s: float = 0.0
    pauses: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_PAUSES))
    """When this process continued after it was stopped, and how long that was."""

    def look(self, now_s: float) -> float:
        """Note that this process looks; returns how long it was stopped before, or 0."""
        paused_s, self.looked_s = now_s - self.looked_s, now_s
        if paused_s <= self.patience.asleep_s:
            return 0.0
        self.pauses.append((now_s, paused_s))
        return paused_s

    def wants_ping(self, now_s: float) -> bool:
        """Whether it is time to ask all processes for a sign of life."""
        if now_s < self.pinged_s + self.patience.ping_s:
            return False
        self.pinged_s = now_s
        return True

    def is_overdue(self, dispatch: Dispatch, now_s: float) -> bool:
        """Whether a running task takes so long that a rank must hang."""
        allowed_s = max(self.patience.task_s, self.patience.task_factor * _predicted_s(dispatch))
        allowed_s += sum(paused_s for at_s, paused_s in self.pauses if at_s > dispatch.submitted_s)
        return now_s > dispatch.predicted_end_s + allowed_s

    def time_to_wait_s(self, dispatch: Dispatch) -> float:
        """How long a rank may wait for another one during this task, before both give it up."""
        patience = self.patience
        return min(
            max(patience.wait_s, patience.wait_factor * _predicted_s(dispatch)), patience.longest_wait_s
        )

    def time_to_leave_s(self, dispatches: Iterable[Dispatch]) -> float:
        """How long ranks may take to leave these tasks, which they cannot interrupt everywhere."""
        longest_s = max(map(_predicted_s, dispatches), default=0.0)
        return self.patience.leaving_s + self.patience.leaving_factor * longest_s


def _predicted_s(dispatch: Dispatch) -> float:
    return dispatch.predicted_end_s - dispatch.predicted_start_s
