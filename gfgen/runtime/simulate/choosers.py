"""Choose the deciding policy: at once in virtual time, in a thread in real time."""

from __future__ import annotations

import logging
import threading

from gfgen.errors import in_one_line
from gfgen.runtime.simulate.rollout import with_foresight
from gfgen.snapshot import Choice, Choose, Snapshot

logger = logging.getLogger(__name__)

PAUSE_S = 5e-5
"""Sleep in each turn (0.1 ms) of a look ahead in a thread: the control loop waits at most that long."""
CLOSE_TIMEOUT_S = 5.0
"""At the end of the run, a choice that has not stopped by then is left behind and ends with the process."""


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


class ThreadedChooser:
    """Chooses in a thread, so that the control loop never waits for it; one choice at a time."""

    def __init__(self, choose: Choose | None) -> None:
        self._choose = choose
        self._last: Choice | None = None
        self._thread: threading.Thread | None = None
        self._found: list[Choice | None] = []
        self._is_abandoned = threading.Event()

    def follow(self, choose: Choose | None) -> None:
        """Choose with another function, or not at all, from now on."""
        self._is_abandoned.set()
        self._choose, self._last, self._thread = choose, None, None

    def consider(self, snapshot: Snapshot) -> None:
        if self._choose is None or self._thread is not None:
            return
        self._found, self._is_abandoned = found, is_abandoned = list[Choice | None](), threading.Event()

        def pause() -> None:
            if is_abandoned.wait(PAUSE_S):
                raise _Closed

        asked = self._choose, with_foresight(snapshot, pause=pause), self._last
        self._thread = threading.Thread(
            target=lambda: found.append(_asked(*asked)), name="chooser", daemon=True
        )
        self._thread.start()

    def take(self) -> Choice | None:
        if self._thread is None or self._thread.is_alive():
            return None
        (choice,), self._thread = self._found, None
        self._last = choice or self._last
        return choice

    def close(self) -> None:
        """Stop a choice in progress, and wait up to CLOSE_TIMEOUT_S."""
        thread = self._thread
        self.follow(None)
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)
            if thread.is_alive():
                logger.warning("choosing a policy has not ended %g s after the run", CLOSE_TIMEOUT_S)


class _Closed(Exception):
    """The run is over and needs no choice."""


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
