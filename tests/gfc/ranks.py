"""Real ranks for tests: forked processes that run functions on command.

Forked, so that torch is imported once; every rank keeps to one thread.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch

from gfgen.gfc.arena import Arena, ArenaPlan, create_arena
from gfgen.gfc.endpoint import Endpoint

Program = Callable[..., Any]
_FORK = multiprocessing.get_context("fork")
REPLY_TIMEOUT_S = 60.0
"""A hang ends a test; no test waits this long otherwise."""


class Ranks:
    """Processes with an endpoint each, the host's view of their arenas, and their lives."""

    def __init__(self, num_ranks: int, *, plan: ArenaPlan | None = None, timeout_s: float = 30.0) -> None:
        # Small arenas: exchanges of a few KB already need several rounds.
        self.plan = plan or ArenaPlan(data_bytes=1 << 16, post_bytes=1 << 10)
        self.timeout_s = timeout_s
        self.incarnations = dict.fromkeys(range(num_ranks), 1)
        self.fds = {rank: create_arena(self.plan, rank=rank, incarnation=1) for rank in range(num_ranks)}
        self.pipes: dict[int, Connection] = {}
        self.processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self.dispatch = 0
        for rank in range(num_ranks):
            self._start(rank)

    def next_dispatch(self) -> int:
        self.dispatch += 1
        return self.dispatch

    def submit(self, rank: int, program: Program, *arguments: Any) -> None:
        self.pipes[rank].send((program, arguments))

    def result(self, rank: int) -> Any:
        """What the rank's oldest open program returned; an exception it raised is returned, too."""
        assert self.pipes[rank].poll(REPLY_TIMEOUT_S), f"rank {rank} hangs"
        return self.pipes[rank].recv()

    def run(self, ranks: Iterable[int], program: Program, *arguments: Any) -> list[Any]:
        ranks = list(ranks)
        for rank in ranks:
            self.submit(rank, program, *arguments)
        return [self.result(rank) for rank in ranks]

    def arena(self, rank: int) -> Arena:
        return Arena(self.fds[rank], self.plan, rank=rank, incarnation=self.incarnations[rank])

    def abort(self, rank: int, dispatch: int) -> None:
        arena = self.arena(rank)
        arena.abort_through(dispatch)
        arena.close()

    def kill(self, rank: int) -> None:
        """SIGKILL, and the reaping that has to come before anyone goes on."""
        process = self.processes[rank]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def revive(self, rank: int) -> None:
        """A new incarnation; survivors map its arena in place of the old one."""
        self.incarnations[rank] += 1
        os.close(self.fds[rank])
        incarnation = self.incarnations[rank]
        self.fds[rank] = create_arena(self.plan, rank=rank, incarnation=incarnation)
        self._start(rank)
        for peer in self.processes:
            if peer != rank:
                # A descriptor number means nothing in another process: reopen it by way of /proc.
                path = f"/proc/{os.getpid()}/fd/{self.fds[rank]}"
                self.submit(peer, _replace, rank, path, incarnation)
                assert self.result(peer) is None

    def close(self) -> None:
        for rank, process in self.processes.items():
            if process.is_alive():
                self.pipes[rank].send(None)
            process.join(5)
            if process.is_alive():
                self.kill(rank)
        for fd in self.fds.values():
            os.close(fd)

    def _start(self, rank: int) -> None:
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=self._serve, args=(rank, theirs), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads; torch's are idle, and children use one.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self.pipes[rank], self.processes[rank] = ours, process

    def _serve(self, rank: int, pipe: Connection) -> None:
        torch.set_num_threads(1)
        endpoint = Endpoint(
            self.plan,
            rank=rank,
            fds=self.fds,
            incarnations=self.incarnations,
            timeout_s=self.timeout_s,
        )
        while (command := pipe.recv()) is not None:
            program, arguments = command
            try:
                pipe.send(program(endpoint, *arguments))
            except Exception as error:  # the test looks at it
                pipe.send(error)
        endpoint.close()


def _replace(endpoint: Endpoint, rank: int, path: str, incarnation: int) -> None:
    fd = os.open(path, os.O_RDWR)
    endpoint.replace_peer(rank, fd, incarnation)
    os.close(fd)
