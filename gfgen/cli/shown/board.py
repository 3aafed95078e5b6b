"""Bars at the bottom of a terminal, with scrolling lines above them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

MIN_BAR, MAX_BAR = 8, 40
"""Columns of a bar; a line with less room has no bar."""


@dataclass(frozen=True, slots=True)
class Line:
    """One bar. `texts` are wordings for its right side, from the longest to the shortest."""

    name: str
    done: int
    total: int
    texts: tuple[str, ...]


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
        self.given_up: OSError | None = None
        """Why the bars ended early."""
        encoding = getattr(stream, "encoding", None) or ""
        self._charset: str | bool = False if encoding.lower().startswith("utf") else " #"

    def write(self, text: str) -> None:
        """Write a line above the bars."""
        text = printable(text, self._stream)
        if self.given_up is not None:
            with suppress(OSError):
                self._stream.write(f"{text}\n")
                self._stream.flush()
            return
        with self._giving_up():
            _Bar.write(text, file=self._stream)
            self._stream.flush()

    def draw(self, lines: Sequence[Line]) -> None:
        """Show the batch, and as many jobs as the slots and rows allow."""
        if self.given_up is None:
            with self._giving_up():
                self._draw(lines)

    def close(self) -> None:
        """Remove the bars; the lines above stay."""
        with self._giving_up():
            self._take_away()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.given_up = error
            self._bars.clear()

    def _draw(self, lines: Sequence[Line]) -> None:
        columns, rows = terminal_size(self._stream)
        if (columns, rows) != self._size:
            self._resize(columns, rows)
        head, *jobs = lines
        self._assign([line.name for line in jobs])
        by_slot = {1 + self._slots[line.name]: line for line in jobs if line.name in self._slots}
        shown = [head if slot == 0 else by_slot.get(slot) for slot in range(len(self._bars))]
        formats = bar_formats(shown, columns - 1)
        for bar, line, text in zip(self._bars, shown, formats, strict=True):
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
                ncols=columns - 1, nrows=rows, bar_format=" ", mininterval=1e9,
            )  # fmt: skip
            self._bars.append(bar)

    def _assign(self, names: Sequence[str]) -> None:
        """Jobs keep their slots; new jobs get free ones."""
        wanted = names[: len(self._bars) - 1]
        self._slots = {name: slot for name, slot in self._slots.items() if name in wanted}
        free = sorted(set(range(len(self._bars) - 1)) - set(self._slots.values()))
        self._slots |= dict(zip((name for name in wanted if name not in self._slots), free, strict=False))


class AboveBars:
    """A stream for log handlers that writes above the bars."""

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


def bar_formats(lines: Sequence[Line | None], columns: int) -> list[str]:
    """tqdm's format for each line: the longest texts that leave room for bars of equal width.

    All jobs use the same level of wording.
    """
    width = min(24, columns // 4, max(len(line.name) for line in lines if line is not None))
    texts = [*_fitting(lines[:1], columns - width - 4), *_fitting(lines[1:], columns - width - 4)]
    room = columns - width - 4 - max(len(text) for text in texts)
    return [
        _format(line, text, name_width=width, bar_width=min(room, MAX_BAR))
        for line, text in zip(lines, texts, strict=True)
    ]


def _fitting(lines: Sequence[Line | None], columns: int) -> list[str]:
    """The texts of these lines, in the longest wording that leaves room for a bar."""
    texts = [("",) if line is None else line.texts for line in lines]
    for level in range(max((len(wordings) for wordings in texts), default=0)):
        chosen = [wordings[min(level, len(wordings) - 1)] for wordings in texts]
        if max(map(len, chosen)) <= columns - MIN_BAR:
            return chosen
    return [wordings[-1] for wordings in texts]


def _format(line: Line | None, text: str, *, name_width: int, bar_width: int) -> str:
    if line is None:
        return " "
    name = line.name if len(line.name) <= name_width else f"{line.name[: name_width - 1]}~"
    name = _literal(f"{name:<{name_width}}")
    bar = f" |{{bar:{bar_width}}}|" if bar_width > 0 else ""
    return f"{name}{bar} {_literal(text)}"


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
