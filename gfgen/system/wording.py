"""Numbers of things as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 10
"""Of things that are named one by one; the others are counted."""


def counted(number: int, noun: str) -> str:
    """'1 rank', '4 ranks', '1,200 jobs'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(things: Sequence[object], noun: str) -> list[str]:
    """The first few as text, and 'and 5 more jobs' for the others."""
    num_more = len(things) - MAX_NAMED
    return [
        *map(str, things[:MAX_NAMED]),
        *([f"and {counted(num_more, f'more {noun}')}"] if num_more > 0 else []),
    ]


def in_lines(numbers: Sequence[int | None]) -> str:
    """'line 3', 'lines 1, 2, 3 and 5 more'."""
    shown = ", ".join(map(str, numbers[:MAX_NAMED]))
    rest = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f"line{'' if len(numbers) == 1 else 's'} {shown}{rest}"
