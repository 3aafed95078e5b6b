"""Both branches of guidance on real GPUs, in turn, in one forward, on halves: as near to fp32 as diffusers.

pytest tests/models/test_branches_on_gpus.py            # needs one rank, better four (gpu_ranks.py)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import cuda_branches
import pytest
from gpu_ranks import NUM_GPUS, NUM_RANKS, needs_a_gpu

from benchmarks.forward import QWEN, WAN
from benchmarks.measure_forward import ForwardShape
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.layout import Layout

SHAPES = (
    ForwardShape(WAN, 832, 480, 17),
    ForwardShape(WAN, 832, 480, 17, has_image=True),
    ForwardShape(QWEN, 512, 512, 1),
)
LIMIT = 1.2
"""Times the distance of diffusers in bf16: parts of a ring are rounded once more."""

pytestmark = [pytest.mark.gpu, needs_a_gpu]


@pytest.fixture(scope="module")
def ranks() -> Iterator[CudaRanks]:
    plan = ArenaPlan(data_bytes=512 << 20, post_bytes=1 << 20)
    started = CudaRanks(NUM_RANKS, plan, timeout_s=60, num_devices=NUM_GPUS)
    yield started
    started.close()


def layouts() -> list[Layout]:
    """Even and uneven shards, heads and keys shared, halves."""
    found = [Layout((rank,)) for rank in range(NUM_RANKS)]
    for pair in itertools.combinations(range(NUM_RANKS), 2):
        found += [Layout(pair, ulysses=2), Layout(pair, ring=2), Layout(pair, cfg=2)]
    if NUM_RANKS >= 3:
        found.append(Layout((2, 0, 1), ulysses=3))
    if NUM_RANKS >= 4:
        degrees = [{"ulysses": 4}, {"ulysses": 2, "ring": 2}, {"cfg": 2, "ulysses": 2}]
        found += [Layout((3, 1, 0, 2), **each) for each in degrees]
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_way_is_as_near_to_fp32_as_diffusers(
    ranks: CudaRanks, shape: ForwardShape, tmp_path: Path
) -> None:
    checkpoint = cuda_branches.few_layers(shape.model, tmp_path)
    cases = layouts()
    first = ranks.next_dispatch(len(cases) * cuda_branches.MEETINGS)
    results = ranks.run(range(NUM_RANKS), cuda_branches.compare, checkpoint, shape, cases, first)
    for found in results:
        assert max(found.values()) < LIMIT, found
