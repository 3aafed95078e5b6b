"""The rectangles that a picture of a trace draws on its lanes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gfgen.runtime.report.timeline import Slice, Timeline

WRITE = "write"


@dataclass(frozen=True, slots=True)
class PlotBlock:
    """One rectangle: a task on neighbouring lanes, or a write."""

    job_id: str
    stage: str
    first_lane: int
    last_lane: int
    start_s: float
    end_s: float
    dispatch: int | None

    @property
    def lanes(self) -> tuple[int, int]:
        return self.first_lane, self.last_lane

    @property
    def middle(self) -> float:
        return (self.first_lane + self.last_lane) / 2

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def task_blocks(timeline: Timeline) -> Iterator[PlotBlock]:
    """One rectangle per dispatch and group of neighbouring ranks; lanes are ranks."""
    by_dispatch: dict[tuple[int | None, str], list[tuple[int, Slice]]] = defaultdict(list)
    for slice_ in timeline.slices:
        if slice_.rank is not None:
            by_dispatch[slice_.dispatch, slice_.job_id].append((slice_.rank, slice_))
    for (dispatch, job_id), parts in by_dispatch.items():
        parts.sort(key=lambda part: part[0])
        for _, run in itertools.groupby(enumerate(parts), key=lambda pair: pair[1][0] - pair[0]):
            neighbours = [part for _, part in run]
            yield PlotBlock(
                job_id=job_id,
                stage=neighbours[0][1].stage,
                first_lane=neighbours[0][0],
                last_lane=neighbours[-1][0],
                start_s=min(slice_.start_s for _, slice_ in neighbours),
                end_s=max(slice_.end_s for _, slice_ in neighbours),
                dispatch=dispatch,
            )


def write_blocks(timeline: Timeline) -> Iterator[PlotBlock]:
    """One rectangle per write, on the lane of its writer below the ranks."""
    for slice_ in timeline.slices:
        if slice_.writer is None:
            continue
        lane = timeline.num_ranks + slice_.writer
        yield PlotBlock(slice_.job_id, WRITE, lane, lane, slice_.start_s, slice_.end_s, None)


def merged(blocks: Iterable[PlotBlock]) -> Iterator[PlotBlock]:
    """Join consecutive blocks of a job on the same lanes, to make room for a label.

    The result has the stage of its longest block.
    """
    current: PlotBlock | None = None
    longest_s = 0.0
    for block in sorted(blocks, key=lambda block: (block.lanes, block.start_s)):
        if current is not None and _continues(current, block):
            stage = block.stage if block.duration_s > longest_s else current.stage
            longest_s = max(longest_s, block.duration_s)
            current = replace(current, stage=stage, end_s=block.end_s, dispatch=block.dispatch)
            continue
        if current is not None:
            yield current
        current, longest_s = block, block.duration_s
    if current is not None:
        yield current


def tasks_of_jobs(blocks: Iterable[PlotBlock]) -> dict[str, list[list[PlotBlock]]]:
    """By job, the blocks of each task, in the order of dispatch."""
    by_job: dict[str, dict[int, list[PlotBlock]]] = defaultdict(lambda: defaultdict(list))
    for block in blocks:
        by_job[block.job_id][block.dispatch or 0].append(block)
    return {job_id: [tasks[number] for number in sorted(tasks)] for job_id, tasks in by_job.items()}


def lanes_of(parts: Sequence[PlotBlock]) -> list[tuple[int, int]]:
    return sorted(part.lanes for part in parts)


def _continues(before: PlotBlock, after: PlotBlock) -> bool:
    is_same = before.job_id == after.job_id and before.lanes == after.lanes
    return is_same and after.start_s - before.end_s < 0.2 * after.duration_s
