"""Run the tests marked gpu, a file at a time, in at most nine minutes (`make test-gpu`).

    python tests/on_gpus.py --ranks-per-gpu 2
    python tests/on_gpus.py --ranks-per-gpu 4 tests/gfc/test_cuda_device.py

Needs no network; CONTRIBUTING.md names the packages. It ends with the time of each file, what failed, what
was skipped and why, and the command for the files that there was no time for.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gpu_ranks import VARIABLE

ROOT = Path(__file__).parent.parent
CALL_S, LEAST_S, TEST_S = 540.0, 20.0, 120.0
"""For all files of a call; what a file needs to be begun; for one test, with one rank on each GPU."""
FOLDERS = ("gfc", "runtime", "cli", "server", "models")
NOTABLE = re.compile(r"(FAILED|ERROR|SKIPPED) |.* (FAILED|ERROR) +\[")
NO_TESTS, TIMED_OUT = 5, 124
"""Exit codes of pytest, and of `timeout`."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests marked gpu.")
    parser.add_argument("--ranks-per-gpu", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=CALL_S)
    parser.add_argument("files", nargs="*")
    asked = parser.parse_args()
    files = asked.files or files_with_gpu_tests()
    ends_s = time.monotonic() + asked.seconds
    found: list[str] = []
    has_failed = False
    while files and (left_s := ends_s - time.monotonic()) > LEAST_S:
        code, lines = run(files[0], ranks_per_gpu=asked.ranks_per_gpu, left_s=left_s)
        has_failed = has_failed or code not in (0, NO_TESTS)
        ending = lines[-1].strip("= ") if lines else f"exit code {code}"
        ending = f"stopped when the time was up, at: {ending}" if code == TIMED_OUT else ending
        found += [f"{files.pop(0)}: {ending}", *(line for line in lines if NOTABLE.match(line))]
    print(f"\n{asked.ranks_per_gpu} ranks per GPU\n" + "\n".join(found))
    if files:
        print(f'no time for: make test-gpu RANKS_PER_GPU={asked.ranks_per_gpu} GPU_TESTS="{" ".join(files)}"')
    return int(has_failed or bool(files))


def files_with_gpu_tests() -> list[str]:
    """Relative to the root, in the order of FOLDERS."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
    return [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text()]


def run(file: str, *, ranks_per_gpu: int, left_s: float) -> tuple[int, Sequence[str]]:
    """The exit code and the lines of a file's tests, which are shown as they come."""
    test_s = TEST_S * ranks_per_gpu
    bound = (
        f"--timeout={test_s:g}"
        if find_spec("pytest_timeout")
        else f"--override-ini=faulthandler_timeout={test_s:g}"
    )
    command = [
        *("timeout", "--kill-after=10", f"{left_s:.0f}", sys.executable, "-m", "pytest", "-m", "gpu"),
        *("-vv", "-rfEs", "--durations=0", bound, file),
    ]
    environment = os.environ | {VARIABLE: str(ranks_per_gpu), "PYTHONUNBUFFERED": "1"}
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return process.returncode, [line for line in lines if line]


if __name__ == "__main__":
    sys.exit(main())
