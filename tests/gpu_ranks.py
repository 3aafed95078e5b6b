"""The ranks that tests on GPUs use, and how many of them share a GPU.

GFGEN_TEST_RANKS_PER_GPU=2 pytest -m gpu     # tests of several ranks on a machine with one GPU
"""

from __future__ import annotations

import os

import pytest

from gfgen.runtime.core.devices import find_gpus

VARIABLE = "GFGEN_TEST_RANKS_PER_GPU"
RANKS_PER_GPU = int(os.environ.get(VARIABLE, "1"))
NUM_RANKS = min(4, RANKS_PER_GPU * len(find_gpus()))
NUM_GPUS = -(-NUM_RANKS // RANKS_PER_GPU)
"""Those that these ranks use; rank r uses GPU r modulo this number."""

needs_a_gpu = pytest.mark.skipif(NUM_RANKS < 1, reason="needs an NVIDIA GPU")
needs_two_ranks = pytest.mark.skipif(
    NUM_RANKS < 2, reason=f"needs two NVIDIA GPUs of one machine, or one and {VARIABLE}=2"
)
