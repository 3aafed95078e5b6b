"""The live record of an output folder, and the pipe through which its run takes requests.

`.gfgen.live.json` says what a run does now, or did last. Whether the run still lives, the lock says
(lock.py). In a watched folder, and in that of a server, the record has only `output`, the folder of the
run, or `url`. `.gfgen.requests` is a named pipe that exists during a run: each line is a request in JSON.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gfgen.errors import RunError

LIVE_NAME, REQUESTS_NAME = ".gfgen.live.json", ".gfgen.requests"
VERSION = 1
PATIENCE_S = 10.0
"""How long a request waits for room in the pipe: a run reads it several times a second."""

LiveRecord = dict[str, Any]


def write_live(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace the record of a folder at once. Raises OSError."""
    path, partial = folder / LIVE_NAME, folder / f"{LIVE_NAME}.partial"
    partial.write_text(json.dumps({"gfgen_live": VERSION, **record}), encoding="utf-8")
    partial.replace(path)


def read_live(folder: Path) -> LiveRecord | None:
    """The record of a folder; None if it has none that this version can read."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((folder / LIVE_NAME).read_text(encoding="utf-8"))
        if isinstance(record, dict) and record.get("gfgen_live") == VERSION:
            return record
    return None


def open_requests(folder: Path) -> int:
    """A descriptor of a new pipe for requests. Raises OSError where the file system has no pipes."""
    path = folder / REQUESTS_NAME
    path.unlink(missing_ok=True)  # of a killed run: the caller holds the folder's lock
    os.mkfifo(path, 0o600)
    # For writing, too: otherwise the pipe reads as ended whenever no request is open.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def send_request(folder: Path, request: Mapping[str, Any]) -> None:
    """Hand a request to the run of a folder; it is one write, so requests do not mix.

    Raises: RunError if no run reads there.
    """
    line = json.dumps(request).encode() + b"\n"
    assert len(line) <= select.PIPE_BUF
    path, deadline_s = folder / REQUESTS_NAME, time.monotonic() + PATIENCE_S
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except PermissionError:
        raise RunError(f"{folder}: its run belongs to another user, who alone can send requests") from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENXIO):
            raise
        raise RunError(f"{folder}: its run takes no requests now; it is loading models or ending") from None
    try:
        while True:
            try:
                os.write(fd, line)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise RunError(f"{folder}: its run reads no requests; it may be stopped") from None
                time.sleep(0.05)
            except BrokenPipeError:
                raise RunError(f"{folder}: its run has just ended") from None
            else:
                return
    finally:
        os.close(fd)
