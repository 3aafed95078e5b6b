"""Kernels compiled before they are needed, by processes that need no GPU (compiling.py).

Ranks find the result in Triton's cache and in that of the exchanges. A failure is a warning: ranks compile
what is missing.
"""

from __future__ import annotations

import json
import logging
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from gfgen.models.ahead.listing import Call
from gfgen.models.ahead.places import pin_compilers
from gfgen.system.lifeline import module_command, module_environment
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""The whole list takes about two minutes of one core."""


@dataclass(frozen=True, slots=True)
class Report:
    counts: Counter[tuple[str, str]]
    """By kind, and present, compiled or missing."""
    duration_s: float

    def number(self, outcome: str) -> int:
        return sum(number for (_, each), number in self.counts.items() if each == outcome)


class Compiling:
    """Processes that compile. They end at `close`, and with the thread that started them.

    compiles: otherwise they only count what is there.
    """

    def __init__(self, calls: Sequence[Call], architectures: Sequence[str], *, compiles: bool = True) -> None:
        pin_compilers()
        self._began_s = time.monotonic()
        self._result = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        with tempfile.TemporaryFile("w+") as request:  # files hold more than pipes, and nobody waits
            json.dump({"architectures": architectures, "calls": calls, "compiles": compiles}, request)
            request.seek(0)
            self._process = subprocess.Popen(
                module_command("gfgen.models.ahead.compiling"),
                env=module_environment(),
                stdin=request,
                stdout=self._result,
                stderr=subprocess.DEVNULL,
            )

    def wait(self) -> Report:
        """What was compiled, as soon as it is; the log says so."""
        found = []
        try:
            self._process.wait(TIMEOUT_S)
            self._result.seek(0)
            found = json.load(self._result)
        except (subprocess.TimeoutExpired, ValueError):
            logger.warning("kernels were not compiled ahead: the process ended, or took %g s", TIMEOUT_S)
        report = Report(
            Counter((kind, outcome) for kind, outcome, _ in found), time.monotonic() - self._began_s
        )
        if number := report.number("compiled"):
            logger.info("compiled %s in %.1f s", counted(number, "kernel"), report.duration_s)
        for reason in {reason: None for *_, reason in found if reason}:
            logger.warning("not compiled ahead: %s", reason)
        return report

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._result.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
