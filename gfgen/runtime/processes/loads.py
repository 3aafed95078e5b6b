"""Whose fault it is that ranks cannot load a model: a rank's, which is replaced, or the model's. Pure.

At the start (pool.py) and when models change (workers.py) alike. A worker that fails to load, or dies in it,
is replaced; a fresh process may succeed. It is the model's fault when no rank has succeeded and one of them
has tried again. Then its jobs fail, and all others go on. Until that is known, ranks are not blamed for these
deaths, a few times each: others may be long in loading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

MAX_FAILURES = 2
"""Of one rank, at one model."""
MAX_SPARED = 4
"""Deaths of one rank after one change of models for which nobody is blamed: each costs a start, and is
followed by the next one at once."""


class Loads:
    """What became of the last change of models; `models` are those that ranks are to hold, by name."""

    def __init__(self, models: Mapping[str, Path]) -> None:
        self._names: dict[str, list[str]] = {}
        """By checkpoint."""
        for name, checkpoint in models.items():
            self._names.setdefault(str(checkpoint), []).append(name)
        self._failures: dict[str, Counter[int]] = {}
        """By checkpoint: of ranks that have not loaded it since."""
        self._holders: set[int] = set()
        self._num_spared: Counter[int] = Counter()
        """By rank: deaths over models that it was not blamed for."""

    def spares(self, rank: int) -> bool:
        """Whether a rank that has died over a model is not to blame, for once more.

        It is when another one holds all models, or when it has died of them too often.
        """
        if self._holders or self._num_spared[rank] >= MAX_SPARED:
            return False
        self._num_spared[rank] += 1
        return True

    def succeeded(self, rank: int) -> None:
        """A rank holds all models."""
        self._holders.add(rank)
        for failures in self._failures.values():
            failures.pop(rank, None)

    def lost(self, rank: int) -> None:
        """What the rank held is gone with its process."""
        self._holders.discard(rank)

    def failed(self, checkpoint: str, rank: int, *, ranks: Collection[int]) -> tuple[str, ...]:
        """A rank could not load a model; the model's names if that is the model's fault, told once.

        `ranks` are those that are not retired.
        """
        if checkpoint not in self._names:
            return ()
        failures = self._failures.setdefault(checkpoint, Counter())
        failures[rank] += 1
        if max(failures.values()) < MAX_FAILURES or not all(failures[each] for each in ranks):
            return ()
        return tuple(self._names.pop(checkpoint))
