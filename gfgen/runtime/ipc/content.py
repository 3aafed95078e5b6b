"""Files that gfgen makes: how they get their names, and their content, by which gfgen recognizes them.

A file is written under a hidden name, synced and renamed, and replaces only its predecessor;
`remove_leftovers` removes what a killed process leaves. Until the manifest has its line, a file has a *mark*,
an extended attribute with the same facts. Where there are none, the next run does not recognize such a file
as its own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfgen.errors import OutputError
from gfgen.job.spec import FRAME, VIDEO_SUFFIXES

MARK = "user.gfgen"
_NO_BLOCK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
STILL_SUFFIXES, ANIMATED_SUFFIXES = (".png", ".jpg", ".jpeg", ".avif"), (".webp", ".gif")
IMAGE_SUFFIXES = STILL_SUFFIXES + ANIMATED_SUFFIXES
SHRINKS = {".png": 1, ".gif": 1, ".mov": 3, ".mp4": 20, ".webm": 20}
"""Raw bytes per byte of a file, by suffix, a low estimate; 4 for JPEG, WebP and AVIF."""
_TEMPORARY = re.compile(r"\..{1,40}\.tmp-[0-9]+(?P<suffix>\.[A-Za-z0-9]+)", re.DOTALL)
"""The names of `temporary_name`."""

_FOLDERS_REFUSE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EISDIR, errno.EACCES)
"""How file systems refuse to sync a folder (CIFS, 9p, FUSE), or to open one that may not be listed."""


@dataclass(frozen=True, slots=True)
class Content:
    size_bytes: int
    sha256: str | None = None  # in hex; None if unknown: then only the size is compared


NamedContent = tuple[str, int, str | None]  # name, size in bytes and SHA-256 of one of several files of a job


def content_of(path: Path) -> Content:
    """Raises: OSError if it cannot be read or is not a regular file."""
    with open(os.open(path, _NO_BLOCK), "rb") as file:
        before = os.fstat(file.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise OSError(f"{path} is not a file")
        return Content(before.st_size, hashlib.file_digest(file, "sha256").hexdigest())


def is_unchanged(path: Path, content: Content) -> bool:
    """Whether the path is a regular file, not a link, with this content."""
    try:
        before = path.lstat()
        if not stat.S_ISREG(before.st_mode) or before.st_size != content.size_bytes:
            return False
        if content.sha256 is None:
            return True
        is_same = content_of(path) == content
        after = path.lstat()  # it may have changed while it was read
        return is_same and (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    except OSError:
        return False


def set_mark(path: Path, content: Content, *, name: str, made_for: Mapping[str, Any]) -> None:
    """Mark a file that will get this name in its folder with its content and its job."""
    with contextlib.suppress(OSError):
        place = {"file": name, "folder": path.parent.stat().st_ino}
        value = {**made_for, **place, "size_bytes": content.size_bytes, "sha256": content.sha256}
        os.setxattr(path, MARK, json.dumps(value).encode())


def read_mark(path: Path) -> dict[str, Any] | None:
    """The mark of a file; None if it has none or was changed, moved or copied since."""
    try:
        mark = json.loads(os.getxattr(path, MARK, follow_symlinks=False))
        is_in_place = (mark["file"], mark["folder"]) == (path.name, path.parent.stat().st_ino)
        content = Content(mark["size_bytes"], mark["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if is_in_place and is_unchanged(path, content) else None


def remove_mark(path: Path) -> None:
    """Called when the manifest has the file's line."""
    with contextlib.suppress(OSError):
        os.removexattr(path, MARK, follow_symlinks=False)


def name_file(
    temporary: Path, path: Path, *, replaces: Content | None, made_for: Mapping[str, Any] | None
) -> Content:
    """Name a complete file. Raises: OutputError when another file than its predecessor has it; OSError."""
    content = content_of(temporary)
    if made_for is not None:
        set_mark(temporary, content, name=path.name, made_for=made_for)
    _sync(temporary)
    try:
        _link(temporary, path)
    except FileExistsError:
        mark = read_mark(path) if made_for else None
        is_earlier_try = mark is not None and made_for is not None and made_for.items() <= mark.items()
        if not is_earlier_try and (replaces is None or not is_unchanged(path, replaces)):
            raise OutputError(
                f"{path}: another file got this name during the run and was kept, so the job's own was not "
                "written; move it away and run again"
            ) from None
        os.replace(temporary, path)
    try:
        _sync(path.parent)
    except OSError as error:  # the file itself is complete
        if error.errno not in _FOLDERS_REFUSE:
            raise
    return content


def _link(temporary: Path, path: Path) -> None:
    """Rename without replacing; the temporary name may stay. Raises FileExistsError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links on this file system, or an error that the next line raises, too
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            os.replace(temporary, path)
        except OSError:
            path.unlink()
            raise


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(path: Path, *, pid: int | None = None) -> Path:
    """The hidden name under which a process, by default this one, writes `path`."""
    return path.with_name(f".{path.stem[:40]}.tmp-{os.getpid() if pid is None else pid}{path.suffix}")


def remove_unfinished(path: Path, *, pid: int) -> None:
    """Delete the partial file of a dead writer, also one of several of a job."""
    with contextlib.suppress(OSError):
        for each in path.parent.glob(f".*.tmp-{pid}{path.suffix}"):
            each.unlink()


def remove_replaced(path: Path, written: Collection[str], replaces: Mapping[str, Content]) -> None:
    """Delete the last frames of a longer video that `written` replaces, unless they have changed."""
    for name in replaces.keys() - set(written) if FRAME in path.name else ():
        if is_unchanged(path.with_name(name), replaces[name]):
            path.with_name(name).unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> int:
    """Delete partial files of killed writers; returns how many. The caller must hold the folder's lock."""
    suffixes = IMAGE_SUFFIXES + VIDEO_SUFFIXES
    matches = [(path, _TEMPORARY.fullmatch(path.name)) for path in folder.glob(".*.tmp-*")]
    leftovers = [path for path, x in matches if x and x["suffix"].lower() in suffixes and path.is_file()]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)
