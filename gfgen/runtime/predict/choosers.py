"""Choose the deciding policy: at once in virtual time, in a thread in real time."""

from __future__ import annotations

import logging
import threading
import time

from gfgen.errors import in_one_line
from gfgen.runtime.predict.rollout import with_foresight
from gfgen.snapshot import Choice, Choose, Snapshot

logger = logging.getLogger(__name__)

PAUSE_S = 5e-5
"""Sleep in each turn of a look ahead in a thread, which frees the interpreter. A turn takes about 0.1 ms, so
the control loop waits at most that long."""
CLOSE_TIMEOUT_S = 5.0
"""At the end of the run, a choice in progress stops within a turn. One that never looks ahead is left behind
after this timeout and ends with the process."""


class ImmediateChooser:
    """Chooses while time stands still, so that simulated runs are the same every time."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._last: Choice | None = None
        self._choice: Choice | None = None

    def consider(self, snapshot: Snapshot) -> None:
        self._choice = _asked(self._choose, with_foresight(snapshot), self._last)
        self._last = self._choice or self._last

    def take(self) -> Choice | None:
        choice, self._choice = self._choice, None
        return choice

    def close(self) -> None:
        """No effect: no choice is in progress."""


class ThreadedChooser:
    """Chooses in its own thread, so that the control loop never waits for it.

    One choice at a time: `consider` does nothing while another is in progress. Only the control loop calls
    `consider` and `take`; only the thread writes `_choice`, once, before it ends.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._last: Choice | None = None
        self._choice: Choice | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def consider(self, snapshot: Snapshot) -> None:
        if self._thread is not None:
            return
        ahead = with_foresight(snapshot, pause=self._pause)
        self._thread = threading.Thread(target=self._think, args=(ahead,), name="chooser", daemon=True)
        self._thread.start()

    def take(self) -> Choice | None:
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        choice, self._choice = self._choice, None
        self._last = choice or self._last
        return choice

    def abandon(self) -> None:
        """Stop a choice in progress without waiting."""
        self._is_closed = True

    def close(self) -> None:
        """Stop a choice in progress, and wait up to CLOSE_TIMEOUT_S."""
        self.abandon()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("choosing a policy has not ended %g s after the run", CLOSE_TIMEOUT_S)

    def _think(self, snapshot: Snapshot) -> None:
        self._choice = _asked(self._choose, snapshot, self._last)

    def _pause(self) -> None:
        if self._is_closed:
            raise _Closed
        time.sleep(PAUSE_S)


class _Closed(Exception):
    """The run is over and needs no choice."""


class SwitchableChooser:
    """Runs the chooser of the current policy (`auto`), if it has one."""

    def __init__(self, choose: Choose | None) -> None:
        self._inner: ThreadedChooser | None = None
        self.follow(choose)

    def follow(self, choose: Choose | None) -> None:
        """Use another chooser, or none, from now on."""
        if self._inner is not None:
            self._inner.abandon()
        self._inner = None if choose is None else ThreadedChooser(choose)

    def consider(self, snapshot: Snapshot) -> None:
        if self._inner is not None:
            self._inner.consider(snapshot)

    def take(self) -> Choice | None:
        return None if self._inner is None else self._inner.take()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


def _asked(choose: Choose, snapshot: Snapshot, last: Choice | None) -> Choice | None:
    """The choice; None, with a warning, if `choose` raises: the present policy continues."""
    try:
        choice = choose(snapshot, last)
        if choice is not None and not isinstance(choice, Choice):
            raise TypeError(
                f"it returned a value of type {type(choice).__name__}; a Choice or None is accepted"
            )
        return choice
    except _Closed:
        return None
    except Exception as error:  # `choose` may be the user's own
        logger.warning("choosing a policy failed: %s", in_one_line(error))
        return None
