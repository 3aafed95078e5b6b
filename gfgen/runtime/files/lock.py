"""The lock of an output folder: one run at a time writes there.

The run, its workers and its writers keep the lock's descriptor open. The kernel releases the lock when the
last of them ends, in whatever way. So a file that a killed run left behind does not block the next run.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gfgen.errors import LockedError, OutputError

LOCK_NAME = ".gfgen.lock"
ORPHANS_S = 5.0
"""How long to wait for the processes of a killed run: the kernel kills them too, and frees their memory."""
_POLL_S = 0.05
_MAX_NOTE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of the lock file: the process of a run."""

    pid: int
    since: str


@contextmanager
def hold_folder(folder: Path) -> Iterator[int]:
    """Keep other runs out of this folder.

    Yields the lock's descriptor. The next run cannot start while any process holds it.
    Raises: LockedError when another run holds the folder, or processes of a killed run do not end.
    """
    path = folder / LOCK_NAME
    fd = _lock(path)
    try:
        _write_note(fd)
        yield fd
    finally:
        # Before the lock is released: a run that has opened this file sees that it is gone.
        with suppress(OSError):
            path.unlink()
        os.close(fd)


def holder_of(folder: Path) -> Holder | None:
    """The run that holds this folder now; None if none does."""
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        holder = _read_note(fd)
        if holder is None:  # a run is about to take it, and must not find it locked by us
            return None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return holder
    finally:
        os.close(fd)
    return None


def _lock(path: Path) -> int:
    """A descriptor of the file that has this name now, locked."""
    deadline_s = time.monotonic() + ORPHANS_S
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
            if not _was_killed(holder) or time.monotonic() > deadline_s:
                raise _locked(path, holder) from None
            time.sleep(_POLL_S)
            continue
        except OSError as error:
            os.close(fd)
            raise OutputError(f"cannot lock {path}: {error.strerror}; choose another --output") from None
        if _is_under(path, fd):
            return fd
        os.close(fd)  # its last holder has removed it since we opened it


def _locked(path: Path, holder: Holder | None) -> LockedError:
    who = f" (process {holder.pid}, since {holder.since})" if holder else ""
    if not _was_killed(holder):
        return LockedError(
            f"{path.parent} is in use by another run{who}; wait for it, or name another --output"
        )
    return LockedError(
        f"{path.parent}: the run before was killed{who}, but its processes have not ended yet (a driver or a "
        "disk may hold them); wait for them, or name another --output"
    )


def _was_killed(holder: Holder | None) -> bool:
    """Whether the run has ended (or is a zombie), though some of its processes still hold the lock."""
    if holder is None:
        return False
    try:
        return Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _is_under(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _write_note(fd: int) -> None:
    """Record who holds the lock. On a full disk the lock works without the note."""
    note = {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(note).encode() + b"\n", 0)


def _read_note(fd: int) -> Holder | None:
    """None when the holder has left no note."""
    try:
        note = json.loads(os.pread(fd, _MAX_NOTE_BYTES, 0))
        return Holder(int(note["pid"]), str(note["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
