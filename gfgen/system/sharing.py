"""Files that one process makes while others wait for it."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

_POLL_S = 0.05


def locked(path: Path, *, timeout_s: float) -> IO[bytes]:
    """An open file that no other caller has until it is closed, or until the process ends.

    After the timeout it comes without the lock: what it guards is then made twice, which is harmless.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another has it
            if time.monotonic() < until_s:
                time.sleep(_POLL_S)
                continue
        except OSError:  # the file system has no locks
            pass
        return file
