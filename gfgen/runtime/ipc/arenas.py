"""Descriptors of all ranks' arenas: in main memory created here, on GPUs by the ranks themselves."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from gfgen.gfc.arena import CONTROL_PLAN, MIB, ArenaPlan, create_arena
from gfgen.gfc.cuda.device_arena import arena_bytes

GPU_PLAN = ArenaPlan(data_bytes=2048 * MIB, post_bytes=16 * MIB)
"""2.4 GB on each GPU. Wan2.2-5B at 704x1280x121 (27,280 tokens) on 2 x 2 ranks needs the most at once: q, k
and v of half of the heads, 251 MB; in a ring, with both branches of guidance in one forward, k and v of all
tokens, 335 MB; and two other kinds of groups, with two banks for each."""

HOST_PLAN = ArenaPlan(data_bytes=1024 * MIB, post_bytes=4 * MIB)
"""1.1 GiB of pinned main memory for each GPU, with `--transport host`. Keys and values of 27,280 tokens in a
torus of two, 168 MB, are one exchange, also where there are three kinds of groups (cfg 2 x torus 2)."""

SIDE_BYTES = 256 * MIB
"""On each GPU, in addition to its arena: half for arriving and half for departing state. Twice the state of a
job of 704x1280x81, which is assembled from parts."""
CONTEXT_BYTES = 600_000_000
"""GPU memory of CUDA and its libraries; a low estimate."""


def default_plan(*, num_ranks: int, are_on_gpus: bool, over_host: bool = False) -> ArenaPlan:
    if not are_on_gpus or num_ranks == 1:
        return ArenaPlan()
    return HOST_PLAN if over_host else GPU_PLAN


class RankArenas:
    """The descriptors of all ranks' arenas, and of host pages that can stop the kernels of GPU ranks."""

    def __init__(
        self, plan: ArenaPlan, *, num_ranks: int, are_on_gpus: bool, over_host: bool = False
    ) -> None:
        self.plan, self.are_on_gpus = plan, are_on_gpus
        self._bring_arenas = are_on_gpus and not over_host
        self._arenas: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        for rank in range(num_ranks):
            self.renew(rank, incarnation=1)

    def renew(self, rank: int, *, incarnation: int) -> None:
        """Create memory for a new process; the old memory is freed when no process maps it."""
        for fds in (self._arenas, self._pages):
            if rank in fds:
                os.close(fds.pop(rank))
        if self.are_on_gpus:
            self._pages[rank] = create_arena(CONTROL_PLAN, rank=rank, incarnation=incarnation)
        if not self._bring_arenas:
            num_bytes = arena_bytes(self.plan) if self.are_on_gpus else 0
            self._arenas[rank] = create_arena(
                self.plan, rank=rank, incarnation=incarnation, num_bytes=num_bytes
            )

    def take(self, rank: int, fds: Sequence[int]) -> None:
        """Keep the descriptors that a rank sent when it became ready: its arena, if that is on a GPU."""
        assert len(fds) == int(self._bring_arenas), f"rank {rank} brought {len(fds)} arenas"
        if fds:
            self._arenas[rank] = fds[0]

    def arena(self, rank: int) -> int | None:
        """The rank's arena; None until a rank on a GPU is ready."""
        return self._arenas.get(rank)

    def known_to(self, rank: int, *, among: Collection[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks of `among` with an arena, and the descriptors for `rank`; a GPU's own page is last."""
        ranks = tuple(sorted(self._arenas.keys() & among))
        page = (self._pages[rank],) if self.are_on_gpus else ()
        return ranks, (*(self._arenas[other] for other in ranks), *page)

    def close(self) -> None:
        for fd in (*self._arenas.values(), *self._pages.values()):
            os.close(fd)
        self._arenas.clear()
        self._pages.clear()
