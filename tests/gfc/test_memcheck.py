"""The collectives of two ranks on one GPU under compute-sanitizer, which finds what is read or written
outside of the memory that there is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_ranks import needs_a_gpu

PROGRAM = Path(__file__).parent / "cuda_one_process.py"
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0


@pytest.mark.gpu
@needs_a_gpu
def test_memcheck_finds_nothing_in_the_collectives_of_two_ranks_on_one_gpu() -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed (it comes with CUDA's toolkit)")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sanitizer, "--tool", "memcheck", "--kernel-name", "kernel_substring=gfc_", sys.executable, PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"PYTHONPATH": path},
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer refuses this device, as under gVisor")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-4000:]
