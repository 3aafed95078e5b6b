"""The user's home, which every command needs, so this imports next to nothing."""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from gfgen.errors import InputError

logger = logging.getLogger(__name__)


def home() -> Path:
    """The user's home, or a temporary one, also for libraries, if containers give none that is writable."""
    with suppress(RuntimeError):  # no HOME, and no entry in the list of users
        found = Path.home()
        place = found if os.path.lexists(found) else found.parent
        if (os.path.isdir(place) and os.access(place, os.W_OK)) or os.path.isdir(found / ".cache"):
            return found
    import tempfile  # 4 ms that only such users pay

    try:
        folder = Path(tempfile.gettempdir(), f"gfgen-home-{os.getuid()}")
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        state = folder.lstat()
        if state.st_uid != os.getuid() or state.st_mode & 0o170077 != stat.S_IFDIR:
            folder = Path(tempfile.mkdtemp(prefix="gfgen-home-"))  # another user has made the first
    except OSError as error:
        raise InputError(f"there is no home, and no place for temporary files ({error}); set HOME") from None
    os.environ["HOME"] = str(folder)
    os.environ.setdefault("USER", str(os.getuid()))
    logger.warning("this user has no home: there is no user configuration, and caches are in %s", folder)
    return folder
