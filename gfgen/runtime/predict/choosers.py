"""Who thinks about which policy is to decide: at once in virtual time, beside the run in real time."""

from __future__ import annotations

import logging
import threading
import time

from gfgen.errors import in_one_line
from gfgen.runtime.predict.rollout import with_foresight
from gfgen.snapshot import Choice, Choose, Snapshot

logger = logging.getLogger(__name__)

PAUSE_S = 5e-5
"""In each turn of a look ahead that a thread makes: so long the interpreter is everyone else's. A turn
takes about 0.1 ms, which is then the longest that the control loop waits for it."""
CLOSE_TIMEOUT_S = 5.0
"""A thought that is under way when the run ends breaks off within a turn; one that never looks ahead is
left behind after so long, and ends with the process."""


class ImmediateChooser:
    """Thinks while time stands still: for simulated runs, which are the same every time."""

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
        """Nothing is under way."""


class ThreadedChooser:
    """Thinks in a thread of its own, so that the control loop never waits for it.

    One thought at a time: what would begin while another is under way is left out. The control
    loop alone calls `consider` and `take`; the thread alone writes `_choice`, once, before it ends.
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

    def wait(self) -> None:
        """Until the thought that is under way has ended."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Let a thought that is under way break off, without waiting for that."""
        self._is_closed = True

    def close(self) -> None:
        """Let a thought that is under way break off."""
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
    """The run is over: nobody waits for the choice."""


def _asked(choose: Choose, snapshot: Snapshot, last: Choice | None) -> Choice | None:
    """Its choice; None when it raises, which the log tells: the present policy goes on."""
    try:
        choice = choose(snapshot, last)
        if choice is not None and not isinstance(choice, Choice):
            raise TypeError(
                f"it returned a value of type {type(choice).__name__}; a Choice or None is accepted"
            )
        return choice
    except _Closed:
        return None
    except Exception as error:  # who chooses may be the user's own
        logger.warning("choosing a policy failed: %s", in_one_line(error))
        return None
