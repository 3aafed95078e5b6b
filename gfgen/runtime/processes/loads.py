"""The models that ranks hold, and whose fault it is if one cannot be loaded: a rank's, or the model's.

A worker that fails to load, or dies in it, is replaced; a new process may succeed. It is the model's fault
when no rank has succeeded and one of them has tried again. Then its jobs fail, and all others go on. Until
that is known, ranks are not blamed for these deaths, a few times each: others may take long to load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gfgen.models.geometry.weight_files import weights_mark

MAX_FAILURES = 2
"""Of one rank, at one model."""
MAX_SPARED = 4
"""Deaths of one rank after one change of models that no rank is blamed for. Each costs a start, and the next
one follows at once."""


class HeldModels:
    """The models of a pool's ranks, and the result of the last change of them."""

    def __init__(self, checkpoints: Sequence[Path]) -> None:
        self.checkpoints = tuple(map(str, checkpoints))
        """A worker that starts now loads these."""
        self.unloadable: dict[str, str] = {}
        """Checkpoints that no rank could load when the workers started, and why."""
        self._weights_marks = {path: weights_mark(path) for path in checkpoints}
        self._judge({})

    def weights_mark(self, checkpoint: Path) -> str:
        """Of a model's weight files as they were before a rank first loaded them."""
        if checkpoint not in self._weights_marks:
            self._weights_marks[checkpoint] = weights_mark(checkpoint)
        return self._weights_marks[checkpoint]

    def begin_start(self) -> None:
        """Ranks start with these models."""
        self._judge({path: path for path in self.checkpoints})

    def begin_run(self) -> None:
        """Another run begins: a rank that dies is to blame for it, until the run changes its models."""
        self._judge({})

    def change(self, models: Mapping[str, Path]) -> None:
        """Ranks are to hold these models, by name, and no others."""
        self.checkpoints = tuple(sorted(set(map(str, models.values()))))
        self._judge(models)
        for path in self.checkpoints:  # they are tried again
            self.unloadable.pop(path, None)
            self.weights_mark(Path(path))

    def _judge(self, models: Mapping[str, Path | str]) -> None:
        """Forget earlier failures, and find out from now on whose fault it is if one of these fails."""
        self._names: dict[str, list[str]] = {}
        """By checkpoint, of models that are not given up."""
        for name, checkpoint in models.items():
            self._names.setdefault(str(checkpoint), []).append(name)
        self._is_judging = bool(models)
        self._failures: dict[str, Counter[int]] = {}
        """By checkpoint: the failures of ranks that have not loaded it since then."""
        self._holders: set[int] = set()
        """Ranks that hold all models."""
        self._num_spared: Counter[int] = Counter()
        """By rank: deaths during a load that it was not blamed for."""

    def succeeded(self, rank: int) -> None:
        """A rank holds all models."""
        self._holders.add(rank)
        for failures in self._failures.values():
            failures.pop(rank, None)

    def lost(self, rank: int, *, loading: str | None, ranks: Iterable[int]) -> tuple[Sequence[str], bool]:
        """A rank has died, perhaps when it was `loading` a model; `ranks` are those that are not retired.

        Returns the model's names, once, if it is the model's fault; and whether the rank is spared the blame.
        """
        self._holders.discard(rank)
        if loading is None or not self._is_judging:
            return (), False
        names: Sequence[str] = ()
        if loading in self._names:
            failures = self._failures.setdefault(loading, Counter())
            failures[rank] += 1
            if max(failures.values()) >= MAX_FAILURES and all(failures[each] for each in ranks):
                names = tuple(self._names.pop(loading))
                self.checkpoints = tuple([path for path in self.checkpoints if path != loading])
        return names, loading not in self.checkpoints or self._is_spared(rank)

    def _is_spared(self, rank: int) -> bool:
        """Whether a rank that died during a load is not to blame this time.

        It is to blame if another rank holds all models, or if it has died so too often.
        """
        if self._holders or self._num_spared[rank] >= MAX_SPARED:
            return False
        self._num_spared[rank] += 1
        return True
