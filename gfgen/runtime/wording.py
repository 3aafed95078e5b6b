"""Numbers of things as a person reads them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """'1 rank', '4 ranks', '1,200 jobs'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
