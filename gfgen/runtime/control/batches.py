"""Jobs that are alike: batches, which share their steps and nothing else, and jobs with equal calls.

A batch has jobs that follow each other in the file, arrive at once, and are equal in all but prompts, seeds
and files. Only their steps go together, as dispatches with consecutive numbers on one rank, each of which
takes an equal part of the time. Policies see one job of a batch, the leader, when all others have come as
far.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gfgen.graph import FIRST_STEP
from gfgen.job.spec import call_key
from gfgen.runtime.control.job_record import JobRecord
from gfgen.runtime.core.admission import AdmittedJob

_OF_ONE_JOB: dict[str, Any] = dict.fromkeys(
    ("negative_prompt", "prompt_syntax", "seed", "tag", "output", "format", "quality", "fps", "line", "place")
)
_OF_TEXTS = re.compile("prompt|text|token|caption|char|length|string|word|json|KeyError", re.IGNORECASE)
"""In reasons that may depend on what a job's texts are."""
_texts = operator.attrgetter("job.spec.prompt", "job.spec.negative_prompt")


@dataclass(slots=True)
class Forming:
    size: int
    _last: list[JobRecord] = field(default_factory=list)

    def add(self, record: JobRecord) -> None:
        if self.size == 1 or not record.job.can_join_batch:
            self._last = []
        elif 0 < len(self._last) < self.size and _are_alike(record, self._last[-1]):
            self._last.append(record)
            record.batch = self._last
        else:
            self._last = record.batch


def is_to_wait(record: JobRecord) -> bool:
    """Whether the next task of a job is a step of a batch for which another job of it stands."""
    if not takes_steps_together(record):
        return False
    index = min(each.first_open_index for each in record.batch)
    at_step = [each for each in record.batch if each.first_open_index == index]
    return record is not at_step[0] or any(each.flights for each in at_step)


def takes_steps_together(record: JobRecord) -> bool:
    return len(record.batch) > 1 and FIRST_STEP <= record.progress.next_index < record.num_tasks - 1


def batch_peers(record: JobRecord) -> Sequence[JobRecord]:
    """The other jobs that take the next step of a batch together with its leader."""
    if not takes_steps_together(record):
        return ()
    index = record.progress.next_index
    return [each for each in record.batch if each is not record and each.progress.next_index == index]


def with_equal_calls(record: JobRecord, records: Iterable[JobRecord]) -> list[JobRecord]:
    """The other jobs of its owner whose calls have equal arguments, if the pipeline refuses these."""
    if (task := record.trouble.refused) is None:
        return []
    equals = [each for each in records if each is not record and _call(each) == _call(record)]
    behind = [each for each in equals if each.first_open_index <= task.index]
    is_of_texts = len(behind) < len(equals) or _OF_TEXTS.search(record.trouble.doom or "")
    return [each for each in behind if _texts(each) == _texts(record)] if is_of_texts else behind


def _call(record: JobRecord) -> object:
    spec = record.job.spec
    return record.owner, call_key(spec), spec.image_sha256, spec.files_sha256, record.patches


def _are_alike(record: JobRecord, other: JobRecord) -> bool:
    """Whether two jobs differ in nothing that shapes their steps, or says when they run."""
    own = (record.job.checkpoint, record.job.shape, record.arrival_s, record.deadline_s)
    its = (other.job.checkpoint, other.job.shape, other.arrival_s, other.deadline_s)
    return own == its and not other.arrived and _what_counts(record.job) == _what_counts(other.job)


def _what_counts(job: AdmittedJob) -> object:
    return replace(job.spec, id="", prompt="", **_OF_ONE_JOB)
