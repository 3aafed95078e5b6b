"""A trace as a picture: above, what each rank did; below, a line for each job.

    rank 0  | #### fox ####|== koi ==|        |     colour: job; shade and hatching: stage
    rank 1  |  #### fox ####|                       a task on several ranks is one block
    jobs    | o--------------------v--->            arrival, deadline, end, and the verdict

The rows of the jobs are the legend of the colours. matplotlib is imported when a picture is
drawn and not before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gfgen.cli.shown.picture import GREY, check_suffix, hatching, job_colour, luminance, save_figure, shaded
from gfgen.cli.shown.timeline import (
    WRITE,
    Block,
    Timeline,
    TracedJob,
    joined,
    lanes_of,
    merged,
    read_timeline,
    tasks_of_jobs,
)
from gfgen.errors import InputError
from gfgen.system.wording import counted, in_words

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES = {  # lightness relative to the job's colour, hatching
    "encode": (1.5, "...."),
    "prepare": (1.5, "xxxx"),
    "denoise": (1.0, ""),
    "reuse": (1.25, ""),
    "refine": (0.88, "\\\\\\\\"),
    "decode": (0.78, "////"),
    "write": (1.6, ""),
}
SELDOM = ("reuse", "refine")
"""Stages that the legend names only where they occur."""
IDLE = "#ECECEC"
LATE = "#D00000"
LANE_HEIGHT = 0.78

MAX_ROWS_WITH_PROMPT = 30
MAX_ROWS_WITH_NAME = 120
CHAR_INCHES = 0.0088
"""Width of a character per point of font size: DejaVu Sans has 0.6 em on average, a point is 1/72 inch."""
WIDTH, TOP, BETWEEN, BOTTOM = 16.0, 0.85, 0.2, 0.55
"""Inches of the picture and its margins."""
AXES_LEFT, AXES_WIDTH = 0.2, 0.67
MAX_BLOCKS = 6000
LONG_PAUSE_INCHES = 0.25
DASHES = (0, (3, 2))


@dataclass(frozen=True, slots=True)
class PlotData:
    timeline: Timeline
    tasks: tuple[Block, ...]
    writes: tuple[Block, ...]
    """On lanes below those of ranks."""
    jobs: tuple[TracedJob, ...]
    colours: dict[str, str]
    span: tuple[float, float]

    @property
    def num_lanes(self) -> int:
        return max([self.timeline.num_ranks, *(block.lanes[1] + 1 for block in self.writes)])

    @property
    def row_inches(self) -> float:
        """Height of a job's row; all rows together have at most 11 inches."""
        if len(self.jobs) <= MAX_ROWS_WITH_PROMPT:
            return 0.2
        return min(max(0.1, 0.2 - len(self.jobs) / 600), 11.0 / len(self.jobs))

    def inches(self, seconds: float) -> float:
        return seconds * WIDTH * AXES_WIDTH / (self.span[1] - self.span[0])


def plot_timeline(trace_path: Path, output_path: Path, *, title: str | None = None) -> None:
    """Raises InputError when the trace cannot be read or has no task; otherwise as `save_figure`."""
    check_suffix(output_path)
    timeline = read_timeline(trace_path)
    if not timeline.tasks:
        raise InputError(f"{trace_path}: no task has ended in this trace; nothing to draw")
    save_figure(lambda: draw(timeline, title=title), output_path)


def draw(timeline: Timeline, *, title: str | None = None) -> Figure:
    from matplotlib.figure import Figure

    jobs = sorted(timeline.jobs.values(), key=lambda job: (job.arrival_s, job.job_id))
    below = timeline.num_ranks
    scene = PlotData(
        timeline=timeline,
        tasks=tuple(joined(timeline.tasks)),
        writes=tuple(replace(x, lanes=(below + x.lanes[0], below + x.lanes[1])) for x in timeline.writes),
        jobs=tuple(jobs),
        colours={job.job_id: job_colour(idx) for idx, job in enumerate(jobs)},
        span=_span(timeline),
    )
    lanes_inches = scene.num_lanes * (0.5 if scene.num_lanes <= 6 else 0.4) + 0.1
    rows_inches = len(jobs) * scene.row_inches + 0.1
    height = TOP + lanes_inches + BETWEEN + rows_inches + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    lanes_bottom = (BOTTOM + rows_inches + BETWEEN) / height
    lanes = figure.add_axes((AXES_LEFT, lanes_bottom, AXES_WIDTH, lanes_inches / height))
    rows = figure.add_axes((AXES_LEFT, BOTTOM / height, AXES_WIDTH, rows_inches / height), sharex=lanes)
    _draw_lanes(lanes, scene)
    _draw_rows(rows, scene)
    _draw_head(figure, scene, title=title, height=height)
    return figure


def _draw_lanes(axes: Axes, scene: PlotData) -> None:
    start_s, end_s = scene.span
    num_ranks = scene.timeline.num_ranks
    for lane in range(num_ranks):
        axes.barh(lane, end_s - start_s, LANE_HEIGHT, left=start_s, color=IDLE, zorder=0)
    is_crowded = len(scene.tasks) > MAX_BLOCKS
    for block in (*(merged(scene.tasks) if is_crowded else scene.tasks), *scene.writes):
        _draw_block(axes, block, scene)
    for job_id, tasks in tasks_of_jobs(scene.tasks).items():
        _draw_layouts(axes, tasks, scene, colour=shaded(scene.colours[job_id], 0.75))
    for block in merged((*scene.tasks, *scene.writes)):
        _draw_label(axes, block, scene)
    for lane in range(scene.num_lanes):
        is_rank = lane < num_ranks
        _beside(axes, lane, f"rank {lane}" if is_rank else f"writer {lane - num_ranks}", on="left", size=9)
        if is_rank:
            busy_s = sum(task.duration_s for task in scene.timeline.tasks if task.lanes[0] == lane)
            _beside(axes, lane, f"{busy_s / (end_s - start_s):.0%} busy", on="right", size=8, colour=GREY)
    axes.set_ylim(scene.num_lanes - 0.5, -0.5)
    axes.tick_params(axis="x", labelbottom=False, length=0)
    _bare(axes)


def _draw_block(axes: Axes, block: Block, scene: PlotData) -> None:
    lightness, hatch = STAGES.get(block.stage, (1.0, ""))
    colour, is_wide = scene.colours[block.job_id], scene.inches(block.duration_s) > 0.04
    first, last = block.lanes
    thickness = last - first + LANE_HEIGHT * (0.5 if block.stage == WRITE else 1)
    bar: dict[str, Any] = {"left": block.start_s, "height": thickness}
    face, lines = shaded(colour, lightness), hatching(colour)
    bar |= {"facecolor": face, "edgecolor": lines, "linewidth": 0, "hatch": hatch if is_wide else None}
    axes.barh(block.middle, block.duration_s, **bar)
    if is_wide:
        frame = {"fill": False, "edgecolor": "white", "linewidth": 0.5, "hatch": None}
        axes.barh(block.middle, block.duration_s, **bar | frame)


def _draw_layouts(axes: Axes, tasks: Sequence[Sequence[Block]], scene: PlotData, *, colour: str) -> None:
    """Connect the blocks of a task on distant ranks where such a layout begins, and tasks on other ranks."""
    before: Sequence[Block] = ()
    for parts in tasks:
        is_moved = bool(before) and lanes_of(parts) != lanes_of(before)
        pause_s = min(part.start_s for part in parts) - max((part.end_s for part in before), default=-1e9)
        if is_moved or pause_s > 0.2 * parts[0].duration_s:
            for upper, lower in itertools.pairwise(parts):
                ends = [upper.lanes[1], lower.lanes[0]]
                axes.plot([upper.start_s] * 2, ends, color=colour, linewidth=1.5, zorder=3)
        is_long = scene.inches(pause_s) > LONG_PAUSE_INCHES
        if is_moved and not (is_long and len(scene.jobs) > MAX_ROWS_WITH_PROMPT):
            start_s = max(part.end_s for part in before)
            places = [before[0].middle, parts[0].middle]
            style: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.45} if is_long else {"linewidth": 1.1}
            axes.plot([start_s, start_s + pause_s], places, color=colour, linestyle=DASHES, zorder=3, **style)
        before = parts


def _draw_label(axes: Axes, block: Block, scene: PlotData) -> None:
    size = 6 if block.stage == WRITE else 7.5
    fits = int(scene.inches(block.duration_s) / (size * CHAR_INCHES))
    if fits < min(4, len(block.job_id)):
        return
    lightness, _ = STAGES.get(block.stage, (1.0, ""))
    background = shaded(scene.colours[block.job_id], lightness)
    place: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4, "parse_math": False}
    place |= {"clip_on": True, "bbox": {"facecolor": background, "edgecolor": "none", "pad": 1.0}}
    colour, middle_s = "black" if luminance(background) > 0.3 else "white", (block.start_s + block.end_s) / 2
    axes.text(middle_s, block.middle, _cut_inside(block.job_id, fits), fontsize=size, color=colour, **place)


def _draw_rows(axes: Axes, scene: PlotData) -> None:
    row_points = 72 * scene.row_inches
    size = min(8.0, 0.8 * row_points)
    for row, job in enumerate(scene.jobs):
        _draw_row(axes, row, job, scene, thickness=min(6.0, 0.5 * row_points))
        if len(scene.jobs) > MAX_ROWS_WITH_NAME:
            continue
        label = _cut_inside(job.job_id, 30)
        if len(scene.jobs) <= MAX_ROWS_WITH_PROMPT and job.prompt:
            label += f"  {_shortened(job.prompt, 46 - len(label))}"
        verdict, colour = _verdict(job)
        _beside(axes, row, label, on="left", size=size)
        _beside(axes, row, verdict, on="right", size=size, colour=colour)
    axes.set_ylim(len(scene.jobs) - 0.5, -0.5)
    axes.set_xlim(*scene.span)
    axes.set_xlabel("seconds since the start of the run", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    _bare(axes)


def _draw_row(axes: Axes, row: int, job: TracedJob, scene: PlotData, *, thickness: float) -> None:
    """Draw a job from arrival to end, its lateness, and the mark of its deadline."""
    end_s = scene.span[1]
    ended_s = end_s if job.ended_s is None else job.ended_s
    colour = scene.colours[job.job_id]
    axes.plot([job.arrival_s, ended_s], [row, row], color=colour, linewidth=thickness, solid_capstyle="butt")
    above: dict[str, Any] = {"markersize": 1.1 * thickness, "clip_on": False, "zorder": 5}
    if job.deadline_s is not None:
        is_missed = job.met_deadline is False
        late = [max(job.deadline_s, job.arrival_s), ended_s]
        if is_missed and late[1] > late[0]:
            axes.plot(late, [row, row], color=LATE, linewidth=thickness / 3)
        face, shape = LATE if is_missed else "white", "v" if job.deadline_s <= end_s else ">"
        place = min(max(job.deadline_s, scene.span[0]), end_s)
        axes.plot(place, row, marker=shape, color="black", markerfacecolor=face, markeredgewidth=0.8, **above)
    if job.status == "failed":
        axes.plot(ended_s, row, marker="x", color=LATE, markeredgewidth=1.8, **above)


def _verdict(job: TracedJob) -> tuple[str, str]:
    if job.status == "failed":
        return "failed", LATE
    if job.status == "cancelled":
        return "cancelled", GREY
    if job.ended_s is None or job.status == "unfinished":
        return "unfinished", GREY
    took = in_words(job.ended_s - job.arrival_s)
    if job.deadline_s is None:
        return took, GREY
    margin = in_words(abs(job.deadline_s - job.ended_s))
    if job.met_deadline:
        return f"{took}, met ({margin} early)", "black"
    return f"{took}, late by {margin}", LATE


def _draw_head(figure: Figure, scene: PlotData, *, title: str | None, height: float) -> None:
    title = title or _title(scene.timeline, scene.span)
    style: dict[str, Any] = {"fontsize": 13, "weight": "bold", "va": "center", "parse_math": False}
    figure.text(AXES_LEFT, 1 - 0.25 / height, title, **style)
    place = {"loc": "center left", "bbox_to_anchor": (AXES_LEFT - 0.005, 1 - 0.6 / height)}
    style = {"ncols": 12, "frameon": False, "fontsize": 8, "borderpad": 0}
    figure.legend(handles=list(_legend(scene)), handlelength=1.6, columnspacing=1.4, **place, **style)


def _legend(scene: PlotData) -> Iterator[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {block.stage for block in scene.tasks}
    for name, (lightness, hatch) in STAGES.items():
        if name in SELDOM and name not in seen:
            continue
        face, edge = shaded(GREY, lightness), shaded(GREY, 0.6)
        yield Patch(facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0, label=name)
    yield Patch(facecolor=IDLE, label="idle")
    tasks = tasks_of_jobs(scene.tasks).values()
    if any(lanes_of(one) != lanes_of(two) for of_job in tasks for one, two in itertools.pairwise(of_job)):
        yield Line2D([], [], color=GREY, linewidth=1.1, linestyle=DASHES, label="moves to other ranks")
    marker: dict[str, Any] = {"color": "black", "marker": "v", "linestyle": ""}
    if any(job.deadline_s is not None for job in scene.jobs):
        yield Line2D([], [], markerfacecolor="white", label="deadline", **marker)
    if any(job.met_deadline is False for job in scene.jobs):
        yield Line2D([], [], markerfacecolor=LATE, label="missed", **marker)
    if any(job.status == "failed" for job in scene.jobs):
        yield Line2D([], [], color=LATE, marker="x", linestyle="", markeredgewidth=1.8, label="failed")


def _title(timeline: Timeline, span: tuple[float, float]) -> str:
    makespan_s = span[1] - span[0]
    busy = sum(task.duration_s for task in timeline.tasks) / (timeline.num_ranks * makespan_s)
    jobs = timeline.jobs.values()
    text = f"{counted(len(jobs), 'job')} on {counted(timeline.num_ranks, 'rank')}"
    text = (f"{timeline.policy}: " if timeline.policy else "") + text
    text = ("simulated, " if timeline.is_simulated else "") + text
    text += f" in {in_words(makespan_s)}, ranks {busy:.0%} busy"
    verdicts = [job.met_deadline for job in jobs if job.met_deadline is not None]
    if verdicts:
        text += f", {sum(verdicts)} of {counted(len(verdicts), 'deadline')} met"
    num_failed = sum(job.status == "failed" for job in jobs)
    return text + (f", {num_failed} failed" if num_failed else "")


def _span(timeline: Timeline) -> tuple[float, float]:
    jobs = timeline.jobs.values()
    blocks = (*timeline.tasks, *timeline.writes)
    starts = [block.start_s for block in blocks] + [job.arrival_s for job in jobs]
    ends = [block.end_s for block in blocks] + [job.ended_s or 0.0 for job in jobs]
    return min(starts), max(*ends, min(starts) + 1e-6)


def _bare(axes: Axes) -> None:
    axes.set_yticks([])
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.grid(axis="x", color="#D5D5D5", linewidth=0.6)
    axes.set_axisbelow(True)


def _beside(
    axes: Axes, y: float, text: str, *, on: Literal["left", "right"], size: float, colour: str = "black"
) -> None:
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "parse_math": False}
    x, side = (-0.01, "right") if on == "left" else (1.01, "left")
    axes.text(x, y, text, ha=side, fontsize=size, color=colour, **place)


def _shortened(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3].rstrip()}..."


def _cut_inside(text: str, limit: int) -> str:
    """Shorten to `limit` characters and keep both ends, because ids often differ in the last ones."""
    if len(text) <= limit:
        return text
    tail = min(max(limit // 3, 2), limit - 2)
    return f"{text[: limit - tail - 1]}~{text[len(text) - tail :]}"
