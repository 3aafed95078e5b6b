"""A chooser that can be changed, or left out, while the run goes on."""

from __future__ import annotations

from gfgen.runtime.predict.choosing import ChooserBeside
from gfgen.snapshot import Choice, Choose, Snapshot


class SwitchedChooser:
    """Thinks under policies that hand over to others (`auto`), and does nothing under the rest."""

    def __init__(self, choose: Choose | None) -> None:
        self._inner: ChooserBeside | None = None
        self.follow(choose)

    def follow(self, choose: Choose | None) -> None:
        """From now on this one chooses, or nobody."""
        if self._inner is not None:
            self._inner.abandon()
        self._inner = None if choose is None else ChooserBeside(choose)

    def consider(self, snapshot: Snapshot) -> None:
        if self._inner is not None:
            self._inner.consider(snapshot)

    def take(self) -> Choice | None:
        return None if self._inner is None else self._inner.take()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
