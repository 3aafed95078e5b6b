"""Groups of ranks and their collectives on GPU tensors, with the interface of `gfgen.gfc.group`.

Calls enqueue kernels on torch's current stream. Results are fresh tensors. Only those asked for `in_arena`
lie in this rank's arena if they fit in a bank; they must never leave an operator that is opaque to compilers.

An arena has two banks for each kind of group, which exchanges use in turn: the exchange after the next one
overwrites a result, and other ranks may begin it as soon as this rank has begun the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfgen.errors import LayoutError
from gfgen.gfc import native
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.kernels import MAX_MOVES, NUM_BANKS, PAIR, Exchange, Launch, Move
from gfgen.gfc.cuda.moves import TensorMove, move_of, offsets_of
from gfgen.gfc.cuda.selector import MIN_FLAGGED_UNIT, KernelChoice
from gfgen.gfc.descriptor import GROUP_KINDS, Descriptor, GroupKind, subgroup_slots
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import Resharding, contiguous_stride
from gfgen.layout import Degrees, shard_bounds, with_torus

_THREADS = 512
_NOWHERE = 16
_IN_FLIGHT = 8  # units that a thread of gfc_exchange has under way


class DispatchState:
    """A dispatch on the host's side: how many exchanges of each kind this process has enqueued.

    The device counts the same. The parity of a count selects the bank of the next exchange.
    """

    __slots__ = ("counts", "dispatch", "has_entered", "timeout_ns")

    def __init__(self, descriptor: Descriptor, timeout_ns: int) -> None:
        self.dispatch = descriptor.dispatch
        self.timeout_ns = timeout_ns  # of each wait behind the entry barrier
        self.counts = [0] * native.NUM_KINDS
        self.has_entered = False


class Bank(NamedTuple):
    """Which halves of the arena serve a kind of group."""

    offsets: tuple[int, ...]
    num_bytes: int


class ResultSpec(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # known beforehand: torch.empty_strided takes half the time of torch.empty
    dtype: torch.dtype
    offset: int  # in the bank


class Prepared(NamedTuple):
    launch: Launch
    results: tuple[ResultSpec, ...]
    pointers: tuple[int, ...]  # offsets of each tensor's pair of addresses in the arguments


class CudaGroup(Collectives):
    """The ranks of a dispatch, or a subgroup of them, as one rank sees it.

    endpoint: a `CudaEndpoint`, which makes its groups (device_endpoint.py).
    """

    __slots__ = (
        "_endpoint",
        "_kind",
        "_most_blocks",
        "_run",
        "_slot_number",
        "bank",
        "descriptor",
        "is_far",
        "ranks",
        "room_bytes",
        "slot",
    )

    def __init__(
        self, endpoint: Any, descriptor: Descriptor, run: DispatchState, *, kind: GroupKind = "whole"
    ) -> None:
        layout = descriptor.layout
        key = (layout.degrees, kind, layout.slot_of(endpoint.rank))
        group_slot = endpoint.group_slots.get(key)
        if group_slot is None:
            group_slot = endpoint.group_slots[key] = _group_slot(
                endpoint.plan, *key, number=len(endpoint.group_slots)
            )
        slots, self.slot, self._kind, self.bank, self._slot_number = group_slot
        self._endpoint, self._run = endpoint, run
        self._most_blocks = endpoint.kernels.num_multiprocessors
        self.descriptor = descriptor
        self.size = len(slots)
        self.room_bytes = None if self.size == 1 else self.bank.num_bytes
        is_whole = self.size == len(layout.ranks)
        self.ranks = layout.ranks if is_whole else tuple([layout.ranks[slot] for slot in slots])
        self.is_far = endpoint.are_far(self.ranks)

    def beside(self, max_blocks: int) -> CudaGroup:
        """The same ranks; exchanges use few blocks, so that the rest of the device can compute.

        For calls on a separate stream. They must follow all earlier exchanges of this rank and precede all
        later ones: two exchanges at a time would share the context's counters.
        """
        sparing = copy(self)
        sparing._most_blocks = min(self._most_blocks, self._endpoint.beside_blocks or max_blocks)
        return sparing

    def subgroup(self, kind: GroupKind) -> CudaGroup:
        return CudaGroup(self._endpoint, self.descriptor, self._run, kind=kind)

    def of_kind(self, kind: int) -> CudaGroup:
        """As `subgroup`, by the kind's native number."""
        return self.subgroup(next(name for name, number in GROUP_KINDS.items() if number == kind))

    def enter(self) -> None:
        """Enqueues the entry barrier of the dispatch: once, on the whole layout, before anything else."""
        self._endpoint.bind(self.descriptor, timeout_ns=self._run.timeout_ns)
        self._run.has_entered = True

    def finish(self) -> None:
        torch.cuda.current_stream(self._endpoint.device).synchronize()
        self._endpoint.check(self._run.dispatch)

    def barrier(self) -> None:
        """Work enqueued after it runs when every rank of the group has reached the barrier."""
        if self.size > 1:
            self._move((), None, in_arena=False)

    def align_banks(self) -> None:
        """Makes the next exchange of each kind use the first bank, as the first one of a dispatch does.

        A kind whose next exchange would use the second bank gets a barrier. A graph captured before a group
        is entered starts with the first bank. If one rank replays it and others launch the same exchanges,
        all of them must start there.
        """
        for kind, count in enumerate(self._run.counts):
            if count % NUM_BANKS:
                self.of_kind(kind).barrier()

    def _move(
        self, tensors: Sequence[Tensor], resharding: Resharding | None, *, in_arena: bool
    ) -> tuple[Tensor, ...]:
        endpoint, run = self._endpoint, self._run
        in_arena = in_arena and not self.is_far
        if self.size == 1:
            return tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
        if endpoint.failed.value:
            endpoint.check(run.dispatch)
        assert run.has_entered, "a collective before the entry barrier"
        call: list[object] = [self._slot_number, self._most_blocks, self.is_far, resharding, in_arena]
        pointers = []
        for x in tensors:
            at = x.data_ptr()
            pointers.append(at)
            call += (x.shape, x.stride(), x.dtype, at & 15)
        key = tuple(call)
        prepared = endpoint.prepared.get(key)
        if prepared is None:
            prepared = endpoint.prepared[key] = self._prepare(tensors, resharding, in_arena=in_arena)
        if isinstance(prepared, Prepared):
            return self._launch(prepared, pointers, in_arena=in_arena)
        assert resharding is not None
        # Strides or addresses that no kernel takes, or more than a bank holds.
        if prepared == "strides":
            dense = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
            return self._move(dense, resharding, in_arena=in_arena)
        return tuple(self._in_rounds(x, resharding) for x in tensors)

    def _launch(self, prepared: Prepared, pointers: list[int], *, in_arena: bool) -> tuple[Tensor, ...]:
        endpoint, counts, kind = self._endpoint, self._run.counts, self._kind
        launch, buffer = prepared.launch, prepared.launch.buffer
        results: list[Tensor] = []
        bank = self.bank.offsets[counts[kind] % NUM_BANKS] if in_arena else 0
        for (shape, strides, dtype, offset), at, pointer in zip(
            prepared.results, prepared.pointers, pointers, strict=True
        ):
            if in_arena:
                result = endpoint.view(bank + offset, shape, dtype)
            else:
                result = torch.empty_strided(shape, strides, dtype=dtype, device=endpoint.torch_device)
            # 0 means that the result stays in the arena. An empty tensor has address 0, too.
            output = 0 if in_arena else result.data_ptr() or _NOWHERE
            PAIR.pack_into(buffer, at, pointer, output)
            results.append(result)
        launch.run(endpoint.stream())
        counts[kind] += 1
        return tuple(results)

    def _prepare(
        self, tensors: Sequence[Tensor], resharding: Resharding | None, *, in_arena: bool
    ) -> Prepared | str:
        """The launch for such tensors, or why there is none: "strides" or "space".

        Whether messages carry flags depends only on what all ranks know. If a rank's own strides or
        addresses decided, ranks could wait in different places.
        """
        over_host = self._endpoint.host_choice if self.is_far else None
        if resharding is None:
            choice = over_host or KernelChoice("flagged", 1)
            return self._prepare_launch((), [], choice, unit_bytes=8, tensors=())
        if len(tensors) > MAX_MOVES:
            return "space"
        if len(resharding.concat_sizes) != self.size:
            raise LayoutError(f"{self.size} ranks need as many sizes, got {resharding.concat_sizes}")
        moves = []
        unit_bytes = dense_unit_bytes = 16
        for x in tensors:
            move = move_of(x.shape, x.stride(), x.element_size(), slot=self.slot, resharding=resharding)
            if move is None:
                return "strides"
            moves.append(move)
            dense_unit_bytes = min(dense_unit_bytes, move.dense_unit_bytes)
            pointer = x.data_ptr() & 15 if x.numel() else 0
            unit_bytes = min(unit_bytes, move.unit_bytes, pointer & -pointer or 16)
        offsets, num_bytes = offsets_of(moves)
        choice = over_host or self._endpoint.selector.choose(
            num_ranks=self.size,
            in_arena=in_arena,
            pair_bytes=sum(move.pair_bytes for move in moves),
            unit_bytes=unit_bytes,
            dense_unit_bytes=dense_unit_bytes,
            row_bytes=min(move.row_bytes for move in moves),
        )
        if choice.path == "flagged" and unit_bytes < MIN_FLAGGED_UNIT:
            return "strides"
        if num_bytes > self.bank.num_bytes and (choice.path != "flagged" or in_arena):
            return "space"
        return self._prepare_launch(moves, offsets, choice, unit_bytes=unit_bytes, tensors=tensors)

    def _prepare_launch(
        self,
        moves: Sequence[TensorMove],
        offsets: Sequence[Sequence[int]],
        choice: KernelChoice,
        *,
        unit_bytes: int,
        tensors: Sequence[Tensor],
    ) -> Prepared:
        endpoint = self._endpoint
        exchange = Exchange(endpoint.context, self._kind, len(moves))
        exchange.unit_bytes, exchange.tile_bytes = unit_bytes, choice.tile_bytes
        results = []
        for idx, (move, offset, x) in enumerate(zip(moves, offsets, tensors, strict=True)):
            exchange.moves[idx] = move.placed(offset)
            shape = move.result_shape
            results.append(ResultSpec(shape, contiguous_stride(shape), x.dtype, offset[self.slot]))
        longest = max((move.pair_bytes for move in moves), default=0)
        num_moves = max(1, len(moves))
        limit = min(choice.blocks, self._most_blocks)
        block, shared_bytes = _THREADS, 0
        if choice.path == "staged":
            name, wanted = "staged", (self.size - 1) * max(1, -(-longest * len(moves) // choice.tile_bytes))
            exchange.num_slices = exchange.num_keepers = max(1, min(limit // 2, wanted))
            grid = exchange.num_slices + exchange.num_keepers
        elif choice.path == "flagged":
            name, items = "flagged", self.size * num_moves
            dense_bytes = moves[0].dense_bytes if len(moves) == 1 else 0
            if dense_bytes or not moves:
                name, exchange.dense_bytes = "flagged_dense", dense_bytes
            warps_per_block = _THREADS // 32
            most = max(1, limit * warps_per_block // items)
            exchange.num_slices = min(most, max(1, -(-longest // (8 * 32))))
            grid = -(-items * exchange.num_slices // warps_per_block)
        else:
            items = (self.size - 1) * num_moves
            per_block = unit_bytes * _THREADS * _IN_FLIGHT // 2
            name = "exchange"
            if choice.path == "bulk":
                name, block, per_block = "bulk", 32, choice.tile_bytes
                shared_bytes = 4 * choice.tile_bytes
            wanted = max(1, -(-longest // per_block))
            # Own memory is many times faster than a link, so few blocks copy what stays here.
            exchange.num_keepers = min(wanted * num_moves, max(1, limit // 12))
            at_once = 1 if choice.in_turn else items
            most = max(1, (limit - exchange.num_keepers) // at_once)
            exchange.num_slices = min(most, wanted)
            grid = at_once * exchange.num_slices + exchange.num_keepers
        sizes = {"grid": grid, "block": block, "shared_bytes": shared_bytes}
        launch = Launch(endpoint.driver, endpoint.kernels[name], exchange, **sizes)
        first = Exchange.moves.offset
        size_of_move = Exchange.moves.size // MAX_MOVES
        pointers = tuple(first + idx * size_of_move + Move.input.offset for idx in range(len(moves)))
        return Prepared(launch, tuple(results), pointers)

    def _in_rounds(self, x: Tensor, resharding: Resharding) -> Tensor:
        """An exchange that does not fit in a bank, in rounds: one part of each shard at a time."""
        split_dim, concat_dim, splits, concats, is_rotated = resharding
        shape = list(x.shape)
        shape[concat_dim] = sum(concats)
        if split_dim >= 0:
            shape[split_dim] = splits[self.slot]
        largest = [max(splits) if dim == split_dim else length for dim, length in enumerate(shape)]
        needed = prod(largest) * x.element_size()  # of all ranks, so that each takes as many rounds
        num_rounds = min(max(concats), needed * 11 // (10 * max(1, self.bank.num_bytes)) + 2)
        if num_rounds < 2:
            reason = f"does not fit in a bank of {self.bank.num_bytes} bytes, at all"
            raise LayoutError(f"{tuple(x.shape)} {reason}")
        result = x.new_empty(shape)
        order = [(self.slot * is_rotated + idx) % self.size for idx in range(self.size)]
        for idx in range(num_rounds):
            bounds = [shard_bounds(length, num_rounds, idx) for length in concats]
            begin, end = bounds[self.slot]
            lengths = tuple(stop - start for start, stop in bounds)
            piece = x.narrow(concat_dim, begin, end - begin)
            part_of = resharding._replace(concat_sizes=lengths)
            got = self._move((piece,), part_of, in_arena=False)[0]
            at = 0
            parts = torch.split(got, [lengths[slot] for slot in order], concat_dim)
            for slot, part in zip(order, parts, strict=True):
                result.narrow(concat_dim, at + bounds[slot][0], lengths[slot]).copy_(part)
                at += concats[slot]
        return result


class GroupSlot(NamedTuple):
    """A rank's slot in a kind of group, for layouts of any ranks."""

    slots: tuple[int, ...]
    slot: int
    kind: int
    bank: Bank
    number: int  # among those of the endpoint, as part of keys


def _group_slot(
    plan: ArenaPlan, degrees: Degrees, kind: GroupKind, layout_slot: int, *, number: int
) -> GroupSlot:
    slots = subgroup_slots(degrees, kind, layout_slot)
    native_kind = canonical(degrees, GROUP_KINDS[kind])
    bank = bank_of(plan.data_bytes, plan.post_bytes, degrees, native_kind)
    return GroupSlot(slots, slots.index(layout_slot), native_kind, bank, number)


@cache
def canonical(degrees: Degrees, kind: int) -> int:
    """csrc/gfc/descriptor.h: kinds with the same ranks are one."""
    cfg, ulysses, ring, torus = with_torus(degrees)
    others = {native.RING: ulysses * torus, native.ULYSSES: ring * torus, native.TORUS: ulysses * ring}
    if others.get(kind) == 1:
        kind = native.HALF
    if kind == native.PAIR and ulysses * ring * torus == 1:
        kind = native.WHOLE
    if kind == native.HALF and cfg == 1:
        kind = native.WHOLE
    return kind


@cache
def bank_of(data_bytes: int, post_bytes: int, degrees: Degrees, kind: int) -> Bank:
    """csrc/gfc/plan.h: the exchange_inbox of a group of one rank, which is the whole bank."""
    cfg, ulysses, ring, torus = with_torus(degrees)
    half = ulysses * ring * torus
    sizes = (cfg * half, half, ulysses, ring, cfg, torus)
    kinds = [k for k in range(native.NUM_KINDS) if canonical(degrees, k) == k and sizes[k] > 1]
    if kind not in kinds:
        return Bank((0, 0), 0)
    posts = 4096 + native.MAX_RANKS * 8 * 128
    data = -(-(posts + native.MAX_RANKS * NUM_BANKS * post_bytes) // 4096) * 4096
    bank = data_bytes // len(kinds) // NUM_BANKS
    first = kinds.index(kind) * NUM_BANKS
    offsets = tuple(data + (first + idx) * bank // 128 * 128 for idx in range(NUM_BANKS))
    return Bank(offsets, bank // 128 * 128)
