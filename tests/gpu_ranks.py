"""The ranks that tests on GPUs use, and how many of them share a GPU.

GFGEN_TEST_RANKS_PER_GPU=2 pytest -m gpu     # tests of several ranks on a machine with one GPU
"""

from __future__ import annotations

import itertools
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


def ordered_subsets(size: int) -> list[tuple[int, ...]]:
    """All ordered subsets of the ranks.

    Where more than two ranks share a GPU, an exchange takes 7 ms: only rotations, each rank in each slot.
    """
    if RANKS_PER_GPU > 2:
        return [tuple((first + idx) % NUM_RANKS for idx in range(size)) for first in range(NUM_RANKS)]
    return list(itertools.permutations(range(NUM_RANKS), size))
