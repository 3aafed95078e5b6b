"""What a run starts from, besides its jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gfgen.layout import Degrees
from gfgen.runtime.files.resume import ResumePoint

GRACE_S = 30.0
"""How long running tasks may take to end when the run is to stop, before they are stopped, too."""

FIRST_USE_S = 0.5
"""`RunStart.first_use_s` of ranks on GPUs, which load kernels and choose convolutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """The circumstances of a run. Together with its jobs and events they determine every decision.

    The state is built from them, and the journal's header records them.
    """

    num_ranks: int
    lookahead_s: float = 0.0
    """How long before the predicted end of a task its successor may be queued, besides a share of the task.
    0: a task is dispatched only when its input exists."""
    max_degree: int | None = None
    """Most ranks of one task. None: the size of the largest island."""
    started_at: float = 0.0
    """Unix time at which the run's clock starts."""
    last_number: int = 0
    """The last dispatch that these ranks have seen in an earlier run."""
    arrived_at: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Unix time at which each job, by (id, spec hash), first arrived."""
    resume: Mapping[str, ResumePoint] = field(default_factory=dict)
    """By job: where a stopped job continues."""
    closes_s: float | None = None
    """No job begins that is predicted to end after this time on the run's clock."""
    grace_s: float = GRACE_S
    resident: Collection[str] | None = None
    """Models that ranks hold at first; jobs of other models wait for their turn. None: ranks hold all."""
    islands: Sequence[Sequence[int]] | None = None
    """Sets of ranks that reach each other's memory. None: all do."""
    batch: int = 1
    """The most jobs that take their steps together."""
    num_writers: int = 1
    """Processes that write files; looks ahead count with them."""
    first_use_s: float = 0.0
    """Extra time of the first step or decode of a model and shape on some degrees, until the run has learned
    it; 0: it costs nothing."""
    warm: Collection[tuple[str, str, Degrees]] = ()
    """Models, by the names that jobs have, with shapes and degrees whose first uses are over."""

    def header(self) -> dict[str, Any]:
        return {
            "ranks": self.num_ranks,
            "guard_s": self.lookahead_s,
            "started_at": self.started_at,
            "last_number": self.last_number,
            "resumed": {
                job_id: (point.next_index, point.producer, point.last_number)
                for job_id, point in self.resume.items()
            },
            "closes_s": self.closes_s,
            "resident": None if self.resident is None else sorted(self.resident),
            "islands": self.islands,
            "batch": self.batch,
            "first_use_s": self.first_use_s,
            "warm": sorted(self.warm),
        }
