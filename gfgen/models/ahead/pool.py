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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from gfgen.models.ahead.listing import Call
from gfgen.models.ahead.places import pin_compilers
from gfgen.system.lifeline import module_command, module_environment
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""361 kernels and the exchanges take about two minutes of one core."""
MAX_WARNINGS = 3


@dataclass(frozen=True, slots=True)
class Count:
    """Kernels that were there, were compiled, and are missing."""

    present: int = 0
    compiled: int = 0
    missing: int = 0

    @property
    def total(self) -> int:
        return self.present + self.compiled + self.missing


@dataclass(frozen=True, slots=True)
class Report:
    kinds: Mapping[str, Count] = field(default_factory=dict)
    problems: Sequence[str] = ()
    duration_s: float = 0.0

    @property
    def all(self) -> Count:
        counts = self.kinds.values()
        return Count(
            *(sum(getattr(each, name) for each in counts) for name in ("present", "compiled", "missing"))
        )


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

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> Report:
        """What was compiled, as soon as it is; the log says so."""
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._result.seek(0)
        try:
            found = json.load(self._result)
            kinds = {kind: Count(*counts) for kind, counts in found["kinds"].items()}
            report = Report(kinds, found["problems"], time.monotonic() - self._began_s)
        except ValueError:
            report = Report(problems=[f"the process that compiles ended with {self._process.returncode}"])
        if report.all.compiled:
            logger.info(
                "compiled %s in %.1f s; %d were there",
                counted(report.all.compiled, "kernel"),
                report.duration_s,
                report.all.present,
            )
        for problem in report.problems[:MAX_WARNINGS]:
            logger.warning("not compiled ahead: %s", problem)
        return report

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._result.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
