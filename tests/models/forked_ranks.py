"""Ranks as forked processes with arenas, for tests: each runs functions on command.

Forked, so that torch and the adapters are loaded once. Values travel as bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from stepping_process import dumps, loads

from gfgen.gfc.arena import ArenaPlan, create_arena
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import Endpoint
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import Parallel, parallel_from

REPLY_TIMEOUT_S = 120
PLAN = ArenaPlan(data_bytes=1 << 20, post_bytes=1 << 12)
_FORK = multiprocessing.get_context("fork")


class ForkedRanks:
    """Processes around the parent's adapters; `run` makes the ranks of a layout work together."""

    def __init__(self, num_ranks: int, program: Callable[..., Any]) -> None:
        self._num_ranks, self._program = num_ranks, program
        self._fork()

    def _fork(self) -> None:
        num_ranks, self._dispatch = self._num_ranks, 0
        fds = {rank: create_arena(PLAN, rank=rank, incarnation=1) for rank in range(num_ranks)}
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = _FORK.Pipe()
            self._pipes.append(ours)
            process = _FORK.Process(target=self._serve, args=(rank, fds, theirs), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns of forks beside threads; torch's are idle, and children use one.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._processes.append(process)
        for fd in fds.values():
            os.close(fd)

    def run(self, layout: Layout, *arguments: Any) -> list[Any]:
        """What the program returns on each rank of the layout, by slot.

        Waits of collectives are bounded, so a rank that says nothing has inherited a lock that some thread
        of the parent had at the fork: then the ranks are forked again, once.
        """
        self._submit(layout, arguments)
        if not self._pipes[layout.ranks[0]].poll(REPLY_TIMEOUT_S):
            for process in self._processes:
                process.kill()
            self.close()
            self._fork()
            self._submit(layout, arguments)
        return [self._reply(rank) for rank in layout.ranks]

    def run_refused(self, layout: Layout, *arguments: Any) -> str:
        """The error that the program raises on each rank of the layout: the same one."""
        self._submit(layout, arguments)
        errors = {str(self._said(rank)) for rank in layout.ranks}
        assert len(errors) == 1, errors
        return errors.pop()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def _submit(self, layout: Layout, arguments: tuple[Any, ...]) -> None:
        self._dispatch += 1
        for rank in layout.ranks:
            self._pipes[rank].send((self._dispatch, layout, dumps(arguments)))

    def _reply(self, rank: int) -> Any:
        reply = self._said(rank)
        assert isinstance(reply, bytes), reply
        return loads(reply)

    def _said(self, rank: int) -> Any:
        assert self._pipes[rank].poll(REPLY_TIMEOUT_S), f"rank {rank} does not reply"
        return self._pipes[rank].recv()

    def _serve(self, rank: int, fds: dict[int, int], pipe: Connection) -> None:
        for ours in self._pipes:
            ours.close()  # inherited; while it is open, the parent's closing goes unseen
        torch.set_num_threads(1)
        endpoint = Endpoint(PLAN, rank=rank, fds=fds, incarnations=dict.fromkeys(fds, 1), timeout_s=60)
        while True:
            try:
                dispatch, layout, arguments = pipe.recv()
            except EOFError:
                return
            try:
                group = endpoint.group(Descriptor(dispatch, layout, (1,) * layout.degree))
                group.enter()
                parallel: Parallel = parallel_from(group)
                pipe.send(dumps(self._program(parallel, *loads(arguments))))
            except Exception as error:  # the test shows it
                pipe.send(repr(error))
