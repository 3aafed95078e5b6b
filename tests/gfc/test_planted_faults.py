"""Faults that are planted into the collectives are found, also by ranks that share a GPU.

pytest tests/gfc/test_planted_faults.py            # needs two ranks (gpu_ranks.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

import cuda_programs as programs
import planted
import pytest
from gpu_ranks import NUM_GPUS, needs_two_ranks

from gfgen.errors import WorkerError
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.rank_processes import CudaRanks

PLAN = ArenaPlan(data_bytes=64 << 20, post_bytes=4 << 20)
TIMEOUT_S = 2.0
NUM_DISPATCHES = 200
STUCK_S = 40.0
"""Entry barriers wait until they are aborted; the ranks of a test need a few seconds."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.write_sources(tmp_path_factory.mktemp("planted"))


@pytest.fixture
def start(sources: Path) -> Iterator[Callable[[int], CudaRanks]]:
    started: list[CudaRanks] = []

    def start_with(fault: int) -> CudaRanks:
        ranks = CudaRanks(2, PLAN, timeout_s=TIMEOUT_S, num_devices=min(2, NUM_GPUS))
        started.append(ranks)
        ranks.run((0, 1), planted.plant, sources, fault)
        return ranks

    yield start_with
    for ranks in started:
        for rank, process in ranks.processes.items():
            if process.is_alive():
                ranks.kill(rank)
        ranks.close()


def found_by_random_groups(ranks: CudaRanks) -> list[str]:
    """What both ranks say of random exchanges, each checked on the device."""
    first = ranks.next_dispatch(NUM_DISPATCHES)
    for rank in (0, 1):
        ranks.submit(rank, programs.stress, 2, 7, NUM_DISPATCHES, first)
    return found_wrong(ranks, lambda result: result["errors"])


def found_by_transfers(ranks: CudaRanks) -> list[str]:
    """The receiver comes first."""
    dispatch, sizes = ranks.next_dispatch(), [100, 16384, (3 << 20) + 1]
    ranks.submit(1, programs.transfers, 0, False, dispatch, sizes)
    time.sleep(1)
    ranks.submit(0, programs.transfers, 1, True, dispatch, sizes)
    return found_wrong(ranks, int)


def found_wrong(ranks: CudaRanks, count: Callable[..., int]) -> list[str]:
    """What went wrong in the programs that both ranks run; if one fails or hangs, the other is aborted."""
    found: list[str] = []
    running: dict[object, int] = {ranks.pipes[rank]: rank for rank in (0, 1)}
    while running:
        ready = wait([ranks.pipes[rank] for rank in running.values()], STUCK_S)
        if not ready:
            assert not found, f"{found}, and then ranks do not answer"
            found.append("ranks hang")
        for pipe in ready:
            rank = running.pop(pipe)
            try:
                if wrong := count(ranks.result(rank)):
                    found.append(f"rank {rank}: {wrong} items are wrong")
            except WorkerError as error:
                found.append(f"rank {rank}: {str(error).strip().splitlines()[-1]}")
        for rank in running.values() if found else ():
            ranks.abort(rank, 1 << 40)
    return found


@pytest.mark.gpu
@needs_two_ranks
def test_kernels_that_faults_can_be_planted_in_have_none_of_their_own(
    start: Callable[[int], CudaRanks],
) -> None:
    ranks = start(planted.NOTHING)
    assert found_by_random_groups(ranks) == []
    assert found_by_transfers(ranks) == []
    assert programs.transfer_after_death(ranks) == [0, 0]


@pytest.mark.gpu
@needs_two_ranks
@pytest.mark.parametrize(
    ("fault", "find"),
    [
        pytest.param(planted.NO_BARRIER, found_by_random_groups, id="an entry barrier is missing"),
        pytest.param(planted.ONE_BANK, found_by_random_groups, id="one bank too few"),
        pytest.param(planted.COPY_AT_ONCE, found_by_random_groups, id="an exchange copies too early"),
        pytest.param(planted.RECEIVE_AT_ONCE, found_by_transfers, id="a transfer copies too early"),
    ],
)
def test_a_planted_fault_is_found(
    start: Callable[[int], CudaRanks], fault: int, find: Callable[[CudaRanks], list[str]]
) -> None:
    found = find(start(fault))
    assert found
    print(found)  # pytest -rP shows it


@pytest.mark.gpu
@needs_two_ranks
def test_edges_that_are_kept_when_a_rank_is_replaced_are_found(start: Callable[[int], CudaRanks]) -> None:
    ranks = start(planted.EDGE_KEPT)
    with pytest.raises(WorkerError, match=r"PeerTimeoutError|ProtocolError|AbortedError"):
        programs.transfer_after_death(ranks)


def test_faults_can_be_planted_in_the_kernels_as_they_are(sources: Path) -> None:
    assert (sources / "cuda" / "kernels.cu").read_text().count("gfc_fault") == len(planted.CHANGES)
