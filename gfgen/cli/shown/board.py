"""Bars at the bottom of a terminal, with scrolling lines above them."""

from __future__ import annotations

import itertools
import os
import threading
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from gfgen.system.outlet import drain

MAX_NAME = 24
MAX_COLUMNS = 120
"""Of a line; the bar gets what name and text leave."""
_UP, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[A", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    done: int
    total: int
    text: str


class Board:
    """The bars at the bottom of a terminal, the batch first; what other threads write goes above them.

    Nothing raises when the terminal is closed (EIO).
    """

    def __init__(self, stream: TextIO, *, num_slots: int = 0) -> None:
        self.stream = stream
        self.num_slots = num_slots
        self._slots: list[str | None] = []
        self._bars: list[str] = []
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        for line in text.splitlines():
            self._show(None, above=f"{_CLEAR_BELOW}{printable(line, self.stream)}\n")
        return len(text)

    def draw(self, lines: Sequence[Line]) -> None:
        """Show the batch, and as many jobs as the slots and rows allow; not while nobody reads."""
        if not drain(self.stream, 0.0):
            return
        columns, rows = terminal_size(self.stream)
        head, *jobs = lines
        shown = [head, *self._placed(jobs, max(0, min(self.num_slots, rows - 2)))]
        encoding = getattr(self.stream, "encoding", None) or ""
        bars = bars_of(shown, min(columns - 1, MAX_COLUMNS), in_ascii=not encoding.lower().startswith("utf"))
        self._show([printable(bar, self.stream) for bar in bars])

    def close(self) -> None:
        self._show([])

    def _show(self, bars: Sequence[str] | None, *, above: str = "") -> None:
        """Replace the bars, unless this is None, and what is above them."""
        with self._lock, suppress(OSError):
            back, self._bars = _UP * (len(self._bars) - 1), self._bars if bars is None else list(bars)
            text = "\n".join(f"{bar}{_CLEAR_LINE}" for bar in self._bars)
            self.stream.write(f"{back}\r{above}{text}{_CLEAR_BELOW}")
            self.stream.flush()

    def _placed(self, jobs: Sequence[Line], num_slots: int) -> list[Line | None]:
        by_name = {job.name: job for job in jobs[:num_slots]}
        before = [*self._slots, *[None] * num_slots][:num_slots]
        kept = [name if name in by_name else None for name in before]
        new = iter([name for name in by_name if name not in kept])
        self._slots = [next(new, None) if name is None else name for name in kept]
        return [None if name is None else by_name[name] for name in self._slots]


def bars_of(lines: Sequence[Line | None], columns: int, *, in_ascii: bool) -> list[str]:
    """A row for each line, with bars of one width; None is an empty row."""
    shown = [line for line in lines if line is not None]
    width = min(MAX_NAME, max(len(line.name) for line in shown))
    room = max(len(line.text) for line in shown)
    rows = []
    for line in lines:
        if line is None:
            rows.append("")
            continue
        bar = _bar(line.done / max(1, line.total), max(1, columns - width - room - 4), in_ascii=in_ascii)
        rows.append(_fitted(f"{_fitted(line.name, width)} |{bar}| {line.text}", columns))
    return rows


def _bar(share: float, width: int, *, in_ascii: bool) -> str:
    if in_ascii:
        return ("#" * int(share * width)).ljust(width)
    full, eighths = divmod(int(share * width * 8), 8)
    return ("\u2588" * full + (chr(0x2590 - eighths) if eighths else "")).ljust(width)


def _fitted(text: str, columns: int) -> str:
    """The text, cut or filled to this width; a wide character takes two columns."""
    ends = list(itertools.accumulate(2 if unicodedata.east_asian_width(char) in "FW" else 1 for char in text))
    if ends and ends[-1] > columns:
        return f"{text[: bisect_right(ends, columns - 1)]}~"
    return text + " " * (columns - (ends[-1] if ends else 0))


def has_cursor(stream: TextIO) -> bool:
    """Whether this is a terminal that can overwrite lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def terminal_size(stream: TextIO) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 24
    return max(20, size.columns or 80), max(3, size.lines or 24)  # 0: the terminal does not know


def printable(text: str, stream: TextIO) -> str:
    """Replace control characters and what the stream cannot encode."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    text = "".join(char if char.isprintable() else " " for char in text)
    return text.encode(encoding, "replace").decode(encoding)
