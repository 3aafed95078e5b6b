"""Logging for the command line: readable lines, or one JSON object per line; to a file as well."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from gfgen.errors import InputError
from gfgen.system.outlet import unblocked

_UTC = "%Y-%m-%dT%H:%M:%S"
_READABLE = "%(asctime)s %(levelname)-7s %(message)s"
_DATE = "%Y-%m-%d %H:%M:%S"

FILE_ONLY = {"file_only": True}
"""As `extra` of a record: the log file gets it, the stream, which shows it otherwise, does not."""


def fields(**values: Any) -> dict[str, Any]:
    """As `extra` of a record: what its message says in words, for logs of JSON objects."""
    return {"fields": values}


def json_line(name: str, message: str, **values: Any) -> str:
    """A record with fields as `JsonFormatter` writes it, for standard output."""
    record = logging.LogRecord(name, logging.INFO, "", 0, message, None, None)
    record.fields = values
    return JsonFormatter().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC), level, logger, message, and `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": f"{time.strftime(_UTC, time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(
    *,
    level: str = "info",
    as_json: bool = False,
    stream: TextIO | None = None,
    file: Path | None = None,
    file_level: str = "info",
) -> None:
    """Send records of `gfgen` to a stream (standard error by default), and append them to a file.

    Replaces what an earlier call installed, so it can be called again. From now on nobody who writes to
    standard error waits for its reader.

    Raises: InputError when the file cannot be written.
    """
    logger = logging.getLogger("gfgen")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        if isinstance(old, _LogFile):
            old.close()
    sys.stderr = unblocked(sys.stderr)
    shown = stream or sys.stderr
    handler: logging.StreamHandler[Any] = logging.StreamHandler(shown)
    handler.addFilter(lambda record: not getattr(record, "file_only", False))
    installed = [(handler, level, "%H:%M:%S" if shown.isatty() else _DATE)]
    if file is not None:
        installed.append((_open(file), file_level, _DATE))
    for each, least, time_format in installed:
        each.setLevel(least.upper())
        each.setFormatter(JsonFormatter() if as_json else logging.Formatter(_READABLE, time_format))
        logger.addHandler(each)
    logger.setLevel(min(handler.level for handler in logger.handlers))
    logger.propagate = False


def is_json() -> bool:
    """Whether `configure` was told to write JSON objects."""
    handlers = logging.getLogger("gfgen").handlers
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)


class _LogFile(logging.handlers.WatchedFileHandler):
    """A log file that may be moved away: it is begun anew then, so logrotate needs no signal.

    One that cannot be written any more is given up, and standard error says so.
    """

    def _open(self) -> Any:
        # A pipe is opened for reading, too: otherwise this waits for its first reader.
        way = os.O_RDWR if Path(self.baseFilename).is_fifo() else os.O_WRONLY
        fd = os.open(self.baseFilename, way | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return unblocked(os.fdopen(fd, "a", encoding=self.encoding, errors=self.errors))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # from opening it anew
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        logger = logging.getLogger("gfgen")
        logger.removeHandler(self)
        with contextlib.suppress(OSError):  # what it could not write it cannot write now
            self.close()
        reason = error.strerror or error
        logger.error("cannot write --log-file %s (%s); the run goes on without it", self.baseFilename, reason)
        return None


def _open(file: Path) -> _LogFile:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return _LogFile(file, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"--log-file {file}: cannot write there ({error.strerror}); name another") from None
