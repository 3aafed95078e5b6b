"""A task that was given to ranks: the unit of the one global order."""

from __future__ import annotations

from dataclasses import dataclass

from gfgen.graph import Task
from gfgen.layout import Layout


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One attempt at one task on one layout.

    `number` rises by one with every dispatch of the run; a worker refuses a number that does
    not rise. `producer` is the number of the dispatch that makes this task's input (None for
    the first task), `source` the layout that holds it.
    """

    number: int
    task: Task
    layout: Layout
    submitted_s: float
    predicted_start_s: float
    predicted_end_s: float
    producer: int | None = None
    source: Layout | None = None
    moved_bytes: int = 0
