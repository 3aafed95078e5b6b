"""Pictures: formats, fonts, colours of jobs; a comparison of runs, and sheets of pictures with labels."""

from __future__ import annotations

import itertools
import math
import textwrap
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gfgen.cli.shown.timeline import Timeline, read_timeline
from gfgen.errors import InputError, OutputError
from gfgen.runtime.core.metrics import percentile
from gfgen.system.wording import counted, in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image
    from PIL.ImageFont import FreeTypeFont, ImageFont

    SheetFont = FreeTypeFont | ImageFont

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
    """Draw and write a picture. Raises: InputError for its suffix or without matplotlib; OutputError."""
    check_suffix(path)
    try:
        import matplotlib.font_manager
    except ImportError as error:
        raise InputError("drawing needs matplotlib; pip install 'gfgen[plot]'") from error
    installed = matplotlib.font_manager.get_font_names()
    fonts = ["DejaVu Sans", *(name for name in FONTS if name in installed)]
    settings = {"font.family": fonts, "svg.fonttype": "none", "hatch.linewidth": 0.5}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # shown as boxes
        figure = draw()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error


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


WIDTH, ROW_INCHES, TOP, BOTTOM = 14.0, 0.42, 1.0, 0.25
NAME_WIDTH = 0.17
"""Fraction of the width for the names of the runs."""
TRACE_NAMES = ("trace.json", "*/trace.json")
_Panel = tuple[str, str, Callable[[float], str]]


@dataclass(frozen=True, slots=True)
class RunFigures:
    name: str
    attainment: float | None
    mean_s: float | None
    p95_s: float | None
    jobs_per_min: float
    makespan_s: float


MAKESPAN: _Panel = ("makespan", "makespan_s", in_words)
PANELS: tuple[_Panel, ...] = (
    ("deadlines met", "attainment", "{:.0%}".format),
    ("mean latency", "mean_s", in_words),
    ("P95 latency", "p95_s", in_words),
    ("jobs a minute", "jobs_per_min", "{:,.2f}".format),
)
"""Titles, names of figures and their texts."""


def find_traces(paths: Sequence[Path]) -> list[Path]:
    """The named traces, of a folder in the order of writing. Raises: InputError for a folder without any."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = [trace for pattern in TRACE_NAMES for trace in path.glob(pattern)]
        if not inside:
            raise InputError(
                f"{path}: contains no trace.json; 'gfgen simulate --output' and 'run --trace' write them"
            )
        found += sorted(inside, key=lambda trace: (trace.stat().st_mtime_ns, trace))
    return found


def plot_runs(traces: Sequence[Path], output: Path, *, title: str | None = None) -> None:
    """Raises InputError when a trace cannot be read or no job has ended; otherwise as `save_figure`."""
    timelines = [read_timeline(trace) for trace in traces]
    for trace, timeline in zip(traces, timelines, strict=True):
        if not any(job.ended_s is not None for job in timeline.jobs.values()):
            raise InputError(f"{trace}: no job has ended in this trace; nothing to compare")
    names = _names(traces, timelines)
    runs = [figures_of(timeline, name=name) for timeline, name in zip(timelines, names, strict=True)]
    save_figure(lambda: draw_runs(runs, title=title or _title(timelines)), output)


def figures_of(timeline: Timeline, *, name: str) -> RunFigures:
    jobs = timeline.jobs.values()
    latencies = [
        job.ended_s - job.arrival_s for job in jobs if job.ended_s is not None and job.status == "done"
    ]
    verdicts = [job.met_deadline for job in jobs if job.met_deadline is not None]
    first_s = min(job.arrival_s for job in jobs)
    makespan_s = max(job.ended_s or first_s for job in jobs) - first_s
    return RunFigures(
        name=name,
        attainment=sum(verdicts) / len(verdicts) if verdicts else None,
        mean_s=sum(latencies) / len(latencies) if latencies else None,
        p95_s=percentile(latencies, 95) if latencies else None,
        jobs_per_min=60 * len(latencies) / makespan_s if makespan_s > 0 else 0.0,
        makespan_s=makespan_s,
    )


def draw_runs(runs: Sequence[RunFigures], *, title: str) -> Figure:
    """Draw a panel per number. Without deadlines the first panel shows the makespan."""
    from matplotlib.figure import Figure

    has_deadlines = any(run.attainment is not None for run in runs)
    panels = PANELS if has_deadlines else (MAKESPAN, *PANELS[1:])
    height = TOP + ROW_INCHES * len(runs) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    slot = (1 - NAME_WIDTH) / len(panels)
    for place, panel in enumerate(panels):
        left, width = NAME_WIDTH + place * slot, 0.64 * slot
        axes = figure.add_axes((left, BOTTOM / height, width, 1 - (TOP + BOTTOM) / height))
        _draw_panel(axes, panel, runs, has_names=place == 0)
    figure.text(0.01, 1 - 0.3 / height, title, fontsize=13, weight="bold", va="center", parse_math=False)
    return figure


def _draw_panel(axes: Axes, panel: _Panel, runs: Sequence[RunFigures], *, has_names: bool) -> None:
    title, name, shown = panel
    values = [getattr(run, name) for run in runs]
    largest = max([value for value in values if value is not None], default=0.0)
    limit = 1.0 if name == "attainment" else largest or 1.0
    for row, value in enumerate(values):
        axes.barh(row, value or 0.0, 0.66, color=job_colour(row))
        text = "-" if value is None else shown(value)
        axes.text((value or 0.0) + 0.03 * limit, row, text, va="center", fontsize=9)
    axes.set_xlim(0, limit)
    axes.set_title(title, fontsize=10, loc="left", pad=8)
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks(range(len(runs)), [run.name if has_names else "" for run in runs], fontsize=10)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(GREY)


def _names(traces: Sequence[Path], timelines: Sequence[Timeline]) -> list[str]:
    """Policies if they differ, or policies with ranks, or folders, or paths."""
    policies = [timeline.policy for timeline in timelines]
    with_ranks = [f"{timeline.policy}, {counted(timeline.num_ranks, 'rank')}" for timeline in timelines]
    folders = [trace.parent.name if trace.name in TRACE_NAMES else trace.name for trace in traces]
    for names in (policies, with_ranks, folders):
        if len(set(names)) == len(names) and all(names):
            return names
    return [str(trace) for trace in traces]


def _title(timelines: Sequence[Timeline]) -> str:
    num_jobs = {len(timeline.jobs) for timeline in timelines}
    jobs = (
        counted(num_jobs.pop(), "job") if len(num_jobs) == 1 else f"{min(num_jobs)} to {max(num_jobs)} jobs"
    )
    ranks = {counted(timeline.num_ranks, "rank") for timeline in timelines}
    on = f" on {ranks.pop()}" if len(ranks) == 1 else ""
    simulated = [timeline.is_simulated for timeline in timelines]
    note = ", simulated" if all(simulated) else ", partly simulated" if any(simulated) else ""
    return jobs + on + note


MAX_ON_SHEET = 500
SHEET_WIDTH, GAP = 4096, 8
SMALLEST_SIDE, LARGEST_SIDE = 160, 512
FONT_SIZE, LINE_HEIGHT, MAX_LINES = 12, 15, 3
CHAR_WIDTH = 6.6
SHEET_FONT = "DejaVuSans.ttf"
"""If it is installed; Pillow's own font has ASCII alone."""


def cell_side(number: int) -> int:
    """The longest side, in pixels, of each of so many pictures on a sheet."""
    return min(LARGEST_SIDE, max(SMALLEST_SIDE, SHEET_WIDTH // math.ceil(math.sqrt(number)) - GAP))


def draw_sheet(cells: Sequence[tuple[Image.Image, str, str]]) -> Image.Image:
    """Pictures in rows of cells as small as they are, each with the beginning of a text and a name below."""
    from PIL import Image, ImageDraw, ImageOps

    font, columns, nearest = _sheet_font(), math.ceil(math.sqrt(len(cells))), Image.Resampling.NEAREST
    side = min(cell_side(len(cells)), max(SMALLEST_SIDE, *(max(each.size) for each, _, _ in cells)))
    cells = [
        (ImageOps.scale(each, max(1, side // max(each.size)), nearest), text, name)
        for each, text, name in cells
    ]
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [max(picture.height for picture, _, _ in row) + LINE_HEIGHT * MAX_LINES + GAP for row in rows]
    sheet = Image.new("RGB", (columns * (side + GAP) + GAP, sum(heights) + GAP), "white")
    pen, top = ImageDraw.Draw(sheet), GAP
    for row, height in zip(rows, heights, strict=True):
        low = top + height - LINE_HEIGHT * MAX_LINES - GAP
        for idx, (picture, text, name) in enumerate(row):
            left = GAP + idx * (side + GAP)
            sheet.paste(picture, (left, low - picture.height))
            for line_idx, line in enumerate(_label(text, name, font, side)):
                pen.text((left, low + LINE_HEIGHT * line_idx), line, fill="black", font=font)
        top += height
    return sheet


def _sheet_font() -> SheetFont:
    from PIL import ImageFont

    try:
        return ImageFont.truetype(SHEET_FONT, FONT_SIZE)
    except OSError:
        return ImageFont.load_default(FONT_SIZE)


def _label(text: str, name: str, font: SheetFont, side: int) -> list[str]:
    """Lines that fit below a picture. Of the text those characters that the font has, of the name its end."""
    missing = bytes(font.getmask("\U0010ffff"))
    shown = {char for char in set(text) if char.isspace() or bytes(font.getmask(char)) != missing}
    parts = (char if char in shown else unicodedata.normalize("NFKD", char)[:1] for char in text)
    text = "".join(char for char in parts if char in shown or char.isascii())
    lines = textwrap.wrap(text, int(side / CHAR_WIDTH), max_lines=MAX_LINES - 1, placeholder=" ...")
    while any(font.getlength(line) > side for line in lines):
        lines = [line[:-1] if font.getlength(line) > side else line for line in lines]
    ends = (f"...{name[cut:]}" if cut else name for cut in itertools.count())
    return [*lines, next(end for end in ends if font.getlength(end) <= side)]
