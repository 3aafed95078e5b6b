"""All pictures: formats, fonts, colours of jobs, rows of bars with names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gfgen.errors import InputError, OutputError

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
