"""Recorded forwards on real GPUs: the bits of those that are launched one by one, on any ranks, in any slot.

pytest tests/models/test_forwards_on_gpus.py            # needs two ranks, better four (gpu_ranks.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import cuda_forwards
import pytest
from gpu_ranks import NUM_GPUS, NUM_RANKS, needs_two_ranks, ordered_subsets
from small_checkpoints import save_checkpoint

from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.layout import Layout

pytestmark = [pytest.mark.gpu, needs_two_ranks]


@pytest.fixture(scope="module")
def ranks() -> Iterator[CudaRanks]:
    plan = ArenaPlan(data_bytes=96 << 20, post_bytes=1 << 20)
    started = CudaRanks(NUM_RANKS, plan, timeout_s=20, num_devices=NUM_GPUS)
    yield started
    started.close()


def layouts() -> list[Layout]:
    """Every rank in every slot; even and uneven shards, heads and keys shared, halves."""
    found = [Layout((rank,)) for rank in range(NUM_RANKS)]
    for pair in ordered_subsets(2):
        found += [Layout(pair, ulysses=2), Layout(pair, cfg=2)]
    for size in range(3, NUM_RANKS + 1):
        orders = [tuple((first + idx) % NUM_RANKS for idx in range(size)) for first in range(NUM_RANKS)]
        found += [Layout(order, ulysses=size) for order in orders]
        if size == 4:
            found += [Layout(order, cfg=2, ulysses=2) for order in orders]
            found += [Layout(order, ulysses=2, ring=2) for order in orders]
    return found


@pytest.mark.parametrize("name", cuda_forwards.JOBS)
def test_records_give_the_bits_of_launches_and_nothing_waits(
    ranks: CudaRanks, name: str, picture: Path, tmp_path: Path
) -> None:
    cases = layouts() if name in ("wan", "qwen") else layouts()[::3]  # the others are variations
    checkpoint = ""
    if (job := cuda_forwards.JOBS[name]).is_pipeline:
        checkpoint = str(save_checkpoint(job.model, tmp_path))
        cases = [each for each in layouts() if each.ulysses <= 2]  # they have two heads
        if name == "sdxl":  # ranks do not share steps with a UNet
            cases = [each for each in cases if each.degree == 1]
    first = ranks.next_dispatch(cuda_forwards.PASSES * len(cases) * cuda_forwards.STEPS)
    arguments = (name, str(picture), checkpoint, cases, first)
    for found in ranks.run(range(NUM_RANKS), cuda_forwards.compare, *arguments):
        assert found["different"] == 0, found
        assert found["replays"] >= found["steps"], found
        assert found["records"] > 0


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("in_batch", [False, True])
def test_new_texts_are_recorded_at_once_and_give_the_bits_of_launches(
    ranks: CudaRanks, in_batch: bool, is_padded: bool
) -> None:
    cases = [Layout((rank,)) for rank in range(NUM_RANKS)]
    cases += [Layout(pair, ulysses=2) for pair in ordered_subsets(2)]
    first = ranks.next_dispatch(2 * len(cuda_forwards.TEXTS) * len(cases))
    arguments = (cases, first, in_batch, is_padded)
    for found in ranks.run(range(NUM_RANKS), cuda_forwards.record_new_texts, *arguments):
        assert found["different"] == 0, found
        assert found["replays"] == (1 if in_batch else 2) * found["steps"] > 0, found


@pytest.mark.parametrize("in_batch", [False, True])
def test_one_record_serves_texts_of_all_lengths(ranks: CudaRanks, in_batch: bool) -> None:
    if find_spec("cudnn") is None:
        pytest.skip("needs nvidia-cudnn-frontend")
    first = ranks.next_dispatch(2 * len(cuda_forwards.TEXTS))
    (found,) = ranks.run([0], cuda_forwards.record_new_texts, [Layout((0,))], first, in_batch, True)
    assert (found["different"], found["records"]) == (0, 1), found


def test_what_cannot_be_recorded_is_in_the_way_of_nothing_else(ranks: CudaRanks) -> None:
    ranks.run([0], cuda_forwards.record_after_failures)
