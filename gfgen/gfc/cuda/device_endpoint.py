"""A rank's end of the group-free collectives on a GPU.

A process sets it up once. Making a group from a descriptor involves no other rank: the entry kernel writes
the descriptor into this rank's context.

Failures arrive after calls: kernels leave them in a page of host memory. Every call checks that page first,
and `CudaGroup.finish` checks it when the device has finished.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Mapping, Sequence
from ctypes import c_int, c_uint32, c_uint64
from types import SimpleNamespace

import torch
from torch import Tensor

from gfgen.errors import LayoutError, ProtocolError
from gfgen.gfc import native
from gfgen.gfc.arena import Failure
from gfgen.gfc.cuda.device_arena import ControlPage, DeviceArena
from gfgen.gfc.cuda.device_group import CudaGroup, DispatchState, GroupSlot
from gfgen.gfc.cuda.driver import driver
from gfgen.gfc.cuda.kernels import (
    AWAIT,
    COPY,
    FLAGGED_BYTES,
    NUM_BANKS,
    PUBLISH,
    Chunk,
    Context,
    Edges,
    Kernels,
    Launch,
)
from gfgen.gfc.cuda.selector import host_choice, load_selector
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import nanoseconds
from gfgen.layout import Layout

_ONE_BLOCK_BYTES = 1 << 14
"""Many blocks copy larger chunks. A separate launch of one small block waits for such a chunk, so that other
work on the device keeps its multiprocessors meanwhile."""
_TRANSFER_BLOCKS, _BLOCK, _WAITING_BLOCK = 32, 512, 32
_NO_DISPATCH = 2**63


class CudaEndpoint:
    """One rank's collectives and transfers on one device.

    own: the rank's arena on the device, for ranks that are `near`: they reach this memory; None if there are
    none. host: the one in host memory, for the others. peer_fds: by rank, the arenas of others that this rank
    writes to; may be closed afterwards.
    control_fd: the rank's page in host memory (`arena.CONTROL_PLAN`). Tasks run on torch's current
    stream: always the same one, or one that events order after all earlier exchanges and before all later
    ones. One thread launches groups and arrivals, another may send. Any thread may call `restart_edges` and
    `abort_through`.
    """

    def __init__(
        self,
        own: DeviceArena | None,
        *,
        rank: int,
        peer_fds: Mapping[int, int],
        incarnations: Mapping[int, int],
        control_fd: int,
        host: DeviceArena | None = None,
        near: Collection[int] = (),
        timeout_s: float = 30.0,
        tables: Mapping[str, str] | None = None,
        link_bytes_per_s: float = 0.0,
    ) -> None:
        given = own or host
        assert given is not None, f"rank {rank} has no arena"
        plan, device = given.plan, given.device
        self.plan, self.rank, self.device = plan, rank, device
        self.torch_device = torch.device("cuda", device)
        self.timeout_ns = nanoseconds(timeout_s)
        self.beside_blocks: int | None = None
        """Blocks of exchanges that overlap computation, set by measurements; None: as callers ask."""
        self.driver = driver()
        self.kernels = Kernels(device)
        # Every rank uses the first device's table: all ranks of a group must choose alike.
        self.selector = load_selector(self.driver.name(0), has_bulk=self.kernels.has_bulk, tables=tables)
        self.control = ControlPage(control_fd, rank=rank, incarnation=incarnations[rank])
        self.incarnations = dict(incarnations)
        self.arenas, self._host, self._near = {rank: given}, host, frozenset([rank, *near])
        for peer, fd in peer_fds.items():
            self.arenas[peer] = self._inbox(peer).open_peer(fd)
        self._own_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.context = self.driver.allocate(ctypes.sizeof(Context))
        self._write_context()
        self.host_choice = host_choice(self.kernels.num_multiprocessors)
        if own is not None:
            self.arena_bytes_1d = as_tensor(own.address, own.num_bytes, device)
        self.limit_link(link_bytes_per_s)
        self.context_bytes_1d = as_tensor(self.context, ctypes.sizeof(Context), device)
        self.failed = c_uint32.from_address(self.control.failure_address)
        self._native_descriptor, self._bound_ns = native.DescriptorStruct(), c_uint64()
        arguments = (c_uint64(self.context), self._native_descriptor, self._bound_ns)
        self._enter = Launch(self.driver, self.kernels["enter"], *arguments, grid=1, block=32)
        self.last_dispatch = 0
        self.prepared: dict[object, object] = {}
        self.group_slots: dict[object, GroupSlot] = {}
        self._unclean: set[int] = set()
        """Ranks whose flagged messages may lie here unread since a fault."""
        self._views: dict[object, Tensor] = {}
        notes = torch.empty((_NUM_NOTES, _NOTE_BYTES), dtype=torch.uint8, pin_memory=True)
        self._notes = itertools.cycle(notes.unbind())
        """Host memory for outcomes, used in turn; allocated now, since pinning waits for the device."""
        self._mapped: dict[tuple[int, ...], tuple[int | None, ...]] = {}
        """Mapped incarnations by a layout's ranks, in their order."""

    def are_far(self, ranks: Sequence[int]) -> bool:
        """Whether some of these ranks, all of a group, exchange through host memory."""
        return self._host is not None and not self._near.issuperset(ranks)

    def _inbox(self, source: int) -> DeviceArena:
        """This rank's own arena that a rank writes to."""
        return self.arenas[self.rank] if self._host is None or source in self._near else self._host

    def group(self, descriptor: Descriptor, *, timeout_s: float | None = None) -> CudaGroup:
        timeout_ns = self.timeout_ns if timeout_s is None else nanoseconds(timeout_s)
        return CudaGroup(self, descriptor, DispatchState(descriptor, timeout_ns))

    def unentered(self, layout: Layout) -> CudaGroup:
        """A group for capturing: no rank enters it."""
        descriptor = Descriptor(_NO_DISPATCH, layout, (0,) * layout.degree)
        run = DispatchState(descriptor, self.timeout_ns)
        run.has_entered = True
        return CudaGroup(self, descriptor, run)

    def stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.device))

    def bind(self, descriptor: Descriptor, *, timeout_ns: int) -> None:
        """Writes the descriptor into the context and runs the entry barrier, on the current stream.

        Each wait behind that barrier is bounded by `timeout_ns`, also those of a captured graph.
        """
        ranks = descriptor.layout.ranks
        mapped = self._mapped.get(ranks)
        if mapped is None:
            mapped = self._mapped[ranks] = tuple(map(self.incarnations.get, ranks))
        if mapped != descriptor.incarnations:
            raise ProtocolError(
                f"rank {self.rank}, dispatch {descriptor.dispatch}: the descriptor names incarnations "
                f"{descriptor.incarnations} of ranks {ranks}, mapped here are {mapped}"
            )
        if descriptor.dispatch <= self.last_dispatch:
            raise ProtocolError(
                f"rank {self.rank}: dispatch numbers must rise, {descriptor.dispatch} came after "
                f"{self.last_dispatch}"
            )
        self.last_dispatch = descriptor.dispatch
        descriptor.encode_into(self._native_descriptor, ranks.index(self.rank))
        if self._unclean:
            self._clear_flags(self._unclean.intersection(ranks))
        self._bound_ns.value = timeout_ns
        self._enter.run(self.stream())

    def _clear_flags(self, peers: Collection[int]) -> None:
        """Enqueues the clearing of inboxes for flagged messages; peers send nothing before the next entry."""
        # First: another fault may add ranks meanwhile, for the next call.
        self._unclean.difference_update(peers)
        num_bytes = NUM_BANKS * FLAGGED_BYTES
        for peer in sorted(peers):
            address = self._inbox(peer).address + self.plan.arena_bytes + peer * num_bytes
            self.driver.call("cuMemsetD8Async", address, 0, num_bytes, self.stream())

    def check(self, dispatch: int) -> None:
        """Raises the failure of this dispatch, if its kernels have left one."""
        if self.failed.value:
            failure = self.control.arena.last_failure()
            if failure is not None and failure.dispatch == dispatch:
                raise failure.as_error()

    def outcome(self, dispatch: int, *, sources: Collection[int] = ()) -> DispatchOutcome:
        """Enqueues, on the current stream, a note of how this dispatch and its transfers to here went.

        The next dispatch may be enqueued before anyone reads the outcome. It resets the context's task, and
        the host's record keeps the last failure only. Notes are reused in turn, which is safe because a
        rank has at most two dispatches under way.
        """
        return DispatchOutcome(self, dispatch, sources, note=next(self._notes))

    def require(self, peer: int, *, dispatch: int) -> None:
        """Raises if a transfer with this rank has failed; its stream has been waited for."""
        content = self.driver.read(self.context + _BROKEN_OFFSET + 4 * peer, 4)
        status = int.from_bytes(content, "little")
        if status != native.OK:
            raise self._transfer_failure(peer, status, dispatch).as_error()

    def _transfer_failure(self, peer: int, status: int, dispatch: int) -> Failure:
        """The host's record if it still belongs to this transfer; else a failure without details."""
        failure = self.last_failure()
        if failure is not None and (failure.peer, failure.dispatch) == (peer, dispatch):
            return failure
        return Failure(status, self.rank, peer, "chunk", dispatch, (0, 0), (0, 0))

    def last_failure(self) -> Failure | None:
        return self.control.arena.last_failure()

    def limit_link(self, bytes_per_s: float) -> None:
        """Over host memory, lets exchanges and chunks take as long as on such a link; 0: no limit.

        Each slice is published no sooner than a link of this rate would have moved it since the exchange
        began. Captured graphs follow. The device's clock makes an exchange up to 1 us longer.
        """
        self._mb_per_s = int(bytes_per_s / 1e6) if self._host is not None else 0
        self.driver.write(self.context + Context.link_mb_per_s.offset, self._mb_per_s.to_bytes(4, "little"))

    def abort_through(self, dispatch: int) -> None:
        self.control.arena.abort_through(dispatch)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the own arena's memory; cached, because making one takes microseconds."""
        key = (offset, shape, dtype)
        found = self._views.get(key)
        if found is None:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            found = self.arena_bytes_1d[offset : offset + num_bytes].view(dtype).view(shape)
            self._views[key] = found
        return found

    def send(
        self,
        x: Tensor,
        *,
        to: int,
        dispatch: int,
        label: int = 0,
        timeout_s: float | None = None,
        stream: int | None = None,
    ) -> None:
        """Enqueues the push of a contiguous tensor to a rank, by chunks of `ArenaPlan.post_bytes`.

        The host does not wait. While both banks hold unread chunks, the device waits for the receiver.
        `check` and `require` raise failures.
        """
        assert x.is_contiguous()
        assert to != self.rank
        stream = self.stream() if stream is None else stream
        for chunk in self._chunks(x, to, dispatch, label, timeout_s):
            if chunk.bytes > _ONE_BLOCK_BYTES:
                self._run_chunk("send", chunk, AWAIT, stream)
                self._run_chunk("send", chunk, COPY | PUBLISH, stream)
            else:
                self._run_chunk("send", chunk, AWAIT | COPY | PUBLISH, stream)

    def recv(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        source: int,
        dispatch: int,
        label: int = 0,
        timeout_s: float | None = None,
        begun: torch.cuda.Event | None = None,
    ) -> Tensor:
        """Enqueues the arrival of the tensor that `source` sends under this dispatch and label.

        begun: an event, recorded on torch's current stream when the first chunk has arrived.
        """
        x = torch.empty(tuple(shape), dtype=dtype, device=f"cuda:{self.device}")
        stream = self.stream()
        for chunk in self._chunks(x, source, dispatch, label, timeout_s):
            if begun is not None or chunk.bytes > _ONE_BLOCK_BYTES:
                self._run_chunk("recv", chunk, AWAIT, stream)
            if begun is not None:
                begun.record()
                begun = None
            self._run_chunk("recv", chunk, AWAIT | COPY, stream)
        return x

    def replace_peer(self, rank: int, fd: int, incarnation: int) -> None:
        """As `Endpoint.replace_peer`; waits for the device, since memory is unmapped."""
        torch.cuda.synchronize(self.device)
        old = self.arenas.pop(rank, None)
        self.arenas[rank] = self._inbox(rank).open_peer(fd)
        self.incarnations[rank] = incarnation
        self._mapped.clear()
        address = self.context + Context.base.offset + 8 * rank
        self.driver.write(address, self.arenas[rank].address.to_bytes(8, "little"))
        self._unclean.add(rank)
        self._restart(rank)
        if old is not None:
            old.close()

    def restart_edges(self, peers: Sequence[int]) -> None:
        """As `Endpoint.restart_edges`, after all survivors have left the dispatch on the device, too.

        A survivor without such an edge calls it with no peers, since exchanges leave words behind, too.
        """
        self._unclean.update(self.incarnations.keys() - {self.rank})
        for peer in peers:
            if peer != self.rank:
                self._restart(peer)

    def close(self) -> None:
        """Unmaps everything, after the device has finished; harmless when repeated."""
        if not self.context:
            return
        torch.cuda.synchronize(self.device)
        self.prepared.clear()
        self._views.clear()
        for arena in (*self.arenas.values(), *filter(None, [self._host])):
            arena.close()
        self.control.close()
        self.driver.call("cuMemFree_v2", self.context)
        self.context = 0

    def _write_context(self) -> None:
        context = Context(plan=self.plan.as_native(), rank=self.rank)
        for rank, arena in self.arenas.items():
            context.base[rank] = arena.address
            context.incarnation[rank] = self.incarnations[rank]
        for rank in range(native.MAX_RANKS):  # also of ranks that are replaced before they were there
            context.inbox[rank] = self._inbox(rank).address
        context.aborted_through = self.control.aborted_through
        context.record = self.control.record
        self.driver.write(self.context, bytes(context))

    def _restart(self, peer: int) -> None:
        given = (c_uint64(self.context), c_int(peer), c_uint32(self.incarnations[peer]))
        launch = Launch(self.driver, self.kernels["restart_edge"], *given, grid=1, block=1)
        launch.run(self._own_stream.cuda_stream)
        self._own_stream.synchronize()

    def _chunks(
        self, x: Tensor, peer: int, dispatch: int, label: int, timeout_s: float | None
    ) -> list[Chunk]:
        if peer not in self.arenas:
            raise LayoutError(f"rank {peer} has no arena here")
        total, limit = x.numel() * x.element_size(), self.plan.post_bytes
        fixed = {"dispatch": dispatch, "timeout_ns": nanoseconds(timeout_s), "peer": peer, "label": label}
        fixed["link_mb_per_s"] = self._mb_per_s if self.are_far([peer]) else 0
        return [
            Chunk(self.context, x.data_ptr() + at, min(limit, total - at), chunk=at // limit, **fixed)
            for at in range(0, max(total, 1), limit)
        ]

    def _run_chunk(self, name: str, chunk: Chunk, steps: int, stream: int) -> None:
        chunk.steps = steps
        grid = _TRANSFER_BLOCKS if steps & COPY and chunk.bytes > _ONE_BLOCK_BYTES else 1
        block = _BLOCK if steps & COPY else _WAITING_BLOCK
        Launch(self.driver, self.kernels[name], chunk, grid=grid, block=block).run(stream)


class DispatchOutcome:
    """How a dispatch went on this rank; valid when the device has reached the note."""

    def __init__(
        self, endpoint: CudaEndpoint, dispatch: int, sources: Collection[int], *, note: Tensor
    ) -> None:
        self._endpoint, self._dispatch, self._sources, self._note = endpoint, dispatch, sources, note
        source = endpoint.context_bytes_1d
        for at, offset, num_bytes in _NOTES:
            self._note[at : at + num_bytes].copy_(source[offset : offset + num_bytes], non_blocking=True)

    def require(self) -> None:
        """Raises the failure, if any, as the CPU's collectives and transfers do."""
        content = self._note.numpy().tobytes()
        record = native.RecordStruct.from_buffer_copy(content)
        if record.status != native.OK and record.dispatch == self._dispatch:
            raise Failure.from_record(record).as_error()
        broken = (c_int * native.MAX_RANKS).from_buffer_copy(content, ctypes.sizeof(native.RecordStruct))
        for source in self._sources:
            if broken[source]:
                raise self._endpoint._transfer_failure(source, broken[source], self._dispatch).as_error()


_RECORD_OFFSET = Context.task.offset + native.TaskStruct.failure.offset
_BROKEN_OFFSET = Context.edges.offset + Edges.broken.offset
_RECORD_BYTES = ctypes.sizeof(native.RecordStruct)
_NOTE_BYTES = _RECORD_BYTES + 4 * native.MAX_RANKS
_NUM_NOTES = 16
_NOTES = ((0, _RECORD_OFFSET, _RECORD_BYTES), (_RECORD_BYTES, _BROKEN_OFFSET, 4 * native.MAX_RANKS))
"""What a note copies from the context: (position in the note, offset, bytes)."""


def as_tensor(address: int, num_bytes: int, device: int) -> Tensor:
    """Bytes of this device."""
    interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    memory = SimpleNamespace(__cuda_array_interface__=interface)
    return torch.as_tensor(memory, device=f"cuda:{device}")
