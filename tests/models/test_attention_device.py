"""Shared attention on real GPUs: against float64, eager, in chunks, and in graphs on every ordered subset.

pytest tests/models/test_attention_device.py            # needs two ranks, better four (gpu_ranks.py)
"""

from __future__ import annotations

from collections.abc import Iterator

import cuda_attention
import pytest
from gpu_ranks import NUM_GPUS, NUM_RANKS, needs_two_ranks, ordered_subsets

from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.rank_processes import CudaRanks

SMALL, LARGE = (
    ArenaPlan(data_bytes=3 << 20, post_bytes=1 << 20),
    ArenaPlan(data_bytes=96 << 20, post_bytes=1 << 20),
)
DEGREES = [
    degrees
    for degrees in [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2)]
    if degrees[0] * degrees[1] <= NUM_RANKS
]
LIMIT = 2.5
"""Times the error of one GPU: parts of a ring are rounded to 16 bits before they are merged."""

pytestmark = [pytest.mark.gpu, needs_two_ranks]


@pytest.fixture(scope="module", params=[LARGE, SMALL], ids=["large arena", "small arena"])
def ranks(request: pytest.FixtureRequest) -> Iterator[CudaRanks]:
    started = CudaRanks(NUM_RANKS, request.param, timeout_s=10, num_devices=NUM_GPUS)
    yield started
    started.close()


def attend(
    ranks: CudaRanks,
    degrees: tuple[int, int],
    *,
    tokens: int,
    num_chunks: int | None = None,
    is_masked: bool = False,
    is_captured: bool = False,
) -> None:
    size = degrees[0] * degrees[1]
    groups = ordered_subsets(size)
    prepared = [tuple(range(start, start + size)) for start in range(NUM_RANKS - size + 1)]
    prepared = prepared if is_captured else []
    members = [*prepared, *groups]
    first = ranks.next_dispatch(len(members))
    dispatches = [(group, first + idx) for idx, group in enumerate(members)]
    found = ranks.run(
        range(NUM_RANKS),
        cuda_attention.attend,
        degrees,
        dispatches,
        len(prepared),
        tokens,
        num_chunks,
        is_masked,
    )
    assert sum(count for _, count in found) == len(groups) * size * (2 if is_captured else 3)
    assert max(error for error, _ in found) < LIMIT


@pytest.mark.parametrize("num_chunks", [None, 3])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_uneven_shards_lose_no_more_than_rounding(
    ranks: CudaRanks, degrees: tuple[int, int], num_chunks: int | None
) -> None:
    attend(ranks, degrees, tokens=1003, num_chunks=num_chunks)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_masked_keys_are_not_attended_to(ranks: CudaRanks, degrees: tuple[int, int]) -> None:
    attend(ranks, degrees, tokens=1003, is_masked=True)


@pytest.mark.parametrize("num_chunks", [None, 2])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_one_capture_serves_every_ordered_subset(
    ranks: CudaRanks, degrees: tuple[int, int], num_chunks: int | None
) -> None:
    attend(ranks, degrees, tokens=1008, num_chunks=num_chunks, is_captured=True)
