"""The lock of an output folder: one run at a time writes there.

The kernel holds the lock on behalf of the process and releases it when the process ends, in
whatever way. So the file alone means nothing: one that a killed run has left is taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gfgen.errors import LockedError, OutputError

LOCK_NAME = ".gfgen.lock"
"""Hidden, and removed at the end of a run: it is no result."""
_MAX_NOTE_BYTES = 4096


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Inside, no other run writes to this folder.

    Raises: LockedError when another run holds it, with its process and since when.
    """
    path = folder / LOCK_NAME
    fd = _lock(path)
    try:
        _write_note(fd)
        yield
    finally:
        # Before the lock is released: who opened this file meanwhile finds that it is gone.
        with suppress(OSError):
            path.unlink()
        os.close(fd)


def _lock(path: Path) -> int:
    """A descriptor of the locked file that is under this name; Python's are not inherited."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}; choose another --output") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_note(fd)
            os.close(fd)
            raise LockedError(
                f"{path.parent} is in use by another run{holder}; wait for it, or name another --output"
            ) from None
        except OSError as error:
            os.close(fd)
            raise OutputError(f"cannot lock {path}: {error.strerror}; choose another --output") from None
        if _is_under(path, fd):
            return fd
        os.close(fd)  # its last holder has removed it since we opened it


def _is_under(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _write_note(fd: int) -> None:
    """Say who holds the lock; without room for it the lock is as good."""
    note = {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(note).encode() + b"\n", 0)


def _read_note(fd: int) -> str:
    """' (process 17, since 2026-11-20 22:00:01)', or nothing when its holder has not said so."""
    try:
        note = json.loads(os.pread(fd, _MAX_NOTE_BYTES, 0))
        return f" (process {note['pid']}, since {note['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
