"""Which jobs take their next steps together on a rank.

Steps are *shared* by jobs of models whose blocks are read for each forward (models/streaming), because one
read then serves them all. When a policy gives one rank a step, open jobs with the same weights that it gives
no rank join it, and so with encodes. They need not be alike: each computes what it computes alone. Each next
task is decided anew. A policy that ends one job after the other would leave the others without a step to
share. So before a step of a job without a deadline, jobs that are as urgent come to their first step.

Shared steps are dispatches with consecutive numbers on one rank; each takes an equal part of the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from gfgen.graph import FIRST_STEP, Stage
from gfgen.layout import ALONE
from gfgen.runtime.control.job_record import JobRecord
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.predict.cost import CostClass, CostModel
from gfgen.snapshot import Decision, Snapshot

MAX_JOBS = 8
"""Their 16 forwards of a guided 1024x1024 picture compute a block of Qwen-Image for 37 ms, three times as
long as a read from host memory takes. More would keep more activations, and let the first file wait."""
MAX_COMPUTED = 1.1  # a step of more times its reads is bound by computing: sharing gains nothing
SHARED = (Stage.ENCODE, Stage.DENOISE)
"""Text encoders are streamed before transformers, and compute for milliseconds. Steps of a second pass are
alone: the first of them decodes and encodes, too, and all keep activations of a larger picture."""


class Sharing:
    """The shared steps of a run."""

    def __init__(self, records: Mapping[str, JobRecord], costs: CostModel) -> None:
        self._reads_s, self._records, self._costs = costs.reads_s, records, costs
        self._joining: dict[str, list[str]] = {}  # by job with a rank in this turn: those that join it

    def arranged(
        self, decisions: list[Decision], snapshot: Snapshot, *, holds_back: Callable[[Decision], bool]
    ) -> list[Decision]:
        """The decisions of a turn; a step may wait for a job that comes to its own, to share the next."""
        self._joining = {}
        if not self._reads_s:
            return decisions
        decided = {each.task.job_id for each in decisions}
        waiting = [view for view in snapshot.open.values() if view.job_id not in decided]
        waiting.sort(key=lambda x: (x.precedence, x.due_s, -x.next_task.index, x.arrival_s))
        numbers = Counter(view.model for jobs in (snapshot.open, snapshot.busy) for view in jobs.values())
        idle = set(snapshot.free_ranks).difference(*[each.layout.ranks for each in decisions])
        num_ranks = max(1, len(snapshot.ranks) - len(idle))  # the policy leaves the others idle

        def arrange(decision: Decision) -> Decision:
            if (lead := self._leader(decision)) is None:
                return decision
            most = min(MAX_JOBS, math.ceil(numbers[lead.model] / num_ranks))  # each rank gets some
            mates = [x for x in waiting if (x.model, x.patches) == (lead.model, lead.patches)]
            mates = [view for view in mates if self._may_share(self._records[view.job_id])]
            urgency = -lead.job.spec.priority  # jobs of less do not slow it down
            stage = decision.task.stage
            alike = [x for x in mates if x.next_task.stage is stage and x.precedence <= urgency]
            joining, has_room = alike[: most - 1], len(alike) < most - 1
            early = [x for x in mates if x.next_task.index < FIRST_STEP and x.precedence == urgency]
            may_wait = stage is Stage.DENOISE and has_room and lead.deadline_s == math.inf
            for view in early if may_wait else ():
                if not holds_back(earlier := Decision(view.next_task, decision.layout)):
                    waiting.remove(view)
                    return arrange(earlier)
            if not self._is_late(lead, 1 + len(joining), now_s=snapshot.now_s):
                self._joining[lead.job_id] = [view.job_id for view in joining]
                waiting[:] = [view for view in waiting if view not in joining]
            return decision

        return list(map(arrange, decisions))

    def peers(self, record: JobRecord, decision: Decision) -> Sequence[JobRecord]:
        """The other jobs whose next tasks run with this decision."""
        if record.model not in self._reads_s or decision.task.stage not in SHARED:
            return ()
        peers = [self._records[job_id] for job_id in self._joining.get(record.job_id, ())]
        for each in (record, *peers):
            each.cost_class, each._view = self._costs.class_of(each.job, num_sharers=1 + len(peers)), None
        return peers

    def class_of(self, record: JobRecord, dispatch: Dispatch) -> CostClass:
        """The class in which a task has run; its job may be in another one by now."""
        if dispatch.task.stage not in SHARED or record.model not in self._reads_s:
            return record.cost_class
        return self._costs.class_of(record.job, num_sharers=dispatch.num_sharers)

    def _leader(self, decision: Decision) -> JobRecord | None:
        """The job of a decision if others can share its task, and gain by it as far as predictions say."""
        record, stage = self._records.get(decision.task.job_id), decision.task.stage
        is_alone = stage in SHARED and decision.layout.degrees == ALONE
        if record is None or not is_alone or not self._may_share(record):
            return None
        if stage is Stage.ENCODE:
            return record
        kind, limit_s = (record.cost_class, Stage.DENOISE, ALONE), MAX_COMPUTED * record.cost_class.reads_s[0]
        return record if self._costs.ends_after_s(*kind)[0] <= limit_s else None

    def _may_share(self, record: JobRecord) -> bool:
        """A job that has failed before goes on alone, so that it does not fail others again."""
        has_failed = record.trouble.failures or record.trouble.num_lost_workers
        return record.model in self._reads_s and not has_failed

    def _is_late(self, record: JobRecord, number: int, *, now_s: float) -> bool:
        """Whether a job would miss its deadline because this many jobs take all of its steps together."""

        def ends_s(number: int) -> float:
            found, first = self._costs.class_of(record.job, num_sharers=number), record.next_task
            rest_s = self._costs.remaining_s(found, first, record.num_tasks, ALONE, is_handed_out=False)
            return now_s + number * rest_s + record.cost_class.write_s

        has_deadline = number > 1 and record.deadline_s < math.inf
        return has_deadline and ends_s(1) <= record.deadline_s < ends_s(number)
