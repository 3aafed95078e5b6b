"""Exchanges through host memory: the kernel's source and groups of GPUs, on CPU processes (emulated.py)."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gfc_oracle as oracle
import pytest
import torch
from emulated import EmulatedEndpoint, build, use_emulated_launches
from gfc_fake import FakeCluster

from gfgen.errors import AbortedError, PeerTimeoutError
from gfgen.gfc.arena import Arena, ArenaPlan, create_arena
from gfgen.gfc.cuda.device_arena import arena_bytes
from gfgen.gfc.cuda.device_group import CudaGroup
from gfgen.gfc.cuda.measure import all_to_all
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.shared_attention import shared_attention

PLAN = ArenaPlan(data_bytes=1 << 16, post_bytes=1 << 10)
_FORK = multiprocessing.get_context("fork")
LIMIT_S = 120
PAIRS = ((0, 1), (2, 3))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(autouse=True)
def emulated_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulated_launches(monkeypatch)


def on_ranks(
    library: Path,
    num_ranks: int,
    program: Callable[[EmulatedEndpoint], Any],
    *,
    slice_bytes: int = 256,
    near: Sequence[Sequence[int]] = (),
) -> list[Any]:
    """What the program returns on each rank, or raises."""
    size = arena_bytes(PLAN)

    def arenas() -> dict[int, int]:
        return {
            rank: create_arena(PLAN, rank=rank, incarnation=1, num_bytes=size) for rank in range(num_ranks)
        }

    fds, near_fds = arenas(), arenas()

    def serve(rank: int, pipe: Any) -> None:
        torch.set_num_threads(1)
        try:
            beside = next((each for each in near if rank in each), ())
            endpoint = EmulatedEndpoint(
                library, PLAN, rank=rank, fds=fds, slice_bytes=slice_bytes, near=beside, near_fds=near_fds
            )
            pipe.send(program(endpoint))
        except Exception as error:
            pipe.send(error if isinstance(error, AbortedError | PeerTimeoutError) else traceback.format_exc())
        os._exit(0)

    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=serve, args=(rank, theirs), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(LIMIT_S), f"rank {rank} hangs"
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for fd in (*fds.values(), *near_fds.values()):
            os.close(fd)


def entered(endpoint: EmulatedEndpoint, dispatch: int, layout: Layout) -> CudaGroup:
    group = endpoint.group(Descriptor(dispatch, layout, (1,) * layout.degree))
    group.enter()
    return group


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("slice_bytes", [256, 1 << 16])
def test_over_a_limited_link_the_same_bytes_arrive_no_sooner_than_it_allows(
    library: Path, slice_bytes: int
) -> None:
    def program(endpoint: EmulatedEndpoint) -> tuple[bool, float]:
        endpoint._context.link_mb_per_s = 1
        group = entered(endpoint, 1, Layout((0, 1), torus=2))
        given = [tensor((8192,), torch.int16, slot) for slot in (0, 1)]
        began_s = time.monotonic()
        found = all_to_all(group, given[group.slot])
        took_s = time.monotonic() - began_s
        return torch.equal(found, torch.cat([x.view(2, -1)[group.slot] for x in given])), took_s

    for is_right, took_s in on_ranks(library, 2, program, slice_bytes=slice_bytes):
        assert is_right
        assert took_s >= 8192 / 1e6


@pytest.mark.parametrize("slice_bytes", [16, 256, 1 << 16])
@pytest.mark.parametrize("size", [2, 3])
def test_every_byte_arrives_whatever_the_sizes_and_strides(
    library: Path, size: int, slice_bytes: int
) -> None:
    def program(endpoint: EmulatedEndpoint) -> list[str]:
        wrong = []
        shapes = [
            (7, 5, 8, torch.bfloat16),
            (3, 4, 3, torch.uint8),
            (1, 3, 16, torch.float32),  # some ranks have no token
            (200, 9, 16, torch.bfloat16),  # more than a bank: in rounds
        ]
        for number, (tokens, heads, dim, dtype) in enumerate(shapes if slice_bytes > 16 else shapes[:3]):
            group = entered(endpoint, number + 1, Layout(tuple(range(size)), ulysses=size))
            by_token, by_head = shard_sizes(tokens, size), shard_sizes(heads, size)
            inputs = [
                [
                    tensor((2, length, heads, dim), dtype, 10 * part + slot)
                    for slot, length in enumerate(by_token)
                ]
                for part in range(3)
            ]
            own = [part[group.slot] for part in inputs]
            own[1] = own[1].transpose(1, 2).contiguous().transpose(1, 2)
            found = group.heads_from_tokens(*own, token_sizes=by_token, head_sizes=by_head, in_arena=True)
            wanted = [oracle.heads_from_tokens(part, head_sizes=by_head)[group.slot] for part in inputs]
            wrong += [f"{number} in" for a, b in zip(found, wanted, strict=True) if not torch.equal(a, b)]
            group.barrier()
            back = group.tokens_from_heads(found[1], token_sizes=by_token, head_sizes=by_head)
            wrong += [] if torch.equal(back, own[1]) else [f"{number} back"]
            (rotated,) = group.gather_tokens(own[0], token_sizes=by_token)
            wrong += [] if torch.equal(rotated, oracle.gather_tokens(inputs[0])[group.slot]) else ["rotated"]
        group = entered(endpoint, 9, Layout(tuple(range(size)), torus=size))
        given = [tensor((size * 700,), torch.int16, slot) for slot in range(size)]
        found = all_to_all(group, given[group.slot], in_arena=True)
        parts = [x.view(size, -1)[group.slot] for x in given]
        wrong += [] if torch.equal(found, torch.cat(parts)) else ["all to all"]
        gathered = group.all_gather(given[group.slot])
        return wrong + ([] if torch.equal(gathered, torch.cat(given)) else ["all gather"])

    assert on_ranks(library, size, program, slice_bytes=slice_bytes) == [[]] * size


@pytest.mark.parametrize(
    ("degrees", "near"),
    [((1, 1, 1, 2), ()), ((1, 1, 2, 2), ()), ((1, 2, 1, 2), ()), ((1, 2, 1, 2), PAIRS)],
    ids=str,
)
def test_a_torus_gives_the_same_bits_over_any_memory(
    library: Path, degrees: tuple[int, ...], near: Sequence[Sequence[int]]
) -> None:
    layout = Layout(tuple(reversed(range(2 * degrees[1] * degrees[2]))), *degrees)

    def attended(group: Any) -> torch.Tensor:
        torch.set_num_threads(1)
        noise = torch.Generator().manual_seed(7)
        sizes = shard_sizes(57, layout.degree)
        own = [torch.randn(1, 57, 5, 16, generator=noise).split(sizes, 1)[group.slot] for _ in range(3)]
        return shared_attention(
            own[0], own[1], own[2], None, parallel=parallel_from(group), token_sizes=sizes, attend=_never
        )

    def program(endpoint: EmulatedEndpoint) -> list[float]:
        return attended(entered(endpoint, 1, layout)).tolist()  # type: ignore[no-any-return]

    found = on_ranks(library, layout.degree, program, near=near)
    wanted = FakeCluster().run(layout, attended)
    for rank, result in enumerate(found):
        assert result == wanted[layout.slot_of(rank)].tolist()


def _never(*_: object) -> torch.Tensor:
    raise AssertionError


def test_random_layouts_over_pairs_and_across_them_end_with_the_right_bytes(library: Path) -> None:
    """Overlapping groups, with peer memory inside pairs and main memory between them, also in one group."""
    groups = [(0, 1, 2, 3), (2, 3, 1, 0), (1, 2), (0, 1), (3, 0, 2)]
    noise = random.Random(21)
    layouts = []
    for _ in range(16):
        ranks = noise.choice(groups)
        ulysses = noise.choice([each for each in (1, 2, 3, 4) if len(ranks) % each == 0])
        layouts.append(Layout(ranks, ulysses=ulysses, torus=len(ranks) // ulysses))

    def program(endpoint: EmulatedEndpoint) -> list[str]:
        wrong = []
        for number, layout in enumerate(layouts, 1):
            if endpoint.rank not in layout.ranks:
                continue
            whole = entered(endpoint, number, layout)
            for turn, kind in enumerate(("ulysses", "torus", "whole", "ulysses")):
                group = whole.subgroup(kind)
                assert group.is_far is (group.size > 1 and set(group.ranks) not in map(set, PAIRS))
                size = (8, 800, 5)[(number + turn) % 3]
                given = [tensor((size,), torch.int64, 100 * number + rank) for rank in group.ranks]
                found = group.all_gather(given[group.slot], in_arena=turn % 2 == 0)
                if not torch.equal(found, torch.cat(given)):
                    wrong.append(f"{number} {kind} {layout}")
                group.barrier()
            endpoint.check(number)
        return wrong

    assert on_ranks(library, 4, program, near=PAIRS) == [[]] * 4


def test_transfers_arrive_inside_a_pair_and_across_pairs(library: Path) -> None:
    sizes = (1, 700, 5 * PLAN.post_bytes + 3)
    routes = [(0, 1), (0, 2), (2, 1), (1, 0), (2, 0)]

    def program(endpoint: EmulatedEndpoint) -> list[tuple[int, int, int]]:
        wrong = []
        for number, (source, target) in enumerate(routes, 1):
            for size in sizes:
                x, own = tensor((size,), torch.uint8, number + size), endpoint.rank
                if own == source:
                    endpoint.move(x, target, number, is_sender=True)
                elif own == target:
                    endpoint.move(got := torch.zeros_like(x), source, number, is_sender=False)
                    wrong += [] if torch.equal(got, x) else [(source, target, size)]
        return wrong

    assert on_ranks(library, 3, program, near=PAIRS) == [[]] * 3


@pytest.mark.parametrize("near", [(), PAIRS], ids=["apart", "pairs"])
def test_a_rank_killed_in_an_exchange_across_pairs_is_named(
    library: Path, near: Sequence[Sequence[int]]
) -> None:
    layout = Layout((0, 1, 2, 3), ulysses=2, torus=2)

    def program(endpoint: EmulatedEndpoint) -> None:
        group = endpoint.group(Descriptor(1, layout, (1,) * 4), timeout_s=0.5)
        group.enter()
        group.subgroup("ulysses").barrier()
        if endpoint.rank != 2:  # which is gone
            group.subgroup("torus").all_gather(torch.ones(999))
        endpoint.check(1)

    errors = on_ranks(library, 4, program, near=near)
    assert isinstance(errors[0], PeerTimeoutError)
    assert "exchange of rank 2" in str(errors[0])
    assert errors[1:] == [None, None, None]


def test_a_wait_for_a_rank_that_is_gone_ends(library: Path) -> None:
    layout = Layout((0, 1), torus=2)

    def program(endpoint: EmulatedEndpoint) -> None:
        group = endpoint.group(Descriptor(1, layout, (1, 1)), timeout_s=0.3)
        group.enter()
        if endpoint.rank == 1:
            return
        group.barrier()
        endpoint.check(1)

    error, _ = on_ranks(library, 2, program)
    assert isinstance(error, PeerTimeoutError)
    assert "exchange of rank 1" in str(error)


def test_a_wait_ends_when_the_host_aborts_the_dispatch(library: Path) -> None:
    layout = Layout((0, 1), torus=2)

    def program(endpoint: EmulatedEndpoint) -> None:
        group = entered(endpoint, 1, layout)
        if endpoint.rank == 1:
            peer = Arena.__new__(Arena)
            peer.address = endpoint._context.base[0]
            peer.abort_through(1)
            return
        group.barrier()
        endpoint.check(1)

    error, _ = on_ranks(library, 2, program)
    assert isinstance(error, AbortedError)


def test_a_kernel_that_takes_slices_before_they_have_come_is_found(tmp_path: Path) -> None:
    """Else these tests would show nothing."""
    planted = build(
        tmp_path, fault=("has_arrived = is_pusher || take_slice", "has_arrived = true || take_slice")
    )
    layout = Layout((0, 1), torus=2)

    def program(endpoint: EmulatedEndpoint) -> bool:
        group = entered(endpoint, 1, layout)
        if endpoint.rank == 1:
            time.sleep(0.5)
        x = torch.arange(1, 4001, dtype=torch.int16)
        return torch.equal(group.all_gather(x), torch.cat((x, x)))

    assert on_ranks(planted, 2, program)[0] is False
