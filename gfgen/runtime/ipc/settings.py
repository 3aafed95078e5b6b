"""What ranks are made of, and what each worker gets of it when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from socket import socket
from typing import Any

from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.device_arena import arena_bytes
from gfgen.models.families.precision import Precision
from gfgen.models.fast.kernels import KernelChoice
from gfgen.models.geometry.weights import Placement
from gfgen.runtime.ipc.arenas import default_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The ranks of a pool: how many there are, on which devices, and how they compute."""

    num_ranks: int
    device: str = "cpu"
    num_gpus: int = 0
    """GPUs that the ranks use; fewer than ranks where they share them, 0 if each has its own."""
    islands: Sequence[Sequence[int]] | None = None
    """Sets of ranks that map each other's arenas, and so can share a layout; None: all do."""
    over_host: bool = False
    """Whether arenas of ranks on GPUs lie in main memory."""
    memory_limit: int | None = None
    """Bytes of its GPU that a rank may use; None for all."""
    plan: ArenaPlan | None = None
    """The arena of each rank; None for the usual size."""
    has_random_weights: bool = False
    vae_dtype: str = "auto"
    precision: Precision = Precision()
    has_graphs: bool = False
    """On a GPU: whether forwards may be recorded, to be launched at once."""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Of models with streamed blocks, by checkpoint."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the models that take turns, and of which main memory has a copy, by checkpoint."""
    patch_copies_on_host: tuple[str, ...] = ()
    """On a GPU: models of which host memory has the copies of the weights that patches change."""
    trusts_code: bool = False
    kernels: KernelChoice = "own"
    """Of the steps of pipelines without an adapter of their own."""
    are_all_needed: bool = False
    """If a rank cannot start, the start ends, as for measurements; otherwise the others go on without it."""

    @property
    def are_on_gpus(self) -> bool:
        return self.device != "cpu"

    @property
    def arena_plan(self) -> ArenaPlan:
        return self.plan or default_plan(
            num_ranks=self.num_ranks, are_on_gpus=self.are_on_gpus, over_host=self.over_host
        )

    @property
    def gpu_arena_bytes(self) -> int:
        """Of each GPU."""
        return 0 if self.over_host else arena_bytes(self.arena_plan)

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
    checkpoints: tuple[str, ...]
    """Of the models that it loads first."""
    ranks: RankSettings
    tuned_tables: Mapping[str, str] = field(default_factory=dict)
    """On a GPU: by which all ranks choose kernels of exchanges (gfc/cuda/selector.py)."""
    host_copies: Mapping[str, Connection] = field(default_factory=dict)
    """By checkpoint: a descriptor of the memory with its streamed blocks, which all ranks share."""
    boards: Mapping[str, Sequence[tuple[socket, socket]]] = field(default_factory=dict)
    """By checkpoint: the boards of all ranks (models/streaming/shards.py)."""

    @property
    def gpu(self) -> int:
        return self.rank % self.ranks.num_gpus if self.ranks.num_gpus else self.rank
