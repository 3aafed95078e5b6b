"""What the fake worker has for collectives: a line for each source rank in every rank's arena.

    sequence, dispatch, start, length, payload     one piece of state; the sequence is stored last
    taken                                          how many pieces the receiver has taken
    entered                                        the dispatch that the source has entered
    shown, digest                                  what the source has computed in a dispatch

Counts belong to an edge and start anew with `restart`, as those of the real one do: a count that
does not fit is reported. Stores of a word are ordered as the machine orders them (x86: as
written); readers look at the word first.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

_WORD = struct.Struct("<Q")
_PIECE = struct.Struct("<QQQ32s")
_LINE_BYTES = 256
_MAX_RANKS = 8
_SEQUENCE, _DISPATCH, _TAKEN, _ENTERED, _SHOWN, _DIGEST = 0, 8, 72, 80, 88, 96
_POLL_S = 2e-4


class VoidError(Exception):
    """The dispatch was given up."""


class BrokenPromiseError(Exception):
    """The runtime has done what it promises not to do."""


class Mail:
    """One rank's view of all arenas; its own is fresh, and others may have written to it already."""

    def __init__(self, rank: int, fds: Sequence[int], incarnations: Sequence[int]) -> None:
        self.incarnations = dict(enumerate(incarnations))
        self._rank = rank
        self._maps = {peer: _map(fd) for peer, fd in enumerate(fds)}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def replace(self, peer: int, fd: int, incarnation: int) -> None:
        """A peer has a new arena."""
        self._maps[peer] = _map(fd)
        self.incarnations[peer] = incarnation
        self.restart([peer])

    def restart(self, peers: Iterable[int]) -> None:
        """Count from the beginning on the edges to and from these ranks."""
        for peer in peers:
            self._sent[peer] = self._received[peer] = 0
            line = _line(self._maps[self._rank], peer)
            self._maps[self._rank][line : line + _ENTERED] = bytes(_ENTERED)

    def send(self, piece: bytes, *, to: int, start: int, dispatch: int, is_void: Callable[[], bool]) -> None:
        """Put a piece into a peer's arena, as soon as it has taken the one before."""
        memory = self._maps[to]
        line = _line(memory, self._rank)
        _wait(lambda: _word(memory, line + _TAKEN) == self._sent[to], is_void)
        _PIECE.pack_into(memory, line + _DISPATCH, dispatch, start, len(piece), piece)
        self._sent[to] += 1
        _WORD.pack_into(memory, line, self._sent[to])

    def receive(self, *, source: int, dispatch: int, is_void: Callable[[], bool]) -> tuple[int, bytes]:
        """(start, piece): what a peer sends under this dispatch."""
        memory = self._maps[self._rank]
        line = _line(memory, source)
        expected = self._received[source] + 1
        _wait(lambda: _word(memory, line) >= expected, is_void)
        if _word(memory, line) != expected:
            raise BrokenPromiseError(f"piece {_word(memory, line)} from {source}, not {expected}")
        sent_for, start, length, piece = _PIECE.unpack_from(memory, line + _DISPATCH)
        if sent_for != dispatch:
            raise BrokenPromiseError(f"a piece from {source} for dispatch {sent_for}, not {dispatch}")
        self._received[source] = expected
        _WORD.pack_into(memory, line + _TAKEN, expected)
        return start, piece[:length]

    def enter(self, peers: Sequence[int], *, dispatch: int, is_void: Callable[[], bool]) -> None:
        """Wait until all have come to this dispatch."""
        for peer in peers:
            _WORD.pack_into(self._maps[peer], _line(self._maps[peer], self._rank) + _ENTERED, dispatch)
        for peer, line in self._own_lines(peers).items():
            self._wait_for(peer, line + _ENTERED, dispatch, is_void)

    def compare(
        self, digest: bytes, peers: Sequence[int], *, dispatch: int, is_void: Callable[[], bool]
    ) -> None:
        """Check that all have computed the same."""
        for peer in peers:
            memory = self._maps[peer]
            line = _line(memory, self._rank)
            memory[line + _DIGEST : line + _DIGEST + 32] = digest
            _WORD.pack_into(memory, line + _SHOWN, dispatch)
        own = self._maps[self._rank]
        for peer, line in self._own_lines(peers).items():
            self._wait_for(peer, line + _SHOWN, dispatch, is_void)
            if own[line + _DIGEST : line + _DIGEST + 32] != digest:
                raise BrokenPromiseError(f"dispatch {dispatch}: rank {peer} has computed something else")

    def _own_lines(self, peers: Sequence[int]) -> Mapping[int, int]:
        return {peer: _line(self._maps[self._rank], peer) for peer in peers if peer != self._rank}

    def _wait_for(self, peer: int, position: int, dispatch: int, is_void: Callable[[], bool]) -> None:
        memory = self._maps[self._rank]
        _wait(lambda: _word(memory, position) >= dispatch, is_void)
        if _word(memory, position) != dispatch:
            raise BrokenPromiseError(f"rank {peer} is in {_word(memory, position)} already, not {dispatch}")


def _wait(is_there: Callable[[], bool], is_void: Callable[[], bool]) -> None:
    while not is_there():
        if is_void():
            raise VoidError
        time.sleep(_POLL_S)


def _map(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, os.fstat(fd).st_size)


def _line(memory: mmap.mmap, source: int) -> int:
    """The lines lie at the arena's end, where the real collectives have room for data."""
    return len(memory) - (_MAX_RANKS - source) * _LINE_BYTES


def _word(memory: mmap.mmap, position: int) -> int:
    return int(_WORD.unpack_from(memory, position)[0])
