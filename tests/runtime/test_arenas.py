"""Who makes arenas, and who is given which."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gfgen.gfc.arena import Arena, Plan
from gfgen.gfc.cuda.memory import CONTROL_PLAN
from gfgen.runtime.arenas import RankArenas

PLAN = Plan(data_bytes=1 << 16, post_bytes=1 << 10)


@pytest.fixture
def on_gpus() -> Iterator[RankArenas]:
    arenas = RankArenas(PLAN, num_ranks=3, are_on_gpus=True)
    yield arenas
    arenas.close()


def a_descriptor() -> int:
    return os.memfd_create("arena of a GPU")


def test_arenas_of_cpu_ranks_are_there_from_the_start():
    arenas = RankArenas(PLAN, num_ranks=2, are_on_gpus=False)
    ranks, fds = arenas.known_to(0)
    assert ranks == (0, 1)
    for rank, fd in enumerate(fds):
        Arena(fd, PLAN, rank=rank, incarnation=1).close()
    arenas.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])


def test_a_rank_on_a_gpu_brings_its_own_arena(on_gpus: RankArenas):
    assert on_gpus.arena(1) is None
    fd = a_descriptor()
    on_gpus.take(1, [fd])
    assert on_gpus.arena(1) == fd


def test_a_rank_on_a_gpu_is_given_those_that_are_ready_and_its_own_page_last(on_gpus: RankArenas):
    first, last = a_descriptor(), a_descriptor()
    on_gpus.take(0, [first])
    on_gpus.take(2, [last])
    ranks, fds = on_gpus.known_to(2)
    assert (ranks, fds[:2]) == ((0, 2), (first, last))
    Arena(fds[2], CONTROL_PLAN, rank=2, incarnation=1).close()


def test_a_new_process_has_a_new_page_and_no_arena_until_it_is_ready(on_gpus: RankArenas):
    old = a_descriptor()
    on_gpus.take(0, [old])
    on_gpus.renew(0, incarnation=2)
    assert on_gpus.arena(0) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(old)
    _, fds = on_gpus.known_to(0)
    Arena(fds[-1], CONTROL_PLAN, rank=0, incarnation=2).close()


def test_the_arena_of_a_gpu_stays_within_two_and_a_half_gibibytes():
    from gfgen.gfc.cuda.memory import arena_bytes
    from gfgen.runtime.arenas import GPU_PLAN

    assert arena_bytes(GPU_PLAN) < 2.5 * 2**30
