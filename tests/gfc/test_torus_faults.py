"""Attention in a torus on real ranks with small arenas; one of them dies in each phase."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gfc_fake import FakeCluster
from ranks import Ranks

from gfgen.errors import PeerTimeoutError
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import Endpoint
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.shared_attention import shared_attention

TOKENS, HEADS, DIM = 203, 9, 16
"""Queries of all tokens are larger than the arena of 64 KiB, let alone a bank of it."""
SHORT_S = 0.5
VICTIM = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4, timeout_s=SHORT_S)
    yield ranks
    ranks.close()


class Mortal:
    """Ranks of a group; `strike` is called before each exchange and may kill the process."""

    def __init__(self, ranks: Any, strike: Callable[[], None]) -> None:
        self._ranks, self._strike = ranks, strike
        self.size, self.slot, self.room_bytes = ranks.size, ranks.slot, ranks.room_bytes

    def beside(self, max_blocks: int) -> Mortal:
        return self

    def __getattr__(self, name: str) -> Any:
        self._strike()
        return getattr(self._ranks, name)


def attended(group: Any, dies_before: int | None = None) -> torch.Tensor:
    torch.set_num_threads(1)  # of this thread: kernels sum in an order that depends on it
    noise = torch.Generator().manual_seed(7)
    sizes = shard_sizes(TOKENS, group.size)
    q, k, v = (torch.randn(1, TOKENS, HEADS, DIM, generator=noise).split(sizes, 1) for _ in range(3))
    parallel = parallel_from(group)
    num_exchanges = 0

    def strike() -> None:
        nonlocal num_exchanges
        if num_exchanges == dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        num_exchanges += 1

    kinds: dict[str, Any] = {
        name: Mortal(getattr(parallel, name), strike) for name in ("sequence", "ulysses", "ring", "torus")
    }
    own = (x[group.slot] for x in (q, k, v))
    return shared_attention(
        *own, None, parallel=replace(parallel, **kinds), token_sizes=sizes, attend=_never_alone
    )


def _never_alone(*_: object) -> torch.Tensor:
    raise AssertionError


def on_a_rank(endpoint: Endpoint, group: Descriptor, dies_before: int | None) -> torch.Tensor:
    whole = endpoint.group(group)
    whole.enter()
    return attended(whole, dies_before if endpoint.rank == VICTIM else None)


def run(ranks: Ranks, layout: Layout, dies_before: int | None = None) -> list[Any]:
    incarnations = tuple(ranks.incarnations[rank] for rank in layout.ranks)
    group = Descriptor(ranks.next_dispatch(), layout, incarnations)
    for rank in layout.ranks:
        ranks.submit(rank, on_a_rank, group, dies_before)
    lives = [rank for rank in layout.ranks if dies_before is None or rank != VICTIM]
    return [ranks.result(rank) for rank in lives]


def assert_right(ranks: Ranks, layout: Layout) -> None:
    wanted = FakeCluster().run(layout, attended)
    for found, right in zip(run(ranks, layout), wanted, strict=True):
        assert isinstance(found, torch.Tensor), found
        assert torch.equal(found, right)


@pytest.mark.parametrize(
    ("degrees", "num_exchanges"), [((1, 2, 1, 2), 5), ((1, 1, 2, 2), 5), ((1, 1, 1, 4), 3)]
)
def test_a_rank_that_dies_in_any_phase_costs_the_task_only(
    ranks: Ranks, degrees: tuple[int, ...], num_exchanges: int
) -> None:
    layout = Layout((3, 2, 0, 1), *degrees)
    assert_right(ranks, layout)
    for phase in range(num_exchanges):
        found = run(ranks, layout, phase)  # ranks that need nothing more of it may end
        assert {type(each) for each in found} <= {PeerTimeoutError, torch.Tensor}
        assert any(isinstance(each, PeerTimeoutError) for each in found)
        ranks.kill(VICTIM)
        survivors = (0, 1, 3)
        ranks.run(survivors, Endpoint.restart_edges, survivors)
        assert_right(ranks, Layout((1, 3), torus=2))
        ranks.revive(VICTIM)
        assert_right(ranks, layout)
