"""Arenas: the memory of one rank that all ranks and the host map.

The host creates one memfd per rank and incarnation and hands all of them to every worker; memory
of dead processes goes away with the last descriptor, so a crash leaves nothing in /dev/shm.
This module does not import torch: the control plane uses it to create arenas and to abort.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from dataclasses import dataclass

from gfgen.errors import AbortedError, CollectiveError, InputError, PeerTimeoutError, ProtocolError, RunError
from gfgen.gfc import native

# By line, in the pairs of csrc/gfc/plan.h.
_WAITED_FOR = ("entry", "exchange", "chunk", "credit")


@dataclass(frozen=True, slots=True)
class Failure:
    """The record that a rank leaves in its arena; words are (tag, sequence)."""

    status: int
    rank: int
    peer: int
    waited_for: str
    dispatch: int
    expected: tuple[int, int]
    seen: tuple[int, int]

    @classmethod
    def from_record(cls, record: native.RecordStruct) -> Failure:
        return cls(
            status=record.status,
            rank=record.rank,
            peer=record.peer,
            waited_for=_WAITED_FOR[record.line // 2],
            dispatch=record.dispatch,
            expected=divmod(record.expected, 1 << 32),
            seen=divmod(record.seen, 1 << 32),
        )

    def __str__(self) -> str:
        where = f"rank {self.rank}, dispatch {self.dispatch}"
        if self.status == native.STALE_MAP:
            return (
                f"{where}: the descriptor names incarnation {self.expected[1]} of rank {self.peer}, "
                f"whose arena is not mapped here (mapped: {self.seen[1]})"
            )
        if self.status == native.ABORTED and self.peer == self.rank:
            return f"{where}: aborted by the host"
        expected, seen = (f"sequence {word[1]} tag {word[0]:08x}" for word in (self.expected, self.seen))
        wait = f"the {self.waited_for} of rank {self.peer} (expected {expected}, seen {seen})"
        texts = {
            native.NOT_ENTERED: "a collective before the entry barrier (call enter first)",
            native.NOT_RISING: "dispatch numbers must rise; the last one entered was not below it",
            native.BROKEN_EDGE: f"an earlier transfer with rank {self.peer} failed (restart_edges first)",
            native.TIMED_OUT: f"timed out waiting for {wait}",
            native.ABORTED: f"aborted by the host while waiting for {wait}",
            native.PROTOCOL: f"got a signal that does not belong to {wait}",
        }
        return f"{where}: {texts[self.status]}"

    def as_error(self) -> CollectiveError:
        kinds: dict[int, type[CollectiveError]] = {
            native.TIMED_OUT: PeerTimeoutError,
            native.ABORTED: AbortedError,
            native.BROKEN_EDGE: AbortedError,  # not tried: an earlier failure is the cause
        }
        return kinds.get(self.status, ProtocolError)(str(self))


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The configured sizes, which determine every offset in an arena.

    data_bytes: for exchanges; larger ones take several rounds.
    post_bytes: one chunk of point-to-point; each source rank has two of them.
    first_sequence: the start of counts; tests start just before 2**32.
    """

    data_bytes: int = 64 * MIB
    post_bytes: int = MIB
    first_sequence: int = 0

    def __post_init__(self) -> None:
        # 64 KiB: 8 ranks x 2 banks x 5 kinds of groups keep inboxes of several lines each.
        if self.data_bytes < 1 << 16 or self.post_bytes < 1 << 10 or self.post_bytes % 128:
            raise InputError(
                f"arena sizes: data_bytes must be at least 65536 (got {self.data_bytes}), post_bytes a "
                f"multiple of 128 and at least 1024 (got {self.post_bytes})"
            )

    def as_native(self) -> native.PlanStruct:
        return native.PlanStruct(self.data_bytes, self.post_bytes, self.first_sequence, 0)

    @property
    def arena_bytes(self) -> int:
        return int(native.library().gfc_arena_bytes(self.as_native()))

    @property
    def hash(self) -> int:
        """Equal on ranks that agree on every offset."""
        return int(native.library().gfc_plan_hash(self.as_native()))


def create_arena(plan: ArenaPlan, *, rank: int, incarnation: int, num_bytes: int = 0) -> int:
    """File descriptor of a fresh arena; the caller owns it.

    num_bytes: with what GPUs need behind it (device_arena.arena_bytes); 0: nothing.
    Pages are allocated when first written, so an unused arena costs next to nothing.
    """
    fd = os.memfd_create(f"gfc-{rank}.{incarnation}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, max(num_bytes, plan.arena_bytes))
    # Shrinking would turn every rank's next access into SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    address = map_memory(fd, plan.arena_bytes)
    native.library().gfc_arena_format(address, plan.as_native(), rank, incarnation)
    native.library().gfc_arena_unmap(address, plan.arena_bytes)
    return fd


class Arena:
    """One rank's arena, mapped into this process. Does not own the file descriptor."""

    def __init__(self, fd: int, plan: ArenaPlan, *, rank: int, incarnation: int) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self._num_bytes = plan.arena_bytes
        self.address = map_memory(fd, self._num_bytes)
        native_plan = plan.as_native()
        if not native.library().gfc_arena_check(self.address, native_plan, rank, incarnation):
            self.close()
            raise ProtocolError(
                f"the arena given for rank {rank}, incarnation {incarnation} was made for another "
                f"rank, incarnation or plan (own plan: {plan}, hash {plan.hash:016x})"
            )

    def abort_through(self, dispatch: int) -> None:
        """Ends every wait of this rank in dispatches up to this number; they raise AbortedError.

        Rises only: later dispatches are not touched, so it need not be cleared and may come late.
        """
        native.library().gfc_arena_abort_through(self.address, dispatch)

    def last_failure(self) -> Failure | None:
        """The last failed wait of this rank; read it after the rank has reported or died."""
        record = native.RecordStruct()
        native.library().gfc_arena_last_failure(self.address, record)
        return Failure.from_record(record) if record.status != native.OK else None

    def close(self) -> None:
        if self.address:
            native.library().gfc_arena_unmap(self.address, self._num_bytes)
            self.address = 0


def map_memory(fd: int, num_bytes: int) -> int:
    """Where this process maps an arena. Raises: ProtocolError if it is smaller."""
    if os.fstat(fd).st_size < num_bytes:
        raise ProtocolError(f"an arena of {os.fstat(fd).st_size} bytes, but its plan has {num_bytes}")
    address = int(native.library().gfc_arena_map(fd, num_bytes))
    if not address:
        reason = os.strerror(ctypes.get_errno())
        raise RunError(f"mapping an arena of {num_bytes} bytes failed: {reason}")
    return address


CONTROL_PLAN = ArenaPlan(data_bytes=1 << 16, post_bytes=1 << 10)
"""Sizes of the arena that serves as the page in host memory of a rank on a GPU."""
