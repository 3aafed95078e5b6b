"""Save figures: formats and fonts of all pictures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gfgen.errors import InputError, OutputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
GREY = "#777777"
FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Zen Hei", "Noto Emoji")
"""For prompts that the default font cannot show, if installed."""


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
