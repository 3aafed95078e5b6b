"""What the ranks have done for each owner of jobs: who is next where owners share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Shares:
    """Rank seconds of the owners that have jobs.

    An owner without jobs saves nothing up: when its next job arrives, it begins with the seconds of the
    owner that has had the least. Nor does it pay for ranks that it had while nobody else wanted them.
    """

    def __init__(self) -> None:
        self._num_jobs: Counter[str | None] = Counter()
        self._served_s: dict[str | None, float] = {}
        self._least_s = 0.0

    @property
    def served_s(self) -> Mapping[str | None, float]:
        """By owner, for comparison with each other."""
        return self._served_s.copy()

    def arrive(self, owner: str | None) -> None:
        """A job of this owner has arrived."""
        self._num_jobs[owner] += 1
        self._served_s.setdefault(owner, self._least_s)

    def serve(self, owner: str | None, rank_s: float) -> None:
        """A task of this owner has run."""
        if owner in self._served_s:
            self._served_s[owner] += rank_s
            self._least_s = min(self._served_s.values())

    def leave(self, owner: str | None) -> None:
        """A job that had arrived has ended."""
        self._num_jobs[owner] -= 1
        if not self._num_jobs[owner]:
            del self._num_jobs[owner], self._served_s[owner]

    def check(self) -> None:
        """Assert what always holds."""
        assert self._num_jobs.keys() == self._served_s.keys(), "owners without jobs have shares"
        assert min(self._num_jobs.values(), default=1) > 0, f"jobs of owners: {self._num_jobs}"
