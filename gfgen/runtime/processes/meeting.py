"""Introduces workers to their peers: all map each other's arenas before they take tasks."""

from __future__ import annotations

from collections.abc import Sequence, Set

from gfgen.runtime.ipc.arenas import RankArenas
from gfgen.runtime.ipc.messages import Arenas, PeerReplaced, ReplacePeer
from gfgen.runtime.processes.child import GONE, Phase, RankProcess


class Meeting:
    """Introduces workers to each other: all at once when they start, and later each new one to the others.

    A new worker takes tasks when all peers have answered. Otherwise a rank could restart its count of
    transfers after the first one from there, and wait for that one forever.
    """

    def __init__(
        self, arenas: RankArenas, workers: Sequence[RankProcess], islands: Sequence[Sequence[int]]
    ) -> None:
        self._arenas = arenas
        self._workers = workers
        """The pool's, by rank."""
        self._islands = islands
        self._counts_tokens: bool | None = None
        """Whether ranks pad texts. The first meeting decides this for all that come later."""
        self.held_back: set[int] = set()
        """Ranks that died, and whose new workers wait, because others may be inside their arenas."""

    def lose(self, rank: int) -> None:
        """A rank's worker is gone: nobody waits for its answer, and its successor is held back."""
        self.held_back.add(rank)
        for worker in self._workers:  # the successor is sent all arenas as they are then
            worker.unknown_to.discard(rank)

    def note_mapped(self, rank: int, message: PeerReplaced) -> None:
        """A rank knows a new worker."""
        worker = self._workers[message.rank]
        if worker.incarnation == message.incarnation:
            worker.unknown_to.discard(rank)

    def introduce(self) -> list[RankProcess]:
        """Introduce the workers that have loaded their models; returns those that all peers know."""
        new = [worker for worker in self._workers if worker.phase is Phase.INTRODUCING]
        if new and self._counts_tokens is None:
            if any(worker.phase is Phase.STARTING for worker in self._workers):
                return []
            living = [worker for worker in self._workers if worker.phase not in GONE]
            self._counts_tokens = all(worker.counts_tokens for worker in living)
            for worker in new:
                self._send_arenas(worker)
        for worker in new:
            if not worker.has_arenas and worker.rank not in self.held_back:
                self._welcome(worker)
        return [worker for worker in new if worker.has_arenas and not worker.unknown_to]

    def _welcome(self, worker: RankProcess) -> None:
        """Send a new worker all arenas, and its own to the others."""
        arena = self._arenas.arena(worker.rank)
        assert arena is not None, f"{worker.name} has no arena"
        self._send_arenas(worker)
        message = ReplacePeer(worker.rank, worker.incarnation)
        for other in self._peers(worker.rank):
            peer = self._workers[other]
            # A peer without arenas gets all of them when it is introduced itself.
            if peer.phase not in GONE and peer.has_arenas:
                worker.unknown_to.add(other)
                peer.tell(message, (arena,))

    def _send_arenas(self, worker: RankProcess) -> None:
        plan, island = self._arenas.plan, {worker.rank, *self._peers(worker.rank)}
        ranks, fds = self._arenas.known_to(worker.rank, among=island)
        incarnations = tuple([each.incarnation for each in self._workers])
        counts_tokens = bool(self._counts_tokens)
        worker.tell(Arenas(plan.data_bytes, plan.post_bytes, incarnations, ranks, counts_tokens), fds)
        worker.has_arenas = True

    def _peers(self, rank: int) -> Set[int]:
        """The ranks with which this one exchanges."""
        return set(next(island for island in self._islands if rank in island)) - {rank}
