"""What ranks are made of: settings, of which each worker gets its own when it starts, and arenas."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from socket import socket
from typing import Any

from gfgen.gfc.arena import CONTROL_PLAN, MIB, ArenaPlan, create_arena
from gfgen.gfc.cuda.device_arena import arena_bytes
from gfgen.models.families.precision import Precision
from gfgen.models.fast.kernels import KernelChoice
from gfgen.models.geometry.weights import Placement

GPU_PLAN = ArenaPlan(data_bytes=2048 * MIB, post_bytes=16 * MIB)
"""2.4 GB on each GPU. Wan2.2-5B at 704x1280x121 (27,280 tokens) on 2 x 2 ranks needs the most at once: q, k
and v of half of the heads, 251 MB; in a ring, with both branches of guidance in one forward, k and v of all
tokens, 335 MB; and two other kinds of groups, with two banks for each."""

HOST_PLAN = ArenaPlan(data_bytes=1024 * MIB, post_bytes=4 * MIB)
"""1.1 GiB of pinned main memory for each GPU where not all reach each other, and of GPUs that reach others.
Keys and values of 27,280 tokens in a torus of two, 168 MB, are one exchange, also where there are three kinds
of groups (cfg 2 x torus 2)."""

SIDE_BYTES = 256 * MIB
"""On each GPU, in addition to its arena: half for arriving and half for departing state. Twice the state of a
job of 704x1280x81, which is assembled from parts."""
CONTEXT_BYTES = 600_000_000  # GPU memory of CUDA and its libraries; a low estimate


def default_plan(*, num_ranks: int, are_on_gpus: bool, over_host: bool = False) -> ArenaPlan:
    if not are_on_gpus or num_ranks == 1:
        return ArenaPlan()
    return HOST_PLAN if over_host else GPU_PLAN


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The ranks of a pool: how many there are, on which devices, and how they compute."""

    num_ranks: int
    device: str = "cpu"
    num_gpus: int = 0  # fewer than ranks where they share them, 0 if each has its own
    islands: Sequence[Sequence[int]] | None = None
    """Sets of ranks that map each other's arenas, and so can share a layout; None: all do."""
    near: Sequence[Sequence[int]] | None = None
    """Sets of them that reach each other's memory; the others exchange through main memory. None: all do."""
    link_bytes_per_s: float = 0.0  # the most that a rank sends through main memory; 0: no limit
    memory_limit: int | None = None  # bytes of its GPU that a rank may use; None for all
    plan: ArenaPlan | None = None  # the arena of each rank; None for the usual size
    has_random_weights: bool = False
    vae_dtype: str = "auto"
    precision: Precision = Precision()
    has_graphs: bool = False  # on a GPU: whether forwards may be recorded, to be launched at once
    placements: Mapping[str, Placement] = field(default_factory=dict)  # of models with streamed blocks
    kept: Mapping[str, int] = field(default_factory=dict)  # bytes of models with a copy in main memory
    patch_copies_on_host: tuple[str, ...] = ()  # on a GPU: models with patched weights copied to host memory
    trusts_code: bool = False
    kernels: KernelChoice = "own"  # of the steps of pipelines without an adapter of their own
    are_all_needed: bool = False  # if a rank cannot start, the start ends; else the others go on

    @property
    def are_on_gpus(self) -> bool:
        return self.device != "cpu"

    @property
    def arena_plan(self) -> ArenaPlan:
        return self.plan or default_plan(
            num_ranks=self.num_ranks, are_on_gpus=self.are_on_gpus, over_host=self.near is not None
        )

    def near_to(self, rank: int) -> frozenset[int]:
        """The other ranks that write to this one's device."""
        sets = self.near or self.islands or [range(self.num_ranks)]
        return frozenset(next(each for each in sets if rank in each)) - {rank}

    def has_own_arena(self, rank: int) -> bool:
        """Whether a rank on a GPU makes an arena there."""
        return self.near is None or len(self.near_to(rank)) > 0

    @property
    def gpu_arena_bytes(self) -> int:
        """Of each GPU."""
        return arena_bytes(self.arena_plan) if any(map(self.has_own_arena, range(self.num_ranks))) else 0

    @property
    def ranks_per_gpu(self) -> int:
        return -(-self.num_ranks // self.num_gpus) if self.num_gpus else 1

    @property
    def computed_with(self) -> Mapping[str, Any]:
        """What must be equal for other ranks to continue a job: it decides what its tensors are like."""
        found = {name: getattr(self, name) for name in ("device", "vae_dtype", "has_random_weights")}
        found |= {option: list(texts) for option, texts in self.precision.by_option.items() if texts}
        return found if self.kernels == "own" else found | {"kernels": self.kernels}


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    rank: int
    checkpoints: tuple[str, ...]  # of the models that it loads first
    ranks: RankSettings
    tuned_tables: Mapping[str, str] = field(default_factory=dict)  # of kernels (gfc/cuda/selector.py)
    host_copies: Mapping[str, Connection] = field(default_factory=dict)
    """By checkpoint: a descriptor of the memory with its streamed blocks, which all ranks share."""
    boards: Mapping[str, Sequence[tuple[socket, socket]]] = field(default_factory=dict)
    """By checkpoint: the boards of all ranks (models/streaming/shards.py)."""

    @property
    def gpu(self) -> int:
        return self.rank % self.ranks.num_gpus if self.ranks.num_gpus else self.rank


class RankArenas:
    """The descriptors of all ranks' arenas, and of host pages that can stop the kernels of GPU ranks.

    Arenas are made here in main memory for CPU ranks, and for ranks that do not reach each other's GPUs.
    """

    def __init__(self, ranks: RankSettings) -> None:
        self.plan, self.are_on_gpus = ranks.arena_plan, ranks.are_on_gpus
        self._ranks, self._are_made = ranks, not ranks.are_on_gpus or ranks.near is not None
        self._arenas: dict[int, int] = {}
        self._on_gpus: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        for rank in range(ranks.num_ranks):
            self.renew(rank, incarnation=1)

    def renew(self, rank: int, *, incarnation: int) -> None:
        """Create memory for a new process; the old memory is freed when no process maps it."""
        for fds in (self._arenas, self._on_gpus, self._pages):
            if rank in fds:
                os.close(fds.pop(rank))
        if self.are_on_gpus:
            self._pages[rank] = create_arena(CONTROL_PLAN, rank=rank, incarnation=incarnation)
        if self._are_made:
            num_bytes = arena_bytes(self.plan) if self.are_on_gpus else 0
            self._arenas[rank] = create_arena(
                self.plan, rank=rank, incarnation=incarnation, num_bytes=num_bytes
            )

    def take(self, rank: int, fds: Sequence[int]) -> None:
        """Keep the descriptors that a rank sent when it became ready: its arena, if that is on a GPU."""
        is_own = self.are_on_gpus and self._ranks.has_own_arena(rank)
        assert len(fds) == int(is_own), f"rank {rank} brought {len(fds)} arenas"
        if fds:
            self._on_gpus[rank] = fds[0]

    def arena(self, rank: int, *, source: int) -> int | None:
        """The rank's arena that `source` writes to; None until a rank on a GPU is ready."""
        if not self._are_made or (self.are_on_gpus and source in self._ranks.near_to(rank)):
            return self._on_gpus.get(rank)
        return self._arenas[rank]

    def known_to(self, rank: int, *, among: Collection[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks of `among` with an arena, and the descriptors for `rank`; a GPU's own page is last."""
        found = {other: self.arena(other, source=rank) for other in sorted(among)}
        fds = {other: fd for other, fd in found.items() if fd is not None}
        page = (self._pages[rank],) if self.are_on_gpus else ()
        return tuple(fds), (*fds.values(), *page)

    def close(self) -> None:
        for fds in (self._arenas, self._on_gpus, self._pages):
            for fd in fds.values():
                os.close(fd)
            fds.clear()
