"""The content of a file, as size and hash, by which gfgen recognizes the files that it made.

A run can be killed after a file gets its name and before the manifest gets its line. In between, the file has
a *mark*, an extended attribute with the same facts as the line. A file system without extended attributes has
no marks, and the next run does not recognize such a file as its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "user.gfgen"
_NO_BLOCK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Content:
    size_bytes: int
    sha256: str | None = None
    """In hex; None if unknown: then only the size is compared."""


NamedContent = tuple[str, int, str | None]
"""Name, size in bytes and SHA-256 of one of several files of a job."""


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
