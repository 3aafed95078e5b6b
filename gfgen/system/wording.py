"""Counts, durations and sizes as text for people."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 10  # messages name this many things and count the others


def counted(number: int, noun: str) -> str:
    """'1 rank', '4 ranks', '1,200 jobs'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(things: Sequence[object], noun: str) -> list[str]:
    """The first few as text, and 'and 5 more jobs' for the others."""
    named, num_more = list(map(str, things[:MAX_NAMED])), len(things) - MAX_NAMED
    return [*named, f"and {counted(num_more, f'more {noun}')}"] if num_more > 0 else named


def named(things: Sequence[object], noun: str) -> str:
    """'a, b and c', with the first few of many."""
    return ", ".join(first_of(things, noun))


def in_lines(numbers: Sequence[int | None]) -> str:
    """'line 3', 'lines 1, 2, 3 and 5 more'."""
    shown = ", ".join(map(str, numbers[:MAX_NAMED]))
    rest = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f"line{'' if len(numbers) == 1 else 's'} {shown}{rest}"


def in_words(seconds: float) -> str:
    """'850 ms', '12.3 s', '2 min 14 s', '1 h 02 min', '2 days 3 h'."""
    if seconds < 0:
        return f"-{in_words(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    days, hours = divmod(minutes // 60, 24)
    return f"{days} day{'s' if days > 1 else ''} {hours} h"


def size_in_words(num_bytes: float) -> str:
    """'4.8 kB', '0.1 MB', '850.0 MB', '1,234.5 GB', in powers of ten."""
    if num_bytes < 1e5:
        return f"{num_bytes / 1e3:,.1f} kB"
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def on_clock(seconds: float) -> str:
    """'0:12', '2:14', '1:02:14': as short as progress bars need it."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table_row(*cells: object) -> str:
    """A line of a table in Markdown."""
    return "|" + "".join([f" {cell} |" if cell != "" else " |" for cell in cells])


def table_head(*columns: object) -> str:
    """The first two lines of such a table. A column may be several, as in 'size | time'."""
    names = table_row(*columns)
    return f"{names}\n{'|---' * (names.count('|') - 1)}|"
