"""How long processes may take before they count as hung, and the time that counts for this.

The end of its channel shows at once that a process has died. Others are stopped, swapped out, or caught in a
loop or in a driver. `RankProcess.why_hung` judges a worker by its phase and its silence.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from gfgen.runtime.core.dispatch import Dispatch

LONGEST_LOOK_S = 0.4
"""The most that counts between two looks at other processes; the loop looks every quarter of a second."""


class AwakeClock:
    """Seconds in which this process looked at the others.

    While it is stopped, or the machine sleeps, it hears nobody, so this time counts for nobody.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        """At the last look."""
        self._looked_s = time.monotonic()

    def look(self) -> None:
        before_s, self._looked_s = self._looked_s, time.monotonic()
        self.now_s += min(self._looked_s - before_s, LONGEST_LOOK_S)


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

    def with_offload(self) -> Patience:
        """The same for ranks that copy tens of gigabytes of weights within a task, while others wait."""
        return replace(self, wait_s=10 * self.wait_s, leaving_s=120.0, stopping_s=120.0)

    def with_shared_gpus(self, ranks_per_gpu: int) -> Patience:
        """The same for ranks that take turns on a GPU: everything takes that many times as long."""
        of_ranks = {each.name for each in fields(self)} - {"ping_s", "write_s"}
        return replace(self, **{name: ranks_per_gpu * getattr(self, name) for name in of_ranks})
