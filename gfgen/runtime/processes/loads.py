"""The models that ranks hold, and whose fault it is if one cannot be loaded: a rank's, or the model's.

A worker that fails to load, or dies in it, is replaced; a new process may succeed. It is the model's fault
when no rank has succeeded and one of them has tried again. Then its jobs fail, and all others go on. Until
that is known, ranks are not blamed for these deaths, and one that has tried again waits for the others, which
may be at an earlier task or take long to load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from gfgen.models.geometry.weight_files import weights_mark

MAX_FAILURES = 2
"""Of one rank, at one model."""
MAX_SPARED = 4
"""Failures of one rank at one model that it is not blamed for. Each costs a start."""


class HeldModels:
    """The models of a pool's ranks, and the result of the last change of them."""

    def __init__(self, checkpoints: Sequence[Path]) -> None:
        self.checkpoints = tuple(map(str, checkpoints))
        """A worker that starts now loads these."""
        self.unloadable: dict[str, str] = {}
        """Checkpoints that no rank could load, and why."""
        self._weights_marks = {path: weights_mark(path) for path in checkpoints}
        self._holders: set[int] = set()
        """Ranks that hold all models."""
        self.judge(is_changing=False)

    def weights_mark(self, checkpoint: Path) -> str:
        """Of a model's weight files as they were before a rank first loaded them."""
        if checkpoint not in self._weights_marks:
            self._weights_marks[checkpoint] = weights_mark(checkpoint)
        return self._weights_marks[checkpoint]

    def change(self, checkpoints: Iterable[Path]) -> None:
        """Ranks are to hold these models and no others; those that failed are tried again."""
        self.checkpoints = tuple(sorted(set(map(str, checkpoints))))
        self._holders.clear()
        self.judge(is_changing=True)
        for path in self.checkpoints:
            self.unloadable.pop(path, None)
            self.weights_mark(Path(path))

    def judge(self, *, is_changing: bool) -> None:
        """Forget earlier failures. From now on a model may be at fault if ranks start or change their models;
        otherwise a rank that dies is."""
        self._is_changing = is_changing
        self._failures: dict[str, Counter[int]] = {}
        """By checkpoint: the failures of ranks that have not loaded it since then."""

    def succeeded(self, rank: int) -> None:
        """A rank holds all models."""
        self._holders.add(rank)
        for failures in self._failures.values():
            failures.pop(rank, None)

    def lost(self, rank: int, reason: str, *, loading: str | None, ranks: Iterable[int]) -> bool:
        """A rank has died, perhaps when it was `loading` a model; `ranks` are those that are not retired.

        Returns whether the rank is to blame, and not the model.
        """
        self._holders.discard(rank)
        if loading is None or not self._is_changing:
            return True
        failures = self._failures.setdefault(loading, Counter())
        failures[rank] += 1
        is_at_fault = max(failures.values()) >= MAX_FAILURES and all(failures[each] for each in ranks)
        if is_at_fault and loading in self.checkpoints:
            self.checkpoints = tuple([path for path in self.checkpoints if path != loading])
            self.unloadable[loading] = reason
        return loading in self.checkpoints and (bool(self._holders) or failures[rank] > MAX_SPARED)

    def awaits_others(self, rank: int, *, loading: Iterable[int]) -> bool:
        """Whether a rank that has tried a model again may start when others, which are `loading`, have tried
        it."""
        tried = [each for path, each in self._failures.items() if path in self.checkpoints]
        others = [each for each in loading if each != rank]
        return not self._holders and any(
            each[rank] >= MAX_FAILURES and not all(each[other] for other in others) for each in tried
        )
