"""Files, and lines of files, that are written completely or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from gfgen.errors import InputError, OutputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class LineFile:
    """Appends to a file that only this process writes. Raises: OutputError, after which the run must stop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(_explain(path, error)) from error
        self._opened = os.fstat(self._fd)
        size = self._opened.st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self.append(b"\n")

    def append(self, content: bytes) -> None:
        """Write all of the content, which survives this process. Fails if the file no longer has its name."""
        if not has_its_name(self.path, self._opened):
            raise OutputError(
                f"{self.path} was removed or replaced during the run; run again to start a new one"
            )
        written = 0
        try:
            while written < len(content):
                written += os.write(self._fd, content[written:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OutputError(_explain(self.path, error)) from error

    def sync(self) -> None:
        """Flush to disk if possible."""
        with suppress(OSError):
            os.fsync(self._fd)

    def close(self) -> None:
        self.sync()
        os.close(self._fd)


def has_its_name(path: Path, opened: os.stat_result) -> bool:
    """Whether the path still leads to an open file, whose status when it was opened is given."""
    with suppress(OSError):
        return os.path.samestat(os.stat(path), opened)
    return False


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file and rename it into place, so that readers never see half of it. Raises: OSError."""
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # /dev/null, which root could replace, or a pipe
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, 0o644)  # a cache may belong to several users
        os.rename(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def read_from(path: Path, *, start: int = 0, mark: bytes = b"") -> bytes:
    """What is after `start` bytes, or its lines with `mark`; nothing without a file. Raises: OutputError."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return b"".join(line for line in file if mark in line) if mark else file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}") from error


def check_appendable(path: Path) -> None:
    """Raises: InputError if the file is there and this user may not append to it."""
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"{path}: you may not write it (its owner can, chmod g+w); name another --output")


def _explain(path: Path, error: OSError) -> str:
    reason = f"cannot write {path}: {error.strerror}"
    if error.errno in FULL:
        return f"{reason}; make room, then run the same command again to go on"
    if error.errno in _READ_ONLY:
        return f"{reason}; make it writable and run again, or choose another --output"
    return f"{reason}; choose another --output"
