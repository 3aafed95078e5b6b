"""API keys: the rules for them, and the file that names several."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from gfgen.errors import InputError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_MIN_CHARS = 8
_GOOD = "'openssl rand -hex 24' makes a good key"


def check_key(key: str, *, where: str) -> None:
    if len(key) < _MIN_CHARS:
        raise InputError(f"{where}: give at least {_MIN_CHARS} characters; {_GOOD}")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise InputError(
            f"{where}: give printable ASCII without spaces at its ends, since it is sent in a header; {_GOOD}"
        )


def read_keys(path: Path) -> dict[str, str]:
    """The keys of a file by name: a line has a name and a key. Blank lines and # comments are skipped.

    Raises: InputError that names the first wrong line, but no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        is_open = bool(path.stat().st_mode & 0o044)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--key-file {path}: cannot be read ({error})") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, key = line.strip().partition(" ")
        where = f"--key-file {path}: line {number}"
        if not _NAME.fullmatch(name) or not key.strip():
            raise InputError(f"{where}: give a name (letters, digits, . _ -) and a key, with a space between")
        check_key(key.strip(), where=where)
        if name in keys or key.strip() in keys.values():
            raise InputError(f"{where}: its name or key is also on an earlier line; give each key its own")
        keys[name] = key.strip()
    if not keys:
        raise InputError(f"--key-file {path}: has no keys; give a name and a key on each line")
    if is_open:
        logger.warning("--key-file %s: other users of this machine can read it; chmod 600 it", path)
    return keys
