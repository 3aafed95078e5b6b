"""The lock of an output folder: one run at a time writes there.

The run and its processes keep the lock's descriptor open; the kernel releases it when the last of them ends.
Where there are no such locks (Lustre, some NFS), a lock of the run's process alone replaces it, or a name in
this machine's kernel, which does not keep out runs of other machines.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from gfgen.errors import LockedError, OutputError

logger = logging.getLogger(__name__)

LOCK_NAME = ".gfgen.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
ORPHANS_S = 5.0  # how long to wait for the processes of a killed run: the kernel frees their memory
_POLL_S = 0.05
_MAX_NOTE_BYTES = 4096


class Holder(NamedTuple):
    pid: int
    since: str


@contextmanager
def hold_folder(folder: Path) -> Iterator[int]:
    """Keep other runs out while any process holds the descriptor that this yields. Raises: LockedError."""
    path = folder / LOCK_NAME
    fd, held = _lock(path)
    try:
        _write_note(fd)
        yield held
    finally:
        # Before the lock is released: a run that has opened this file sees that it is gone.
        with suppress(OSError):
            path.unlink()
        for each in {fd, held}:
            os.close(each)


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
    except OSError as error:
        is_unknown = error.errno in _NO_LOCKS
        return None if is_unknown and _was_killed(holder) else holder
    finally:
        os.close(fd)
    return None


def _lock(path: Path) -> tuple[int, int]:
    """Descriptors of the file that has this name now, and of what holds the lock; mostly the same."""
    deadline_s = time.monotonic() + ORPHANS_S
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except PermissionError:  # a killed run of another user has left it
                fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}; choose another --output") from None
        try:
            held = _take(fd, path.parent)
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
            return fd, held
        for each in {fd, held}:
            os.close(each)  # its last holder has removed it since we opened it


def _take(fd: int, folder: Path) -> int:
    """The descriptor that holds the lock. Raises: BlockingIOError when another has it; OSError."""
    for lock in (fcntl.flock, fcntl.lockf):
        try:
            lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is fcntl.lockf:
                logger.warning("%s: this file system has only locks of single processes", folder)
            return fd
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError from None
            if error.errno not in _NO_LOCKS:
                raise
    found, name = os.stat(folder), socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0gfgen-{found.st_dev}-{found.st_ino}")
    except OSError:
        name.close()
        raise BlockingIOError from None
    logger.warning("%s: this file system has no locks; start no run there on another machine", folder)
    return name.detach()


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
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False


def _write_note(fd: int) -> None:
    """Record who holds the lock. On a full disk the lock works without the note."""
    note = {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(note).encode() + b"\n", 0)


def _read_note(fd: int) -> Holder | None:
    try:
        note = json.loads(os.pread(fd, _MAX_NOTE_BYTES, 0))
        return Holder(int(note["pid"]), str(note["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
