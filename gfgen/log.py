"""Logging for the command line: readable lines, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

_UTC = "%Y-%m-%dT%H:%M:%S"


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC), level, logger, message, and `extra` fields."""

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


def configure(*, level: str = "info", as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send records of `gfgen` to a stream (standard error by default).

    Replaces what an earlier call installed, so it can be called again.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    readable = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else readable)
    logger = logging.getLogger("gfgen")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
