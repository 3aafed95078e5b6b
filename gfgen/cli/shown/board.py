"""Bars at the bottom of a terminal, with scrolling lines above them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

MAX_NAME = 24
MAX_COLUMNS = 120
"""Of a line; the bar gets what name and text leave."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    done: int
    total: int
    text: str


class _Bar(tqdm):  # type: ignore[misc]
    """A bar without tqdm's monitor thread and semaphore."""

    monitor_interval = 0
    _lock = threading.RLock()

    def refresh(self, **_: Any) -> None:
        """Draw it. tqdm's own method never releases the lock if the stream raises."""
        with self._lock:
            super().refresh(nolock=True)

    def __del__(self) -> None:
        """Do nothing: tqdm would write to the terminal, which may be gone."""


class Board:
    """The bars at the bottom of a terminal: the first is the batch, the others are job slots.

    If the terminal is closed (EIO), the bars end and nothing here raises, so that the run goes on.
    """

    def __init__(self, stream: TextIO, *, num_slots: int) -> None:
        self._stream = stream
        self._num_slots = num_slots
        self._bars: list[_Bar] = []
        self._slots: dict[str, int] = {}
        self._size = (0, 0)
        encoding = getattr(stream, "encoding", None) or ""
        self._charset: str | bool = False if encoding.lower().startswith("utf") else " #"

    def write(self, text: str) -> None:
        with self._while_there():
            _Bar.write(printable(text, self._stream), file=self._stream)
            self._stream.flush()

    def draw(self, lines: Sequence[Line]) -> None:
        """Show the batch, and as many jobs as the slots and rows allow."""
        with self._while_there():
            self._draw(lines)

    def close(self) -> None:
        with self._while_there():
            self._take_away()

    @contextmanager
    def _while_there(self) -> Iterator[None]:
        """Without bars from the first write on that the terminal refuses."""
        try:
            yield
        except OSError:
            self._bars.clear()

    def _draw(self, lines: Sequence[Line]) -> None:
        columns, rows = terminal_size(self._stream)
        if (columns, rows) != self._size:
            self._resize(columns, rows)
        if not self._bars:
            return
        head, *jobs = lines
        self._assign([line.name for line in jobs])
        by_slot = {1 + self._slots[line.name]: line for line in jobs if line.name in self._slots}
        shown = [head if slot == 0 else by_slot.get(slot) for slot in range(len(self._bars))]
        for bar, line, text in zip(self._bars, shown, bar_formats(shown), strict=True):
            bar.n, bar.total = (0, 1) if line is None else (line.done, line.total)
            bar.bar_format = printable(text, self._stream)
            bar.refresh()

    def _take_away(self) -> None:
        for bar in reversed(self._bars):
            bar.close()
        self._bars.clear()

    def _resize(self, columns: int, rows: int) -> None:
        """Create new bars, because the terminal has wrapped or cut the old lines."""
        self._take_away()
        if self._size != (0, 0):
            self._stream.write("\r\x1b[J")
        self._size = (columns, rows)
        for position in range(1 + max(0, min(self._num_slots, rows - 2))):
            bar = _Bar(
                total=1, position=position, file=self._stream, leave=False, ascii=self._charset,
                ncols=min(columns - 1, MAX_COLUMNS), nrows=rows, bar_format=" ", mininterval=1e9,
            )  # fmt: skip
            self._bars.append(bar)

    def _assign(self, names: Sequence[str]) -> None:
        """Jobs keep their slots; new jobs get free ones."""
        wanted = names[: len(self._bars) - 1]
        self._slots = {name: slot for name, slot in self._slots.items() if name in wanted}
        free = sorted(set(range(len(self._bars) - 1)) - set(self._slots.values()))
        self._slots |= dict(zip((name for name in wanted if name not in self._slots), free, strict=False))


class AboveBars:
    def __init__(self, board: Board, lock: threading.RLock) -> None:
        self._board = board
        self._lock = lock

    def write(self, text: str) -> int:
        with self._lock:
            for line in text.splitlines():
                self._board.write(line)
        return len(text)

    def flush(self) -> None:
        pass


def bar_formats(lines: Sequence[Line | None]) -> list[str]:
    """tqdm's format for each line, with bars of one width."""
    shown = [line for line in lines if line is not None]
    width = min(MAX_NAME, max(len(line.name) for line in shown))
    room = max(len(line.text) for line in shown)
    return [" " if line is None else _format(line, width, room) for line in lines]


def _format(line: Line, width: int, room: int) -> str:
    name = line.name if len(line.name) <= width else f"{line.name[: width - 1]}~"
    return f"{_literal(f'{name:<{width}}')} |{{bar}}| {_literal(f'{line.text:<{room}}')}"


def has_cursor(stream: TextIO) -> bool:
    """Whether this is a terminal that can overwrite lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows; 80 x 24 without a terminal."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 24
    return max(20, size.columns), max(3, size.lines)


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def printable(text: str, stream: TextIO) -> str:
    """Replace control characters and what the stream cannot encode."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    text = "".join(char if char.isprintable() else " " for char in text)
    return text.encode(encoding, "replace").decode(encoding)
