"""What a file holds, as size and hash: by these gfgen knows the files that it made.

A run can be killed after a file got its name and before the manifest has its line. In between, the file
carries a *mark* that says what the line will say. The mark is an extended attribute. On a file system without
them there is no mark, and the next run takes such a file for someone else's.
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
    """What a file held when it was written."""

    size_bytes: int
    sha256: str | None = None
    """In hex; None where it is not known: then the size decides."""


def content_of(path: Path) -> Content:
    """What the file holds now.

    Raises: OSError when it cannot be read, or is a link, a folder, or anything else but a file.
    """
    with open(os.open(path, _NO_BLOCK), "rb") as file:
        before = os.fstat(file.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise OSError(f"{path} is not a file")
        return Content(before.st_size, hashlib.file_digest(file, "sha256").hexdigest())


def is_unchanged(path: Path, content: Content) -> bool:
    """Whether a file of this content is there, itself and not by a link."""
    try:
        before = path.lstat()
        if not stat.S_ISREG(before.st_mode) or before.st_size != content.size_bytes:
            return False
        if content.sha256 is None:
            return True
        is_same = content_of(path) == content
        after = path.lstat()  # reading a long video takes a while
        return is_same and (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    except OSError:
        return False


def set_mark(path: Path, content: Content, *, name: str, made_for: Mapping[str, Any]) -> None:
    """Mark a file that will get this name in its folder: what it holds, and for which job it was made."""
    with contextlib.suppress(OSError):
        place = {"file": name, "folder": path.parent.stat().st_ino}
        value = {**made_for, **place, "size_bytes": content.size_bytes, "sha256": content.sha256}
        os.setxattr(path, MARK, json.dumps(value).encode())


def read_mark(path: Path) -> dict[str, Any] | None:
    """What the mark of a file says; None without one, or if the file was changed, moved or copied since."""
    try:
        mark = json.loads(os.getxattr(path, MARK, follow_symlinks=False))
        is_in_place = (mark["file"], mark["folder"]) == (path.name, path.parent.stat().st_ino)
        content = Content(mark["size_bytes"], mark["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if is_in_place and is_unchanged(path, content) else None


def remove_mark(path: Path) -> None:
    """The manifest has the file's line."""
    with contextlib.suppress(OSError):
        os.removexattr(path, MARK, follow_symlinks=False)
