"""Who makes arenas, and who is given which."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.forward import SHAPES
from benchmarks.measure_forward import ForwardShape
from gfgen.gfc.arena import CONTROL_PLAN, Arena, ArenaPlan
from gfgen.gfc.cuda.device_arena import arena_bytes
from gfgen.gfc.cuda.device_group import bank_of, canonical
from gfgen.gfc.descriptor import GROUP_KINDS
from gfgen.gfc.reshard import shard_sizes
from gfgen.job.spec import JobSpec
from gfgen.layout import Degrees, Layout, with_torus
from gfgen.models.geometry.model import shipped_geometry
from gfgen.models.parallel.shared_attention import TokenSizes, _num_chunks
from gfgen.runtime.ipc.settings import GPU_PLAN, HOST_PLAN, RankArenas, RankSettings, default_plan

PLAN = ArenaPlan(data_bytes=1 << 16, post_bytes=1 << 10)
MAX_OUTPUT_CHANNELS = 192
"""Of a token, as it is gathered at the end of a forward: Wan2.2-5B's patches of 2 x 2 x 48."""


@pytest.fixture
def on_gpus() -> Iterator[RankArenas]:
    arenas = RankArenas(RankSettings(num_ranks=3, device="cuda", plan=PLAN))
    yield arenas
    arenas.close()


def a_descriptor() -> int:
    return os.memfd_create("arena of a GPU")


def test_arenas_of_cpu_ranks_are_there_from_the_start():
    arenas = RankArenas(RankSettings(num_ranks=2, plan=PLAN))
    ranks, fds = arenas.known_to(0, among=range(2))
    assert ranks == (0, 1)
    for rank, fd in enumerate(fds):
        Arena(fd, PLAN, rank=rank, incarnation=1).close()
    arenas.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])


def test_ranks_have_large_arenas_if_gpus_exchange():
    for num_ranks, device, over_host, plan in (
        (2, "cpu", False, ArenaPlan()),
        (1, "cuda", False, ArenaPlan()),
        (2, "cuda", False, GPU_PLAN),
        (2, "cuda", True, HOST_PLAN),
    ):
        near = [[rank] for rank in range(num_ranks)] if over_host else None
        ranks = RankSettings(num_ranks=num_ranks, device=device, near=near)
        assert ranks.arena_plan == plan
        assert ranks.gpu_arena_bytes == (0 if over_host else arena_bytes(plan))
        assert default_plan(num_ranks=num_ranks, are_on_gpus=ranks.are_on_gpus, over_host=over_host) == plan
    assert RankSettings(num_ranks=2, plan=PLAN).arena_plan == PLAN


def test_ranks_have_the_weights_of_their_models_and_run_no_code_of_theirs():
    assert not RankSettings(num_ranks=1).trusts_code
    assert RankSettings(num_ranks=1).computed_with == {
        "device": "cpu",
        "vae_dtype": "auto",
        "has_random_weights": False,
    }


def test_arenas_of_gpus_in_main_memory_are_made_here_with_room_for_flags():
    arenas = RankArenas(RankSettings(num_ranks=2, device="cuda", near=((0,), (1,)), plan=PLAN))
    ranks, fds = arenas.known_to(0, among=(0, 1))
    assert ranks == (0, 1)
    assert [os.fstat(fd).st_size for fd in fds[:-1]] == [arena_bytes(PLAN)] * 2
    Arena(fds[0], PLAN, rank=0, incarnation=1).close()
    arenas.take(0, ())
    arenas.renew(1, incarnation=2)
    arena = arenas.arena(1, source=0)
    assert arena is not None
    Arena(arena, PLAN, rank=1, incarnation=2).close()
    arenas.close()


def test_a_rank_has_an_arena_on_its_gpu_for_its_pair_and_one_in_main_memory_for_others():
    settings = RankSettings(num_ranks=5, device="cuda", near=((0, 1), (2, 3), (4,)))
    assert (settings.arena_plan, settings.gpu_arena_bytes) == (HOST_PLAN, arena_bytes(HOST_PLAN))
    arenas = RankArenas(replace(settings, plan=PLAN))
    brought = {rank: a_descriptor() for rank in range(4)}
    for rank in range(5):
        arenas.take(rank, [brought[rank]] if rank in brought else [])
    made = dict(zip(*arenas.known_to(4, among=range(5)), strict=False))
    assert made.keys() == set(range(5))
    assert not set(made.values()) & set(brought.values())
    for rank, pair in ((0, 1), (1, 0), (2, 3), (3, 2)):
        ranks, fds = arenas.known_to(rank, among=range(5))
        wanted = {**made, pair: brought[pair]}
        assert (ranks, fds[:-1]) == (tuple(range(5)), tuple(wanted.values()))
        assert arenas.arena(rank, source=pair) == brought[rank]
        assert arenas.arena(rank, source=4) == made[rank]
    arenas.close()


def test_a_rank_on_a_gpu_brings_its_own_arena(on_gpus: RankArenas):
    assert on_gpus.arena(1, source=0) is None
    fd = a_descriptor()
    on_gpus.take(1, [fd])
    assert on_gpus.arena(1, source=0) == fd


def test_a_rank_on_a_gpu_is_given_those_that_are_ready_and_its_own_page_last(on_gpus: RankArenas):
    first, last = a_descriptor(), a_descriptor()
    on_gpus.take(0, [first])
    on_gpus.take(2, [last])
    ranks, fds = on_gpus.known_to(2, among=range(3))
    assert (ranks, fds[:2]) == ((0, 2), (first, last))
    Arena(fds[2], CONTROL_PLAN, rank=2, incarnation=1).close()


def test_a_rank_is_given_the_arenas_of_those_that_it_reaches(on_gpus: RankArenas):
    own, near, far = (a_descriptor() for _ in range(3))
    for rank, fd in enumerate((own, near, far)):
        on_gpus.take(rank, [fd])
    ranks, fds = on_gpus.known_to(0, among={0, 1})
    assert (ranks, fds[:-1]) == ((0, 1), (own, near))


def test_a_new_process_has_a_new_page_and_no_arena_until_it_is_ready(on_gpus: RankArenas):
    old = a_descriptor()
    on_gpus.take(0, [old])
    on_gpus.renew(0, incarnation=2)
    assert on_gpus.arena(0, source=1) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(old)
    _, fds = on_gpus.known_to(0, among=range(3))
    Arena(fds[-1], CONTROL_PLAN, rank=0, incarnation=2).close()


def test_the_arena_of_a_gpu_stays_within_two_and_a_half_gibibytes():
    assert arena_bytes(GPU_PLAN) < 2.5 * 2**30


def layouts(num_ranks: int) -> Iterator[Degrees]:
    """All degrees of so many ranks."""
    for cfg, ulysses, torus in itertools.product((1, 2), range(1, num_ranks + 1), range(1, num_ranks + 1)):
        if num_ranks % (cfg * ulysses * torus) == 0:
            yield Layout(
                tuple(range(num_ranks)), cfg, ulysses, num_ranks // (cfg * ulysses * torus), torus
            ).degrees


@pytest.mark.parametrize("plan", [GPU_PLAN, HOST_PLAN], ids=("gpu", "host"))
@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_arenas_hold_every_exchange_of_an_attention_at_once(
    shape: ForwardShape, num_ranks: int, plan: ArenaPlan
):
    """Of all shapes that are measured, on all degrees: none has to go in several chunks of heads.

    In main memory, on tori of all ranks or of halves.
    """
    geometry = shipped_geometry(shape.model)
    spec = JobSpec(id="a", prompt="a", width=shape.width, height=shape.height, frames=shape.frames, steps=2)
    num_tokens = geometry.num_tokens(geometry.resolve(spec))
    num_text = 1024 if shape.model == "qwen-image" else 0  # attended to jointly; its tokenizer's bound
    for degrees in layouts(num_ranks):
        cfg, ulysses, ring, torus = with_torus(degrees)
        if plan == HOST_PLAN and ulysses * ring > 1:
            continue
        num_branches = 3 - cfg  # both may go through one forward
        query = torch.empty((num_branches, 1, geometry.num_heads, 128), dtype=torch.bfloat16)
        rooms = {
            kind: bank_of(
                plan.data_bytes,
                plan.post_bytes,
                degrees,
                canonical(degrees, GROUP_KINDS[kind]),
            ).num_bytes
            for kind in GROUP_KINDS
        }
        parallel: Any = SimpleNamespace(
            ulysses=SimpleNamespace(size=ulysses, room_bytes=rooms["ulysses"] if ulysses > 1 else None),
            ring=SimpleNamespace(size=ring, room_bytes=rooms["ring"] if ring > 1 else None),
            torus=SimpleNamespace(size=torus, room_bytes=rooms["torus"] if torus > 1 else None),
            num_chunks=None,
        )
        shards = [
            sum(parts)
            for parts in zip(
                *(shard_sizes(length, ulysses * ring * torus) for length in (num_text, num_tokens)),
                strict=True,
            )
        ]
        assert _num_chunks(query, parallel, TokenSizes(tuple(shards), ulysses, ring)) == 1
        if torus > 1:
            num_heads = math.ceil(math.ceil(geometry.num_heads / ulysses) / torus)
            num_keys = sum(shards) // ring + torus
            assert 2 * num_branches * num_keys * num_heads * 128 * 2 <= rooms["torus"]
        gathered_bytes = 2 * num_branches * num_tokens * MAX_OUTPUT_CHANNELS
        assert gathered_bytes <= min(room for room in rooms.values() if room)
