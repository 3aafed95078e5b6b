"""The front: the process that speaks HTTP (front_main.py starts it).

It is given two descriptors that the run has opened: the socket to it, and the one that clients connect to.
It ends when the run's end of the link is closed: after its answers if the run has said that it stops, at once
otherwise; and with the run, should that be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from gfgen import log
from gfgen.errors import GfgenError, OutputError
from gfgen.server.http.app import make_app
from gfgen.server.http.connections import ACCEPTED_AT_ONCE, connection_class, within_descriptors
from gfgen.server.http.guard import ApiKeys
from gfgen.server.http.streams import FEED_S, StateFeed
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import INPUTS_NAME
from gfgen.server.jobs.mirror import RunMirror
from gfgen.server.jobs.prometheus import ServerMetrics
from gfgen.server.jobs.service import FOLDERS, FORECAST_S, THUMBNAILS_NAME, JobService
from gfgen.server.jobs.store import STORE_NAME, Store
from gfgen.server.protocol.limits import BACKLOG
from gfgen.server.protocol.link import FrontSettings, MessageDecoder, pack
from gfgen.system.signals import leave_to_the_run

logger = logging.getLogger(__name__)

DRAIN_S = 3.0
"""For answers that are under way when the run has stopped."""
_CHUNK_BYTES = 1 << 18


class _Server(uvicorn.Server):
    """Leaves signals alone: the run decides when it is over."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; its `backlog` is for asyncio two things at once, of which it is wanted for one."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Front:
    """All that the front keeps, and its life."""

    def __init__(self, link: socket.socket, listener: socket.socket) -> None:
        self._link = link
        self._listener = listener
        self._writer: asyncio.StreamWriter | None = None
        self._desk: JobService | None = None
        self._is_lost = False
        """The run has gone without having said that it stops, or cannot be followed any more."""

    async def run(self) -> int:
        """Serve until the run ends; returns the exit status."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._link)
        framing = MessageDecoder()
        messages = await self._next(reader, framing)
        if not messages:
            return 1
        settings, *rest = messages
        assert isinstance(settings, FrontSettings)
        _configure_log(settings)
        store = Store(settings.output_dir / STORE_NAME, began_at=time.time())
        try:
            server = self._prepare(settings, store)
            helpers = [asyncio.create_task(work) for work in self._chores()]
            serving = asyncio.create_task(server.serve(sockets=[self._listener]))
            hearing = asyncio.create_task(self._hear(reader, framing, rest))
            ended, _ = await asyncio.wait({serving, hearing}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            for error in filter(None, [task.exception() for task in ended]):
                _tell_failure(error)
                self._is_lost = True
            if self._is_lost:  # nobody is told anything: answers that are under way could only be wrong
                store.close()
                os._exit(1)
            await asyncio.wait({serving}, timeout=2 * DRAIN_S)
            for helper in helpers:
                helper.cancel()
        finally:
            store.close()
        return 0

    def _prepare(self, settings: FrontSettings, store: Store) -> _Server:
        """Desk, application and server, before anything is loaded."""
        metrics, limits = ServerMetrics(), within_descriptors(settings.limits)
        mirror = RunMirror(version=settings.version, max_open=limits.open_jobs, observer=metrics)
        metrics.mirror = mirror
        service = JobService(
            store=store, mirror=mirror, folder=settings.output_dir, limits=limits, send=self._send
        )
        for name in FOLDERS:
            (settings.output_dir / name).mkdir(exist_ok=True)
        clear_folders(settings.output_dir, store)
        self._desk, self._feed = service, StateFeed(mirror)
        app = make_app(
            service,
            feed=self._feed,
            metrics=metrics,
            keys=ApiKeys(settings.api_key),
            is_loopback=settings.is_loopback,
            version=settings.version,
        )
        return _Server(
            uvicorn.Config(
                app,
                http=connection_class(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=limits.connections,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(DRAIN_S),
                backlog=ACCEPTED_AT_ONCE,
            )
        )

    async def _hear(self, reader: asyncio.StreamReader, framing: MessageDecoder, rest: Sequence[Any]) -> None:
        """Take in what the run says, in its order, until it is gone."""
        assert self._desk is not None
        messages: Sequence[Any] | None = rest
        while messages is not None:
            for notes in messages:
                await self._desk.hear(notes)
            messages = await self._next(reader, framing)
        self._is_lost = self._desk.mirror.status != "draining"
        self._desk.mirror.drain()
        self._feed.tick()
        self._feed.updates.notify()

    async def _next(self, reader: asyncio.StreamReader, framing: MessageDecoder) -> list[Any] | None:
        """The next messages; None when the run is gone."""
        while True:
            try:
                content = await reader.read(_CHUNK_BYTES)
            except ConnectionError:
                return None
            if not content:
                return None
            if messages := framing.feed(content):
                return messages

    def _send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(pack(message))

    def _chores(self) -> Iterator[Any]:
        """What is to be done from time to time."""
        service = self._desk
        assert service is not None

        async def retention() -> None:
            await service.remove_expired()

        async def feed() -> None:
            self._feed.tick()

        async def forecast() -> None:
            service.mirror.forecast()

        yield _again_and_again(FEED_S, feed)
        yield _again_and_again(FORECAST_S, forecast)
        yield _again_and_again(service.limits.retention_s, retention)


def clear_folders(folder: Path, store: Store) -> None:
    """Remove what a killed server has left of jobs that were cancelled, have failed, or were never accepted.

    A store that was moved away because it is damaged may be mended and come back. So finished files go only
    if this store says that their jobs have none, and input pictures only if they came in its time.
    Thumbnails can be made again.
    """
    open_ids = {facts.id for facts, _ in store.open_jobs()}
    files.clear(folder / INPUTS_NAME, lambda ids: ids - open_ids, suffixes=("",), made_after=store.made_at)
    files.clear(
        folder / THUMBNAILS_NAME, lambda ids: ids - store.with_file(ids), suffixes=(".webp", ".partial")
    )
    files.clear(folder, store.without_file, suffixes=(".png", ".mp4"))


def _configure_log(settings: FrontSettings) -> None:
    """As the run's; of uvicorn and asyncio what is a mistake of ours, and not of some client."""
    log.configure(
        level=settings.log_level,
        as_json=settings.log_json,
        file=settings.log_file,
        file_level=settings.log_level,
    )
    for name in ("uvicorn", "asyncio"):
        other = logging.getLogger(name)
        other.handlers, other.propagate = list(logging.getLogger("gfgen").handlers), False
        other.setLevel(logging.ERROR)


def _tell_failure(error: BaseException) -> None:
    """One line of what ends this process; the run starts another, and tells it all that was not noted."""
    text = str(error) if isinstance(error, GfgenError) else f"{type(error).__name__}: {error}"
    logger.error("the HTTP process cannot go on: %s", text)
    logger.debug("it ends with", exc_info=error)


async def _again_and_again(pause_s: float, work: Callable[[], Any]) -> None:
    """One failure of a chore is logged, and is not its last time."""
    while True:
        await asyncio.sleep(pause_s)
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except OutputError:
            pass  # the store has told it, and tells it once only
        except Exception:
            logger.exception("a chore of the HTTP process failed")


def main(link_fd: int, listener_fd: int) -> None:
    """The life of the process: deaf to the signals of the terminal, which are for the run."""
    leave_to_the_run()
    link, listener = (socket.socket(fileno=fd) for fd in (link_fd, listener_fd))
    for own in (link, listener):
        own.setblocking(False)
        os.set_inheritable(own.fileno(), False)
    try:
        code = asyncio.run(Front(link, listener).run())
    except Exception as error:
        _tell_failure(error)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # threads that still read a file are not waited for
