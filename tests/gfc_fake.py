"""Collectives without native code, for tests above: ranks are threads of one process.

    cluster = FakeCluster()
    results = cluster.run(Layout((0, 1), ulysses=2), lambda group: group.all_gather(x[group.slot]))

`FakeGroup` has the interface of `group.Collectives` and computes with the oracle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import gfc_oracle as oracle
import torch
from torch import Tensor

from gfgen.errors import LayoutError, PeerTimeoutError
from gfgen.gfc.descriptor import Descriptor, GroupKind, subgroup_slots
from gfgen.gfc.reshard import Sizes
from gfgen.layout import Layout

T = TypeVar("T")


class FakeCluster:
    """Where the threads of a test meet."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._shared: dict[object, dict[int, Any]] = {}

    def group(self, descriptor: Descriptor, rank: int) -> FakeGroup:
        return FakeGroup(self, descriptor, descriptor.layout.slot_of(rank), kind="whole")

    def run(self, layout: Layout, program: Callable[[FakeGroup], T], *, dispatch: int = 1) -> list[T]:
        """Runs a program on each rank of a layout; its results by slot."""
        descriptor = Descriptor(dispatch, layout, (1,) * layout.degree)
        groups = [self.group(descriptor, rank) for rank in layout.ranks]
        # A thread that has not asked may compute with more threads than were set, and round otherwise.
        with ThreadPoolExecutor(layout.degree, initializer=torch.get_num_threads) as pool:
            return list(pool.map(program, groups))

    def share(self, key: object, *, slot: int, size: int, value: Any) -> list[Any]:
        """Everybody's value under this key, by slot, when all have given theirs."""
        with self._condition:
            values = self._shared.setdefault(key, {})
            values[slot] = value
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: len(values) == size, self._timeout_s):
                raise PeerTimeoutError(f"{key}: slots {sorted(values)} of {size} came in time")
            return [values[idx] for idx in range(size)]


class FakeGroup:
    """One rank's view of a group in a `FakeCluster`."""

    is_far = False

    def __init__(
        self,
        cluster: FakeCluster,
        descriptor: Descriptor,
        layout_slot: int,
        *,
        kind: GroupKind,
        counts: dict[object, int] | None = None,
    ) -> None:
        self._cluster = cluster
        self._layout_slot = layout_slot
        self._slots = subgroup_slots(descriptor.layout.degrees, kind, layout_slot)
        self._counts: dict[object, int] = {} if counts is None else counts
        self.descriptor = descriptor
        self.ranks = tuple(descriptor.layout.ranks[slot] for slot in self._slots)
        self.slot = self._slots.index(layout_slot)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def room_bytes(self) -> int | None:
        return None

    def beside(self, max_blocks: int) -> FakeGroup:
        return self

    def subgroup(self, kind: GroupKind) -> FakeGroup:
        return FakeGroup(self._cluster, self.descriptor, self._layout_slot, kind=kind, counts=self._counts)

    def enter(self) -> None:
        self._share(None)

    def barrier(self) -> None:
        self._share(None)

    def all_gather(self, x: Tensor, *, dim: int = 0, sizes: Sizes | None = None) -> Tensor:
        inputs = self._share(x)
        if sizes is not None and [y.shape[dim] for y in inputs] != list(sizes):
            raise LayoutError(f"sizes are {sizes}, shards {[tuple(y.shape) for y in inputs]}")
        return oracle.all_gather(inputs, dim=dim)[self.slot]

    def _all_to_all(
        self,
        x: Tensor,
        *,
        split_dim: int,
        concat_dim: int,
        split_sizes: Sizes,
        concat_sizes: Sizes,
    ) -> Tensor:
        inputs = self._share(x)
        if [y.shape[concat_dim] for y in inputs] != list(concat_sizes):
            raise LayoutError(f"sizes are {concat_sizes}, {[tuple(y.shape) for y in inputs]} came")
        return oracle.all_to_all(inputs, split_dim=split_dim, concat_dim=concat_dim, split_sizes=split_sizes)[
            self.slot
        ]

    def heads_from_tokens(
        self,
        *tensors: Tensor,
        token_sizes: Sizes,
        head_sizes: Sizes,
        in_arena: bool = False,
    ) -> tuple[Tensor, ...]:
        if min(head_sizes) < 1:
            raise LayoutError(f"{tensors[0].shape[2]} heads cannot be split over {self.size} ranks")
        return tuple(
            self._all_to_all(x, split_dim=2, concat_dim=1, split_sizes=head_sizes, concat_sizes=token_sizes)
            for x in tensors
        )

    def gather_tokens(
        self, *tensors: Tensor, token_sizes: Sizes, in_arena: bool = False
    ) -> tuple[Tensor, ...]:
        found = []
        for x in tensors:
            inputs = self._share(x)
            if [y.shape[1] for y in inputs] != list(token_sizes):
                raise LayoutError(f"sizes are {token_sizes}, shards {[tuple(y.shape) for y in inputs]}")
            found.append(oracle.gather_tokens(inputs)[self.slot])
        return tuple(found)

    def tokens_from_heads(self, x: Tensor, *, token_sizes: Sizes, head_sizes: Sizes) -> Tensor:
        return self._all_to_all(
            x, split_dim=1, concat_dim=2, split_sizes=token_sizes, concat_sizes=head_sizes
        )

    def _share(self, value: Any) -> list[Any]:
        members = (self.descriptor.dispatch, self.ranks)
        number = self._counts[members] = self._counts.get(members, 0) + 1
        # A copy: the caller may write to its tensor as soon as its own call has returned.
        value = value.clone() if isinstance(value, Tensor) else value
        return self._cluster.share((members, number), slot=self.slot, size=self.size, value=value)
