"""Files that are being decoded or written: no further decode begins while there are too many.

Frames are kept in memory until they are written. Where writers are slower than decodes, as on a slow disk,
they would pile up until memory or descriptors run out.
"""

from __future__ import annotations

from gfgen.graph import Stage, Task
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event, FramesLost, TaskFailed
from gfgen.runtime.core.observer import JobOutcome, Observer
from gfgen.snapshot import Decision

FILES_PER_RANK, MIN_FILES = 4, 16
"""So that a burst of small pictures holds up nobody. A long video has 0.3 GB of frames: 16 of them 5 GB."""


class Backlog(Observer):
    """Counts jobs from the start of their decode to their end; sees what the control loop does.

    It goes by dispatches and events alone, so that a replay decides alike.
    """

    def __init__(self, *, num_ranks: int) -> None:
        self._most = max(MIN_FILES, FILES_PER_RANK * num_ranks)
        self._decodes: dict[str, int] = {}
        """By job: the dispatch that decodes it, or has."""

    def dispatched(self, dispatch: Dispatch) -> None:
        if dispatch.task.stage is Stage.DECODE:
            self._decodes[dispatch.task.job_id] = dispatch.number

    def applied(self, event: Event) -> None:
        if isinstance(event, FramesLost):
            self._decodes.pop(event.job_id, None)
        elif isinstance(event, TaskFailed):
            self._decodes = {job: number for job, number in self._decodes.items() if number != event.dispatch}

    def ended(self, outcome: JobOutcome) -> None:
        self._decodes.pop(outcome.info.job_id, None)

    def holds_back(self, decision: Decision) -> bool:
        """Whether this has to wait for files that are under way.

        These end whatever the policy does, and it is asked again then: so nothing waits for ever. Its ranks
        stay idle meanwhile: other jobs on them would come to their decode, too, and wait there.
        """
        if len(self._decodes) < self._most:
            return False
        # What a policy returns may be anything; whoever begins it says so.
        task = decision.task if isinstance(decision, Decision) else None
        return isinstance(task, Task) and task.stage is Stage.DECODE
