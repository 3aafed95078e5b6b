"""A rank's end of the group-free collectives on CPUs.

A process sets it up once. Making a group from a descriptor involves no other rank.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gfgen.errors import LayoutError, RunError
from gfgen.gfc import native
from gfgen.gfc.arena import Arena, ArenaPlan, Failure
from gfgen.gfc.descriptor import GROUP_KINDS, Descriptor, GroupKind, subgroup_slots
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import POINTERS, Resharding, Sizes, reshard


class Endpoint:
    """One rank's collectives and point-to-point transfers.

    fds: arenas of all ranks, including its own, from `create_arena`; may be closed afterwards.
    timeout_s bounds each wait inside a task, unless `group` gives another bound.
    link_bytes_per_s: the most that exchanges move, for tests, but to ranks that are `near`; 0: no limit.
    One thread runs tasks. Another may send and receive, if each edge and direction is used by
    one thread at a time. `abort_through` may be called from any thread at any time.
    """

    def __init__(
        self,
        plan: ArenaPlan,
        *,
        rank: int,
        fds: Mapping[int, int],
        incarnations: Mapping[int, int],
        timeout_s: float = 30.0,
        link_bytes_per_s: float = 0.0,
        near: Collection[int] = (),
    ) -> None:
        self.plan, self.near = plan, frozenset([rank, *near])
        self._link_bytes_per_s = link_bytes_per_s
        self.rank = rank
        self.timeout_ns = nanoseconds(timeout_s)
        self.native: ctypes.CDLL = native.library()
        self.context = int(self.native.gfc_context_create(plan.as_native(), rank))
        if not self.context:
            raise RunError(f"rank {rank}: no memory for the collectives' context")
        self._arenas: dict[int, Arena] = {}
        for peer, fd in fds.items():
            self._map(peer, fd, incarnations[peer])

    def group(self, descriptor: Descriptor, *, timeout_s: float | None = None) -> CpuGroup:
        """The whole layout's group, as this rank sees it; `timeout_s` in place of the endpoint's own."""
        timeout_ns = self.timeout_ns if timeout_s is None else nanoseconds(timeout_s)
        task = native.TaskStruct()
        self.native.gfc_task_begin(task, descriptor.encode(self.rank), timeout_ns)
        return CpuGroup(self, descriptor, task)

    def send(
        self, x: Tensor, *, to: int, dispatch: int, label: int = 0, timeout_s: float | None = None
    ) -> None:
        """Pushes a tensor to a rank; returns when its last bytes lie in that rank's arena.

        Waits for the receiver only beyond two chunks of `ArenaPlan.post_bytes`. `label` distinguishes
        transfers of one dispatch between the same ranks. Without `timeout_s` it waits until the host
        aborts the dispatch.
        """
        self._transfer(self.native.gfc_send, x, to, dispatch, label, timeout_s)

    def recv(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        source: int,
        dispatch: int,
        label: int = 0,
        timeout_s: float | None = None,
    ) -> Tensor:
        """The tensor that `source` sends under this dispatch and label; see `send`."""
        x = torch.empty(tuple(shape), dtype=dtype)
        self._transfer(self.native.gfc_recv, x, source, dispatch, label, timeout_s)
        return x

    def limit_link(self, bytes_per_s: float) -> None:
        """Let exchanges take as long as on a link of this rate, or longer; 0: no limit."""
        self._link_bytes_per_s = bytes_per_s

    def pace(self, began_s: float, num_bytes: float) -> None:
        """Wait until the link would have moved so many bytes since `began_s`."""
        if self._link_bytes_per_s:
            time.sleep(max(0.0, began_s + num_bytes / self._link_bytes_per_s - time.monotonic()))

    def abort_through(self, dispatch: int) -> None:
        self._arenas[self.rank].abort_through(dispatch)

    def replace_peer(self, rank: int, fd: int, incarnation: int) -> None:
        """Maps the arena of a rank's new incarnation in place of the old one.

        Call it when this rank runs nothing that involves that rank, and before that rank sends anything
        here or waits for this one: the edge between them starts again.
        """
        old = self._arenas.pop(rank, None)
        self._map(rank, fd, incarnation)
        if old is not None:
            old.close()

    def restart_edges(self, peers: Sequence[int]) -> None:
        """Restarts point-to-point with these ranks after an aborted dispatch.

        Every survivor of the layout calls it after all of them have left the dispatch and before any of
        them gets the next one. Exchanges need nothing: they restart at each entry.
        """
        for peer in peers:
            if peer != self.rank:
                self.native.gfc_context_restart_edge(self.context, peer)

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self.native.gfc_context_destroy(self.context)
        self.context = 0

    def _map(self, rank: int, fd: int, incarnation: int) -> None:
        arena = Arena(fd, self.plan, rank=rank, incarnation=incarnation)
        self._arenas[rank] = arena
        self.native.gfc_context_map(self.context, rank, incarnation, arena.address)

    def _transfer(
        self,
        function: ctypes._NamedFuncPointer,
        x: Tensor,
        peer: int,
        dispatch: int,
        label: int,
        timeout_s: float | None,
    ) -> None:
        assert peer != self.rank
        assert peer in self._arenas
        item_bytes = x.element_size()
        strides = [stride * item_bytes for stride in x.stride()]
        block = native.BlockStruct(x.data_ptr(), x.dim(), item_bytes, tuple(x.shape), tuple(strides))
        failure = native.RecordStruct()
        status = function(self.context, peer, dispatch, label, block, nanoseconds(timeout_s), failure)
        if status != native.OK:
            raise Failure.from_record(failure).as_error()


def nanoseconds(timeout_s: float | None) -> int:
    return 0 if timeout_s is None else max(1, int(timeout_s * 1e9))


class CpuGroup(Collectives):
    """The ranks of a dispatch, or a subgroup of them, as one rank sees it.

    `Endpoint.group` makes it. Results are always fresh memory, and calls return when they are complete. A
    wait that fails poisons the task: every later collective of the task, in any subgroup, raises the same
    error at once.
    """

    __slots__ = ("_endpoint", "_kind", "_num_far", "_task", "descriptor", "ranks", "slot")

    def __init__(
        self,
        endpoint: Endpoint,
        descriptor: Descriptor,
        task: native.TaskStruct,
        *,
        kind: GroupKind = "whole",
    ) -> None:
        layout = descriptor.layout
        slots = subgroup_slots(layout.degrees, kind, task.group.slot)
        self._endpoint = endpoint
        self._task = task
        self._kind = GROUP_KINDS[kind]
        self.descriptor = descriptor
        self.ranks = tuple(layout.ranks[slot] for slot in slots)
        self.size = len(slots)
        self.slot = slots.index(task.group.slot)
        self._num_far = len(set(self.ranks) - endpoint.near)

    def subgroup(self, kind: GroupKind) -> CpuGroup:
        return CpuGroup(self._endpoint, self.descriptor, self._task, kind=kind)

    def enter(self) -> None:
        """The entry barrier of the dispatch: once, on the whole layout, before anything else.

        Waits without a timeout until every rank has entered or the host aborts the dispatch: a peer that is
        late may be busy with a long task.
        """
        self._check(self._endpoint.native.gfc_enter(self._endpoint.context, self._task))

    def barrier(self) -> None:
        self._move((), None, in_arena=False)

    def gather_tokens(
        self, *tensors: Tensor, token_sizes: Sizes, in_arena: bool = False
    ) -> tuple[Tensor, ...]:
        gathered = self._move(tensors, Resharding(-1, 1, (), tuple(token_sizes)), in_arena=in_arena)
        start = sum(token_sizes[: self.slot])
        return tuple(x if start == 0 else torch.cat((x[:, start:], x[:, :start]), 1) for x in gathered)

    def _move(
        self, tensors: Sequence[Tensor], resharding: Resharding | None, *, in_arena: bool
    ) -> tuple[Tensor, ...]:
        began_s, leaving = time.monotonic(), 0.0
        results = []
        content = b""
        for x in tensors:
            assert resharding is not None
            assert x.device.type == "cpu"
            assert not x.is_conj()
            assert not x.is_neg()
            if len(resharding.concat_sizes) != self.size:
                raise LayoutError(f"{self.size} ranks need as many sizes, got {resharding.concat_sizes}")
            part = reshard(x.shape, x.stride(), x.element_size(), self.slot, resharding)
            result = torch.empty(part.result_shape, dtype=x.dtype)
            content += POINTERS.pack(x.data_ptr(), result.data_ptr()) + part.content
            results.append(result)
            shares = self.size if resharding.split_dim >= 0 else 1
            leaving += x.numel() * x.element_size() * self._num_far / shares
        endpoint = self._endpoint
        status = endpoint.native.gfc_exchange(endpoint.context, self._task, self._kind, content, len(results))
        self._check(status)
        endpoint.pace(began_s, leaving)
        return tuple(results)

    def _check(self, status: int) -> None:
        if status != native.OK:
            raise Failure.from_record(self._task.failure).as_error()
