"""All pictures: formats, fonts, colours of jobs, rows of bars with names; a trace as bars on lanes."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gfgen.errors import InputError, OutputError
from gfgen.runtime.report.timeline import Slice, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
GREY = "#777777"
FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "Noto Emoji")
"""For prompts that the default font cannot show, if installed."""

PALETTE = (
    *("#88CCEE", "#CC6677", "#DDCC77", "#117733", "#332288", "#AA4499"),
    *("#44AA99", "#999933", "#882255", "#EE7733", "#6699CC", "#661100"),
)
"""Distinct for colour-blind readers. Source: CARTO "Safe", with orange instead of grey."""
LIGHTNESS = (1.0, 1.4, 0.65)
"""After the palette the colours repeat, lighter, then darker."""


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: a picture's name ends in {', '.join(SUFFIXES)}")


def save_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Draw and write a picture in the format of its suffix.

    Raises: InputError for another suffix or without matplotlib; OutputError when it cannot be written.
    """
    check_suffix(path)
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("drawing needs matplotlib; pip install 'gfgen[plot]'") from error
    settings = {"font.family": _fonts(), "svg.fonttype": "none", "hatch.linewidth": 0.5}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # shown as boxes
        figure = draw()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error


def _fonts() -> list[str]:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in FONTS if name in installed)]


def name_rows(axes: Axes, names: Sequence[str], *, fontsize: float) -> None:
    """Name the rows of a bar chart, from the top; nothing else is on the axes."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks(range(len(names)), names, fontsize=fontsize)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(GREY)


def job_colour(idx: int) -> str:
    lap, place = divmod(idx, len(PALETTE))
    return shaded(PALETTE[place], LIGHTNESS[lap % len(LIGHTNESS)])


def shaded(colour: str, lightness: float) -> str:
    """Mix the colour with white (lightness 1 to 2) or black (1 to 0)."""
    target, weight = (255, lightness - 1) if lightness > 1 else (0, 1 - lightness)
    parts = (int(colour[idx : idx + 2], 16) for idx in (1, 3, 5))
    return "#" + "".join(f"{round(part + (target - part) * weight):02X}" for part in parts)


def hatching(colour: str) -> str:
    """A colour for lines on this one."""
    return shaded(colour, 0.6 if luminance(colour) > 0.1 else 1.5)


def luminance(colour: str) -> float:
    """Relative luminance, 0 to 1."""
    red, green, blue = (int(colour[idx : idx + 2], 16) / 255 for idx in (1, 3, 5))
    return float(0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2)


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
