"""The front: the HTTP process, and its application (routes, guard, errors, the OpenAPI document).

The run passes it two descriptors: the socket to the run, and the listening socket. The front ends when the
run closes its socket: after pending responses if the run announced the stop, immediately otherwise. The
kernel kills it together with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from gfgen import log
from gfgen.errors import GfgenError, OutputError, nearest
from gfgen.job.recipes import recipes
from gfgen.server.http import a1111, routes_batches, routes_images, routes_jobs, routes_server
from gfgen.server.http.guard import ApiKeys, RequestGuard
from gfgen.server.http.streams import FEED_S, StateFeeds
from gfgen.server.jobs.files import JobFolder
from gfgen.server.jobs.service import FORECAST_S, JobService, RunFollower
from gfgen.server.protocol import picture_schemas, server_schemas
from gfgen.server.protocol.limits import BACKLOG, ServerLimits
from gfgen.server.protocol.link import HEADER_BYTES, FrontSettings, message_bytes, pack
from gfgen.server.protocol.problems import ApiError, invalid
from gfgen.server.shown.mirror import RunMirror
from gfgen.server.shown.webhooks import Webhooks
from gfgen.server.store import STORE_NAME, RemovedError, Store
from gfgen.system import machine
from gfgen.system.machine import give_back_large_blocks
from gfgen.system.outlet import drain
from gfgen.system.signals import leave_to_the_run

logger = logging.getLogger(__name__)

DRAIN_S = 3.0
"""Grace period for pending responses after the run has stopped."""
OWN_DESCRIPTORS = 200
"""Reserved for the store, the log, files that are sent, and 503 responses."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the run decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Front:
    def __init__(self, link: socket.socket, listener: socket.socket) -> None:
        self._link = link
        self._listener = listener
        self._writer: asyncio.StreamWriter | None = None
        self._is_lost = False
        """The run ended without announcing it, or the front failed."""

    async def run(self) -> int:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._link)
        settings = await self._next(reader)
        if settings is None:
            return 1
        assert isinstance(settings, FrontSettings)
        _configure_log(settings)
        recipes().update(settings.recipes)  # in this process
        store = Store(settings.output_dir / STORE_NAME, began_at=time.time())
        try:
            server, service = self._prepare(settings, store)
            gc.freeze()  # a collection that visits all imports stops this process for 65 ms
            periodic = {
                self._feeds.tick: FEED_S,
                service.mirror.forecast: FORECAST_S,
                service.remove_expired: service.limits.retention_s,
            }
            helpers = [asyncio.create_task(_repeat(pause_s, work)) for work, pause_s in periodic.items()]
            serving = asyncio.create_task(server.serve(sockets=[self._listener]))
            hearing = asyncio.create_task(self._hear(reader, service))
            ended, _ = await asyncio.wait({serving, hearing}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            for error in filter(None, [task.exception() for task in ended]):
                _log_failure(error)
                self._is_lost = True
            if self._is_lost:  # pending responses could only be wrong
                store.close()
                drain(sys.stderr)
                os._exit(1)
            await asyncio.wait({serving}, timeout=2 * DRAIN_S)
            await self._webhooks.close(patience_s=DRAIN_S)
            for helper in helpers:
                helper.cancel()
        finally:
            store.close()
        return 0

    def _prepare(self, settings: FrontSettings, store: Store) -> tuple[_Server, JobService]:
        limits = within_descriptors(settings.limits)
        mirror = RunMirror(version=settings.version, max_open=limits.open_jobs)
        mirror.metrics.built(settings.version, settings.commit)
        folder = JobFolder(settings.output_dir)
        service = JobService(
            store=store,
            mirror=mirror,
            folder=folder,
            limits=limits,
            api=settings.api,
            keys={name: key for name, key in settings.keys.items() if not key.only_metrics},
            send=self._send,
        )
        folder.prepare(store)
        self._webhooks = Webhooks(settings.api)
        service.on_end = self._webhooks.send
        self._feeds = StateFeeds(mirror)
        app = make_app(
            service,
            feeds=self._feeds,
            keys=ApiKeys(settings.api_key, settings.keys, link_s=limits.link_s),
            address=self._listener.getsockname()[0],
            version=settings.version,
        )
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(DRAIN_S),
            backlog=BACKLOG,
        )
        return _Server(config), service

    async def _hear(self, reader: asyncio.StreamReader, service: JobService) -> None:
        follower = RunFollower(service)
        is_frozen = False
        while (notes := await self._next(reader)) is not None:
            await follower.hear(notes)
            if service.mirror.run_info is not None and not is_frozen:
                gc.freeze()  # what admission has is as large as the imports
                is_frozen = True
        self._is_lost = service.mirror.status != "draining"
        service.mirror.drain()
        self._feeds.tick()
        self._feeds.notify()

    async def _next(self, reader: asyncio.StreamReader) -> Any | None:
        """The next message; None if the socket is closed."""
        try:
            size = message_bytes(await reader.readexactly(HEADER_BYTES))
            return pickle.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def _send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(pack(message))


def _configure_log(settings: FrontSettings) -> None:
    """Log like the run; uvicorn and asyncio log errors only, not client mistakes."""
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
    logging.getLogger("asyncio").addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Failures of calls to the system, such as too many open files each second, in one line."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, OSError):
        record.msg = f"{record.getMessage().partition(chr(10))[0]}: {error.strerror}"
        record.args, record.exc_info = (), None
    return True


def within_descriptors(limits: ServerLimits) -> ServerLimits:
    """Raise this process's descriptor limit; returns the limits with as many connections as fit it."""
    room = machine.allow_most() - OWN_DESCRIPTORS
    return replace(limits, connections=int(max(8, min(limits.connections, room))))  # of 1, uvicorn refuses it


def _log_failure(error: BaseException) -> None:
    """Log one line for the error that ends this process; the run then starts another."""
    text = str(error) if isinstance(error, GfgenError) else f"{type(error).__name__}: {error}"
    logger.error("the HTTP process failed: %s", text)
    logger.debug("traceback", exc_info=error)


async def _repeat(pause_s: float, work: Callable[[], Any]) -> None:
    """Repeat the work; a failure is logged."""
    while True:
        await asyncio.sleep(pause_s)
        try:
            if (waiting := work()) is not None:
                await waiting
        except OutputError:
            pass  # the store has logged it
        except Exception:
            logger.exception("periodic work of the HTTP process failed")


TITLE = "gfgen"
_MODULES = (routes_jobs, routes_images, routes_batches, routes_server, a1111)
_ROUTERS = [router for module in _MODULES for router in module.ROUTERS]
_ROUTES = [route for router in _ROUTERS for route in router.routes if isinstance(route, APIRoute)]
_TEXT = "Pictures and videos, elastically, on all GPUs of one machine. Every error response is an `Error`."
_OTHER_MODELS = (
    server_schemas.JobEvent,
    server_schemas.LiveState,
    server_schemas.Change,
    picture_schemas.PartialImage,
    picture_schemas.CompletedImage,
    picture_schemas.ChatMessage,
)
"""Models of event streams, and parts of bodies that routes read themselves; FastAPI does not find them."""


def make_app(service: JobService, *, feeds: StateFeeds, keys: ApiKeys, address: str, version: str) -> FastAPI:
    app = FastAPI(
        title=TITLE,
        description=_TEXT,
        version=version,
        docs_url=None,  # would load scripts from other hosts
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        redirect_slashes=False,
        responses={"default": {"model": server_schemas.Error, "description": "Any error."}},
    )
    app.state.service, app.state.feeds = service, feeds
    app.state.keys = keys
    app.state.a1111_models = {}  # that each key has chosen
    for router in _ROUTERS:
        if router is a1111.router and not service.api.a1111:
            continue
        app.include_router(router)
        for route in router.routes:
            if isinstance(route, APIRoute) and "GET" in _methods(route):  # not in the document, as twice
                app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    install_errors(app)
    is_open = ipaddress.ip_address(address).is_loopback and not keys.is_needed
    own_address = address if is_open else None
    app.add_middleware(RequestGuard, keys=keys, service=service, own_address=own_address)
    if service.api.allowed_origins:
        names = ("allow_methods", "allow_headers", "expose_headers")
        everything: dict[str, Any] = dict.fromkeys(names, ("*",))
        app.add_middleware(CORSMiddleware, allow_origins=service.api.allowed_origins, **everything)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    nowhere = {"type": "http", "path": "/nowhere", "method": "GET", "headers": [], "root_path": ""}
    for each in app.routes:  # FastAPI completes them at the first request, which would wait for 250 ms
        each.matches(nowhere)
    return app


def install_errors(app: FastAPI) -> None:
    """Answer every error of this app in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        found = _as_api_error(error)
        is_no_path = found.status == 404 and isinstance(error, HTTPException)
        if is_no_path and (near := nearest(request.url.path, {route.path: None for route in _ROUTES})):
            is_off = near.startswith(a1111.router.prefix) and not app.state.service.api.a1111
            found.message += f"; did you mean {near}{' with gfgen serve --a1111' * is_off}?"
        if found.status == 405:  # the router names the methods of one route of the path
            fitting = [route for route in _ROUTES if route.matches(request.scope)[0] is not Match.NONE]
            found.headers["Allow"] = ", ".join(sorted(set().union(*map(_methods, fitting))))
        return found.response()

    async def left(request: Request, _: Exception) -> Response:
        logger.debug("%s %s: the client left during its request", request.method, request.url.path)
        return Response(status_code=499)  # for the metrics: nobody gets it

    for kind in (ApiError, RequestValidationError, HTTPException, OutputError, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientDisconnect, left)


def _methods(route: APIRoute) -> set[str]:
    methods = route.methods or set()
    return methods | {"HEAD"} if "GET" in methods else methods


def _as_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return invalid(error.errors())
        case HTTPException():
            what = {404: "there is no such path", 405: "this path does not accept that method"}
            message = what.get(error.status_code, str(error.detail))
            return ApiError(error.status_code, message)
        case OutputError():
            return ApiError(503 if isinstance(error, RemovedError) else 507, str(error), retry_after_s=30)
    return ApiError(500, "internal error; see the server log")


def _document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        known = document["components"]["schemas"]
        for model in _OTHER_MODELS:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            for name, definition in schema.pop("$defs", {}).items():
                known.setdefault(name, definition)
            known.setdefault(model.__name__, schema)
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
        }
        document["security"] = [{"key": []}, {"api-key": []}, {}]
        app.openapi_schema = document
    return app.openapi_schema


def main(link_fd: int, listener_fd: int) -> None:
    """Main function of the process; ignores the terminal's signals, which are for the run."""
    leave_to_the_run()
    give_back_large_blocks()
    link, listener = (socket.socket(fileno=fd) for fd in (link_fd, listener_fd))
    for own in (link, listener):
        own.setblocking(False)
        os.set_inheritable(own.fileno(), False)
    try:
        code = asyncio.run(Front(link, listener).run())
    except Exception as error:
        _log_failure(error)
        code = 1
    drain(sys.stderr)
    os._exit(code)  # does not wait for threads that still read files


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
