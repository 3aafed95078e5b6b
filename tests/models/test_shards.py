"""Blocks that ranks keep for each other give the bits of resident ones (gfgen/models/streaming/shards.py)."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from test_streaming import JOB, deep, load, models_of, of_deep, result, wide  # noqa: F401

from gfgen.models.geometry.weights import Placement
from gfgen.models.streaming.shards import Shard, Sockets
from gfgen.models.streaming.stream import Chain, stream_of
from gfgen.runtime.ipc.channel import Channel
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.runtime.worker.entry import load_model

torch.set_num_threads(1)


def shared(placement: Placement) -> Placement:
    return Placement(placement.streamed, placement.num_buffers, shared=placement.streamed)


@pytest.fixture
def boards() -> Iterator[Sequence[Sockets]]:
    made = [Channel.pair() for _ in range(3)]
    yield made
    gc.collect()  # what tests have loaded takes its posts back
    for each in (end for pair in made for end in pair):
        each.close()


def load_rank(
    rank: int,
    checkpoint: Path,
    placement: Placement,
    boards: Sequence[Sockets],
    *,
    device: str = "cpu",
    **options: Any,
) -> Any:
    ranks = RankSettings(num_ranks=len(boards), placements={str(checkpoint): shared(placement)}, **options)
    settings = WorkerSettings(rank, (), ranks, boards={str(checkpoint): boards})
    return load_model(settings, str(checkpoint), device=device)


def chains(adapter: Any) -> Mapping[str, Chain]:
    found = {name: stream_of(model) for name, model in models_of(adapter).items()}
    return {name: chain for name, chain in found.items() if chain is not None}


def kept(chain: Chain) -> set[int]:
    return {idx for idx, block in enumerate(chain._blocks) if not block.is_read}


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_read_from_each_other_the_bits_of_the_resident_model(
    deep: Path,  # noqa: F811
    boards: Sequence[Sockets],
    num_ranks: int,
    num_buffers: int,
) -> None:
    boards = boards[:num_ranks]
    placement, options = of_deep(0, 1, 2, 3, 4, num_buffers=num_buffers), {"has_random_weights": True}
    wanted = result(load(deep, None, **options), JOB)
    adapters = [load_rank(rank, deep, placement, boards, **options) for rank in range(num_ranks)]
    for name in ("text_encoder", "transformer"):
        own = [kept(chains(each)[name]) for each in adapters]
        assert set.union(*own) == set(range(5)), "each block has its rank"
        assert sum(map(len, own)) == 5
    for adapter in adapters:
        for chain in chains(adapter).values():
            for block in chain._blocks:
                block.region.fill_(255)  # nobody reads the host copy
    for _ in range(2):
        assert all(torch.equal(result(each, JOB), wanted) for each in adapters)


def gpu_rank(
    rank: int, checkpoint: Path, placement: Placement, boards: Sequence[Sockets], pipe: Connection
) -> None:
    """A process with a GPU: makes pictures with the settings that it gets, until it gets None."""
    torch.cuda.set_device(rank)
    options: dict[str, Any] = {"device": f"cuda:{rank}", "has_random_weights": True}
    adapter = load_rank(rank, checkpoint, placement, boards, **options)
    torch.cuda.synchronize()
    pipe.send(torch.cuda.mem_get_info()[0])
    is_there = Shard._is_there
    while (asked := pipe.recv()) is not None:
        Shard._is_there = is_there if asked != "from a dead rank" else lambda shard: True  # type: ignore
        copies = [block.region for chain in chains(adapter).values() for block in chain._blocks]
        saved = [each.clone() for each in copies]
        for each in copies if asked != "from main memory" else ():
            each.fill_(255)
        pipe.send(result(adapter, JOB).cpu().numpy())
        torch.cuda.synchronize()
        for each, before in zip(copies, saved, strict=True):
            each.copy_(before)


@pytest.mark.gpu
def test_gpus_read_from_each_other_also_what_a_dead_rank_left(
    wide: Path,  # noqa: F811
    boards: Sequence[Sockets],
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    keys = {
        "transformer": frozenset(f"blocks.{idx}" for idx in range(8)),
        "text_encoder": frozenset(f"block.{idx}" for idx in range(8)),
    }
    spawn, pipes, processes = multiprocessing.get_context("spawn"), dict[int, Any](), dict[int, Any]()

    def start(rank: int) -> None:
        pipes[rank], theirs = spawn.Pipe()
        settings = rank, wide, Placement(keys, 2), boards[:2], theirs
        processes[rank] = spawn.Process(target=gpu_rank, args=settings, daemon=True)
        processes[rank].start()
        assert pipes[rank].poll(300)
        pipes[rank].recv()

    def picture(rank: int, how: str) -> torch.Tensor:
        pipes[rank].send(how)
        assert pipes[rank].poll(300)
        return torch.from_numpy(pipes[rank].recv())

    resident = load_model(
        WorkerSettings(0, (), RankSettings(num_ranks=1, has_random_weights=True)), str(wide), device="cuda:0"
    )
    wanted = result(resident, JOB).cpu()
    start(0)
    assert torch.equal(picture(0, "from main memory"), wanted), "the other is not there yet"
    start(1)
    for rank in (0, 1, 0, 1):
        assert torch.equal(picture(rank, "from the other"), wanted)
    processes[1].kill()
    processes[1].join()
    assert torch.equal(picture(0, "from a dead rank"), wanted), "its memory is still there"
    assert torch.equal(picture(0, "from main memory"), wanted)
    start(1)
    for rank in (0, 1):
        assert torch.equal(picture(rank, "from the other"), wanted)
    for rank in (0, 1):
        pipes[rank].send(None)
        processes[rank].join(60)
