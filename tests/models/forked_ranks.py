"""Ranks as forked processes with arenas, for tests: each runs functions on command.

One process of the fork server loads the adapters, once, and forks the ranks: it has one thread, so no rank
inherits a lock that another thread of the tests' process held. Values travel as bytes.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from forked_modules import fork_server
from stepping_process import dumps, loads

from gfgen.gfc.arena import ArenaPlan, create_arena
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import Endpoint
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import Parallel, parallel_from

REPLY_TIMEOUT_S = 120
PLAN = ArenaPlan(data_bytes=1 << 20, post_bytes=1 << 12)

Program = Callable[..., Any]


class ForkedRanks:
    """Processes around adapters of their own; `run` makes the ranks of a layout work together."""

    def __init__(self, num_ranks: int, make_program: Callable[..., Program], *arguments: Any) -> None:
        """The function and its arguments are pickled; what it returns need not be."""
        context = fork_server()
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._pipes: list[Connection] = [ours for ours, _ in pipes]
        self._dispatch = 0
        others = [theirs for _, theirs in pipes]
        self._process = context.Process(target=_fork_ranks, args=(others, make_program, arguments))
        self._process.start()
        for theirs in others:
            theirs.close()

    def run(self, layout: Layout, *arguments: Any) -> list[Any]:
        """What the program returns on each rank of the layout, by slot."""
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
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()  # its ranks die with it

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


def _fork_ranks(pipes: Sequence[Connection], make_program: Callable[..., Program], arguments: Any) -> None:
    """The process of the fork server: it ends after its ranks."""
    torch.set_num_threads(1)
    program = make_program(*arguments)
    fds = {rank: create_arena(PLAN, rank=rank, incarnation=1) for rank in range(len(pipes))}
    for rank, pipe in enumerate(pipes):
        if os.fork() == 0:
            try:
                for other in pipes:
                    if other is not pipe:
                        other.close()  # while it is open, the end of its rank goes unseen
                _serve(rank, fds, pipe, program)
            finally:
                os._exit(0)
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        os.wait()


def _serve(rank: int, fds: dict[int, int], pipe: Connection, program: Program) -> None:
    endpoint = Endpoint(PLAN, rank=rank, fds=fds, incarnations=dict.fromkeys(fds, 1), timeout_s=60)
    while True:
        try:
            dispatch, layout, arguments = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(REPLY_TIMEOUT_S - 10)  # a rank that hangs shows where
        try:
            group = endpoint.group(Descriptor(dispatch, layout, (1,) * layout.degree))
            group.enter()
            parallel: Parallel = parallel_from(group)
            pipe.send(dumps(program(parallel, *loads(arguments))))
        except Exception as error:  # the test shows it
            pipe.send(repr(error))
        faulthandler.cancel_dump_traceback_later()
