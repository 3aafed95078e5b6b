"""The record of a failed wait: which rank waited for which, in which dispatch, and what the line held."""

from __future__ import annotations

from dataclasses import dataclass

from gfgen.errors import AbortedError, CollectiveError, PeerTimeoutError, ProtocolError
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
            expected=_word(record.expected),
            seen=_word(record.seen),
        )

    def __str__(self) -> str:
        where = f"rank {self.rank}, dispatch {self.dispatch}"
        if self.status == native.STALE_MAP:
            return (
                f"{where}: the descriptor names incarnation {self.expected[1]} of rank {self.peer}, "
                f"whose arena is not mapped here (mapped: {self.seen[1]})"
            )
        if self.status == native.NOT_ENTERED:
            return f"{where}: a collective before the entry barrier (call enter first)"
        if self.status == native.NOT_RISING:
            return f"{where}: dispatch numbers must rise; the last one entered was not below it"
        if self.status == native.BROKEN_EDGE:
            return f"{where}: an earlier transfer with rank {self.peer} failed (restart_edges first)"
        if self.status == native.ABORTED and self.peer == self.rank:
            return f"{where}: aborted by the host"
        outcome = {
            native.TIMED_OUT: "timed out waiting for",
            native.ABORTED: "aborted by the host while waiting for",
            native.PROTOCOL: "got a signal that does not belong to",
        }[self.status]
        return (
            f"{where}: {outcome} the {self.waited_for} of rank {self.peer} "
            f"(expected {_text(self.expected)}, seen {_text(self.seen)})"
        )

    def as_error(self) -> CollectiveError:
        kinds: dict[int, type[CollectiveError]] = {
            native.TIMED_OUT: PeerTimeoutError,
            native.ABORTED: AbortedError,
            native.BROKEN_EDGE: AbortedError,  # not tried: an earlier failure is the cause
        }
        return kinds.get(self.status, ProtocolError)(str(self))


def _word(bits: int) -> tuple[int, int]:
    return bits >> 32, bits & 0xFFFFFFFF


def _text(word: tuple[int, int]) -> str:
    return f"sequence {word[1]} tag {word[0]:08x}"
