"""Ranks as processes on GPUs, for measurements and tests: start, command, kill, restart.

The parent imports no torch and touches no GPU. Descriptors of arenas pass through the parent's
Unix sockets (SCM_RIGHTS), as they do through a control plane.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any, NamedTuple

from gfgen.errors import WorkerError
from gfgen.gfc.arena import CONTROL_PLAN, Arena, ArenaPlan, create_arena
from gfgen.gfc.cuda.device_arena import DeviceArena, HostArena, arena_bytes

if TYPE_CHECKING:
    from gfgen.gfc.cuda.device_endpoint import CudaEndpoint

# A program's first argument is the rank's endpoint; it is sent by name.
Program = Callable[..., Any]

REPLY_TIMEOUT_S = 300.0
_SPAWN = multiprocessing.get_context("spawn")


class CudaRanks:
    """`num_ranks` processes with a device each, or on `num_devices` that they share.

    near: sets of them that reach each other's memory; the others exchange through host memory. None: all do.
    Ranks that share a device take turns on it, so all waits may take that many times as long.
    """

    def __init__(
        self,
        num_ranks: int,
        plan: ArenaPlan,
        *,
        timeout_s: float = 30.0,
        num_devices: int = 0,
        near: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._near = {rank: frozenset(each) - {rank} for each in near for rank in each} if near else None
        self.num_devices = num_devices or num_ranks
        self.ranks_per_device = -(-num_ranks // self.num_devices)
        self.plan, self.timeout_s = plan, self.ranks_per_device * timeout_s
        self.reply_timeout_s = self.ranks_per_device * REPLY_TIMEOUT_S
        self.incarnations = dict.fromkeys(range(num_ranks), 1)
        self.control_fds: dict[int, int] = {}
        self.arena_fds: dict[int, int] = {}
        self.host_fds: dict[int, int] = {}
        self.pipes: dict[int, Connection] = {}
        self.processes: dict[int, BaseProcess] = {}
        self._dispatch = 0
        for begin in (self._start, self._take_arena, self._introduce, self.result):
            for rank in self.incarnations:
                begin(rank)

    def next_dispatch(self, count: int = 1) -> int:
        """The first of `count` unused dispatch numbers."""
        first = self._dispatch + 1
        self._dispatch += count
        return first

    def submit(self, rank: int, program: Program, *arguments: Any) -> None:
        self.pipes[rank].send((program, arguments))

    def result(self, rank: int, timeout_s: float | None = None) -> Any:
        """The result of the rank's oldest open program; raises WorkerError with its traceback."""
        timeout_s = self.reply_timeout_s if timeout_s is None else timeout_s
        if not self.pipes[rank].poll(timeout_s):
            raise WorkerError(f"rank {rank} did not answer within {timeout_s:.0f} s")
        is_ok, value = self.pipes[rank].recv()
        if not is_ok:
            raise WorkerError(f"rank {rank}: {value}")
        return value

    def run(self, ranks: Iterable[int], program: Program, *arguments: Any) -> list[Any]:
        """The results of a program on several ranks at once, in their order.

        Raises: WorkerError with the tracebacks of all ranks that fail. After the first, the waits of the
        others are aborted, because nobody may answer them.
        """
        ranks = list(ranks)
        for rank in ranks:
            self.submit(rank, program, *arguments)
        results: dict[int, Any] = {}
        errors: list[str] = []
        running = {self.pipes[rank]: rank for rank in ranks}
        while running:  # all of them, so that no result is taken for the next program's
            for pipe in wait(list(running), self.reply_timeout_s) or list(running):
                assert isinstance(pipe, Connection)
                rank = running.pop(pipe)
                try:
                    results[rank] = self.result(rank)
                except WorkerError as error:
                    errors.append(str(error))
            for rank in running.values() if errors else ():
                self.abort(rank, self._dispatch)
        if errors:
            raise WorkerError("\n".join(errors))
        return [results[rank] for rank in ranks]

    def abort(self, rank: int, dispatch: int) -> None:
        page = Arena(self.control_fds[rank], CONTROL_PLAN, rank=rank, incarnation=self.incarnations[rank])
        page.abort_through(dispatch)
        page.close()

    def kill(self, rank: int) -> None:
        """Kill the process and reap it, which must happen before other ranks continue."""
        process = self.processes[rank]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def close(self) -> None:
        for rank, process in self.processes.items():
            if process.is_alive():
                self.pipes[rank].send(None)
        for rank, process in self.processes.items():
            process.join(5)
            if process.is_alive():
                self.kill(rank)
        for fd in itertools.chain(
            *(fds.values() for fds in (self.control_fds, self.arena_fds, self.host_fds))
        ):
            os.close(fd)

    def _start(self, rank: int) -> None:
        (ours, theirs), number = _SPAWN.Pipe(), self.incarnations[rank]
        near = None if self._near is None else self._near[rank]
        setup = _Setup(self.plan, rank, rank % self.num_devices, number, self.timeout_s, near)
        process = _SPAWN.Process(target=_serve, args=(theirs, setup), daemon=True)
        process.start()
        theirs.close()
        self.pipes[rank], self.processes[rank] = ours, process
        self.control_fds[rank] = create_arena(CONTROL_PLAN, rank=rank, incarnation=number)
        self._send(rank, self.control_fds[rank])

    def _take_arena(self, rank: int) -> None:
        if self._near is not None:
            shape = {"incarnation": self.incarnations[rank], "num_bytes": arena_bytes(self.plan)}
            self.host_fds[rank] = create_arena(self.plan, rank=rank, **shape)
            self._send(rank, self.host_fds[rank])
            if not self._near[rank]:
                return
        if not self.pipes[rank].poll(self.reply_timeout_s):
            raise WorkerError(f"rank {rank} made no arena")
        self.arena_fds[rank] = recv_handle(self.pipes[rank])

    def _introduce(self, rank: int) -> None:
        peers = {peer: number for peer, number in self.incarnations.items() if peer != rank}
        self.pipes[rank].send(peers)
        for peer in peers:
            self._send(rank, self._arena(peer, source=rank))

    def _arena(self, rank: int, *, source: int) -> int:
        """The rank's arena that `source` writes to."""
        is_far = self._near is not None and source not in self._near[rank]
        return (self.host_fds if is_far else self.arena_fds)[rank]

    def _send(self, rank: int, fd: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        send_handle(self.pipes[rank], fd, pid)


class _Setup(NamedTuple):
    """What a rank's process begins with."""

    plan: ArenaPlan
    rank: int
    device: int
    incarnation: int
    timeout_s: float
    near: frozenset[int] | None


def _serve(pipe: Connection, setup: _Setup) -> None:
    """A rank's process: sets itself up, then runs programs until it gets None."""
    endpoint = _set_up(pipe, setup)
    pipe.send((True, None))
    while (command := pipe.recv()) is not None:
        program, arguments = command
        try:
            if program == "map":
                peer, number = arguments
                fd = recv_handle(pipe)
                endpoint.replace_peer(peer, fd, number)
                os.close(fd)
                pipe.send((True, None))
            else:
                pipe.send((True, program(endpoint, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    endpoint.close()
    # At once: NCCL's teardown waits for its peers and for graphs that captured it, which never ends here.
    os._exit(0)


def _set_up(pipe: Connection, setup: _Setup) -> CudaEndpoint:
    import torch

    from gfgen.gfc.cuda.device_endpoint import CudaEndpoint

    torch.set_num_threads(1)
    torch.cuda.set_device(setup.device)
    torch.zeros(1, device="cuda")
    control_fd = recv_handle(pipe)
    own = host = None
    if setup.near is not None:
        fd = recv_handle(pipe)
        host = HostArena.open(fd, setup.plan, device=setup.device)
        os.close(fd)
    if host is None or setup.near:
        own, fd = DeviceArena.create(setup.plan, device=setup.device)
        send_handle(pipe, fd, os.getppid())
        os.close(fd)
    incarnations: dict[int, int] = pipe.recv()
    peer_fds = {peer: recv_handle(pipe) for peer in incarnations}
    endpoint = CudaEndpoint(
        own,
        host=host,
        near=setup.near or (),
        rank=setup.rank,
        peer_fds=peer_fds,
        incarnations={**incarnations, setup.rank: setup.incarnation},
        control_fd=control_fd,
        timeout_s=setup.timeout_s,
    )
    for passed in peer_fds.values():
        os.close(passed)
    return endpoint
