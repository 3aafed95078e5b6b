"""The tables of docs/memory.md are those that the planner makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from benchmarks import which_card

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


@pytest.mark.parametrize(
    ("name", "lines"), [("memory", which_card.memory_lines), ("time", which_card.time_lines)]
)
def test_the_page_has_the_tables_that_the_command_prints(
    name: str, lines: Callable[[], Iterable[str]]
) -> None:
    _, _, rest = PAGE.read_text().partition(f"<!-- {name} -->\n")
    assert rest.partition("\n<!-- end -->")[0].splitlines() == list(lines())
