"""Fixtures: ranks that a module's tests share, and ranks that a test may break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def shared_ranks() -> Iterator[Ranks]:
    ranks = Ranks(8)
    yield ranks
    ranks.close()


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(num_ranks: int, **options: Any) -> Ranks:
        made.append(Ranks(num_ranks, **options))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()
