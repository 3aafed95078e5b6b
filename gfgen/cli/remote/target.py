"""What the commands can name: the folder of a run, a watched folder, or the URL of a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gfgen.cli.remote.standing import Standing
from gfgen.errors import InputError
from gfgen.job.reader import JobSource
from gfgen.runtime.files.live import read_live
from gfgen.runtime.files.lock import holder_of

RUNS = Path("outputs")
"""Where runs write by default, from the current folder."""
_ADDRESS = re.compile(r"[A-Za-z0-9.\-]+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Cancelled:
    ids: Sequence[str]
    num_cancelled: int
    unmatched: Sequence[str]


@dataclass(frozen=True, slots=True)
class Submitted:
    num_jobs: int
    text: str
    problems: Sequence[str] = ()
    answer: Any = None


class Target(Protocol):
    def standing(self) -> Standing:
        """Raises: InputError if there is no run or server."""
        ...

    def cancel(self, patterns: Sequence[str]) -> Cancelled:
        """Cancel the open jobs whose id is one of these, or matches a pattern."""
        ...

    def submit(self, source: JobSource) -> Submitted: ...


def find_target(text: str | None, *, key: str | None) -> Target:
    """The named run or server; without a name the only one that lives below ./outputs.

    Raises: InputError if there is none.
    """
    if text is not None:
        return _named(text, key)
    found = live_folders()
    if len(found) != 1:
        several = f"several run: {', '.join(map(str, found))}" if found else "nothing runs below ./outputs"
        raise InputError(f"{several}; name a folder or a URL, such as outputs/night or http://localhost:3000")
    return _named(str(found[0]), key)


def live_folders() -> Sequence[Path]:
    folders = sorted(RUNS.iterdir()) if RUNS.is_dir() else []
    return [folder for folder in folders if folder.is_dir() and holder_of(folder) is not None]


def _named(text: str, key: str | None) -> Target:
    from gfgen.cli.remote.folder import RunFolder
    from gfgen.cli.remote.server import Server

    path = Path(text)
    if "://" in text or (_ADDRESS.fullmatch(text) and not path.exists()):
        return Server(text if "://" in text else f"http://{text}", key=key)
    if not path.is_dir():
        what = "is a file" if path.exists() else "there is no such folder"
        raise InputError(f"{text}: {what}; name a run's output folder, a watched folder or a server's URL")
    record = read_live(path) or {}
    if isinstance(url := record.get("url"), str):
        if holder_of(path) is None:
            raise InputError(f"{path}: the server of this folder does not run; start 'gfgen serve -o {path}'")
        return Server(url, key=key)
    if isinstance(output := record.get("output"), str):
        return RunFolder(Path(output), name=text)
    return RunFolder(path, name=text)
