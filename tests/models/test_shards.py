"""Blocks that ranks keep for each other give the bits of resident ones (gfgen/models/streaming/shards.py)."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from test_streaming import JOB, deep, models_of, of_deep, of_resident, result, wide  # noqa: F401

from gfgen.models.geometry.weights import Placement
from gfgen.models.streaming import shards
from gfgen.models.streaming.shards import Board, Shard
from gfgen.models.streaming.stream import Chain, stream_of
from gfgen.runtime.ipc.messages import Channel
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.runtime.worker.entry import load_model

torch.set_num_threads(1)


def shared(placement: Placement) -> Placement:
    return replace(placement, shared=placement.streamed)


@pytest.fixture
def boards() -> Iterator[Sequence[Board]]:
    made = [Channel.pair() for _ in range(3)]
    yield made
    gc.collect()  # what tests have loaded takes its posts back
    for each in (end for pair in made for end in pair):
        each.close()


def load_rank(
    rank: int,
    checkpoint: Path,
    placement: Placement,
    boards: Sequence[Board],
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


@pytest.mark.parametrize(("num_ranks", "num_buffers"), [(2, 1), (3, 2), (2, 3)])
def test_ranks_read_from_each_other_the_bits_of_the_resident_model(
    deep: Path,  # noqa: F811
    of_resident: torch.Tensor,  # noqa: F811
    boards: Sequence[Board],
    num_ranks: int,
    num_buffers: int,
) -> None:
    boards = boards[:num_ranks]
    placement, options = of_deep(0, 1, 2, 3, 4, num_buffers=num_buffers), {"has_random_weights": True}
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
        assert all(torch.equal(result(each, JOB), of_resident) for each in adapters)


def gpu_rank(
    rank: int, checkpoint: Path, placement: Placement, boards: Sequence[Board], pipe: Connection
) -> None:
    """A process with a GPU: makes pictures with the settings that it gets, until it gets None."""
    torch.cuda.set_device(rank)
    options: dict[str, Any] = {"device": f"cuda:{rank}", "has_random_weights": True}
    adapter = load_rank(rank, checkpoint, placement, boards, **options)
    torch.cuda.synchronize()
    pipe.send(torch.cuda.mem_get_info()[0])
    present = Shard._present
    while (asked := pipe.recv()) is not None:
        is_dead = asked == "from a dead rank"
        Shard._present = (lambda shard: shard._memory) if is_dead else present  # type: ignore[method-assign]
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
    boards: Sequence[Board],
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


@pytest.mark.parametrize(
    ("moment", "is_on_disk"),
    [
        ("before its post", True),
        ("before a read", False),
        ("within a read", False),
        ("within a read", True),
        ("after a read", False),
    ],
)
def test_a_rank_that_dies_at_any_moment_of_a_read_changes_no_bits(
    deep: Path,  # noqa: F811
    of_resident: torch.Tensor,  # noqa: F811
    boards: Sequence[Board],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    is_on_disk: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"has_random_weights": True}
    placement = replace(of_deep(0, 1, 2, 3, 4), is_on_disk=is_on_disk, streamed_bytes=1 << 20)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def other() -> None:
        if moment == "before its post":
            monkeypatch.setattr(socket, "send_fds", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        adapter = load_rank(1, deep, placement, boards[:2], **options)
        theirs.send("posted")
        theirs.recv()
        del adapter

    process = fork.Process(target=other, daemon=True)
    process.start()
    theirs.close()
    reads = list[str]()
    present, copy = Shard._present, shards._InMemory.copy

    def kill() -> None:
        process.kill()
        process.join()

    def seen(shard: Shard) -> Any:
        if moment == "before a read" and len(reads) == 3:
            kill()
        reads.append("asked")
        return present(shard)

    def copied(memory: Any, offset: int, into: torch.Tensor) -> None:
        if moment == "within a read":  # between the look and the copy
            kill()
        copy(memory, offset, into)
        if moment == "after a read":
            kill()

    monkeypatch.setattr(Shard, "_present", seen)
    monkeypatch.setattr(shards._InMemory, "copy", copied)
    if moment == "before its post":
        process.join()
    else:
        assert ours.recv() == "posted"
    adapter = load_rank(0, deep, placement, boards[:2], **options)
    assert torch.equal(result(adapter, JOB), of_resident)
    assert not process.is_alive()
    assert ("are read from main memory" in caplog.text) == (moment != "before its post")
    if moment != "before its post":
        monkeypatch.setattr(shards, "_created", lambda *_: pytest.fail("it takes what is there"))
    successor = load_rank(1, deep, placement, boards[:2], **options)
    for chain in (*chains(adapter).values(), *chains(successor).values()):
        for block in chain._blocks:
            block.region.fill_(255)
    monkeypatch.setattr(Shard, "_present", present)
    monkeypatch.setattr(shards._InMemory, "copy", copy)
    for buffer in {block.buffer for chain in chains(adapter).values() for block in chain._read_blocks}:
        buffer.holds = None
    assert torch.equal(result(adapter, JOB), of_resident), "the successor's blocks are read again"
    assert torch.equal(result(successor, JOB), of_resident)


def test_a_model_that_goes_takes_its_shard_back(
    deep: Path,  # noqa: F811
    boards: Sequence[Board],
) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    placement, options = of_deep(0, 1, 2, 3, 4), {"has_random_weights": True}
    adapters = [load_rank(rank, deep, placement, boards, **options) for rank in range(3)]
    for adapter in adapters:
        result(adapter, JOB)
    del adapter, adapters
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    for _, reader in boards:
        with pytest.raises(BlockingIOError):
            reader.recv(1, socket.MSG_DONTWAIT)
