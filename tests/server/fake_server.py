"""The contract that the page is built on, without a run behind it: the state is what a test says.

The page's files, the guard in front of them and the errors are the server's own, so the content security
policy and the refusals are real. Everything else answers from `state`, `refusal` and `results`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from gfgen.server.http import routes_server
from gfgen.server.http.front import install_errors
from gfgen.server.http.guard import COOKIE, ApiKeys, RequestGuard
from gfgen.server.protocol import schemas, server_schemas
from gfgen.server.protocol.limits import ApiOptions, ServerLimits
from gfgen.server.protocol.problems import ApiError
from gfgen.server.shown.prometheus import ServerMetrics

STATE_PATH = "/v1/state/events"


@dataclass(slots=True)
class RequestedJob:
    """A request that is more than looking."""

    method: str
    path: str
    fields: dict[str, Any] = field(default_factory=dict)
    key: str | None = None


class FakeServer:
    """Serves on a thread of its own; what tests call here may be called from anywhere."""

    def __init__(self, state: server_schemas.LiveState, *, api_key: str | None = None) -> None:
        self._readers: set[asyncio.Queue[bytes | None]] = set()
        self.begin(state)
        self._keys = ApiKeys(api_key)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        mirror = SimpleNamespace(metrics=ServerMetrics())
        service: Any = SimpleNamespace(limits=ServerLimits(), api=ApiOptions(), mirror=mirror)
        config = uvicorn.Config(
            RequestGuard(self._app(), keys=self._keys, service=service, own_address=None),
            log_level="error",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> FakeServer:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self.hang_up()
        self._thread.join()
        self._socket.close()

    # What a test says -------------------------------------------------------------------------------

    def begin(self, state: server_schemas.LiveState) -> None:
        """Forget what the test before said and asked."""
        self.state = state
        self.accepted: schemas.Job | None = None
        self.refusal: ApiError | None = None
        self.files: dict[str, tuple[bytes, str]] = {}
        """What GET answers, by path."""
        self.asked: list[RequestedJob] = []
        self.uploads: dict[str, bytes] = {}
        """The files of the last job that came."""
        self.lines: dict[str, str] = {}
        """What GET answers of a job's line, by job."""
        self.mask_argument: str | None = None
        """Of all models."""
        self.cancelled: set[str] = set()
        self.stored: list[schemas.Job] = []
        """All jobs that have ended."""
        self.num_streams = 0
        self.is_cut = False
        self.hang_up()

    def tell(self, **values: Any) -> None:
        """Send a change; fields that are not given are not in it."""
        change = server_schemas.Change(server_time=time.time(), **values)
        self._put(_event("change", change.model_dump_json(include=change.model_fields_set)))

    def hang_up(self) -> None:
        """End all streams."""
        self._put(None)

    def cut(self) -> None:
        """End all streams, and begin none until `is_cut` is false again."""
        self.is_cut = True
        self.hang_up()

    def _put(self, item: bytes | None) -> None:
        for reader in list(self._readers):
            reader_loop = self._loop
            reader_loop.call_soon_threadsafe(reader.put_nowait, item)

    def _body(self) -> str:
        state = self.state.model_copy(update={"server_time": time.time()}).model_dump(mode="json")
        state["models"] = [model | {"mask_argument": self.mask_argument} for model in state["models"]]
        return json.dumps(state)

    # What it answers --------------------------------------------------------------------------------

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        install_errors(app)
        app.get("/")(routes_server.page)
        app.get("/page/{name}")(routes_server.page_file)
        app.get(STATE_PATH)(self._follow)
        app.post("/v1/session")(self._session)
        app.post("/v1/policy")(self._set_policy)
        app.post("/v1/jobs")(self._create)
        app.get("/v1/jobs")(self._list)
        app.post("/v1/batches")(self._create_batch)
        app.get("/v1/jobs/{job_id}/line")(self._line)
        app.put("/v1/jobs/{job_id}/favourite")(self._favour)
        app.post("/v1/jobs/{job_id}/cancel")(self._cancel)
        app.post("/v1/jobs/{job_id}")(self._change)
        app.delete("/v1/jobs/{job_id}")(self._delete)
        app.api_route("/v1/jobs/{job_id}", methods=["GET"])(self._job)
        app.api_route("/v1/jobs/{job_id}/content", methods=["GET", "HEAD"])(self._content)
        return app

    async def _follow(self) -> Response:
        if self.is_cut:
            raise ApiError(503, "the server is stopping", retry_after_s=30)
        self._loop = asyncio.get_running_loop()
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        reader: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._readers.add(reader)
        self.num_streams += 1
        try:
            yield b"retry: 2000\n\n" + _event("state", self._body())
            while (item := await reader.get()) is not None:
                yield item
        finally:
            self._readers.discard(reader)

    async def _session(self, request: Request) -> Response:
        given = (await request.json())["api_key"]
        self.asked.append(RequestedJob("POST", "/v1/session"))
        if (access := self._keys.by_key(given)) is None:
            raise ApiError(401, "the key is wrong")
        response = Response(status_code=204)
        response.set_cookie(COOKIE, self._keys.cookie(access), httponly=True, samesite="strict")
        return response

    async def _set_policy(self, request: Request) -> Response:
        self.asked.append(RequestedJob("POST", "/v1/policy", await request.json()))
        return Response(self.state.policy.model_dump_json(), media_type="application/json")

    async def _create(self, request: Request) -> Response:
        if request.headers["content-type"] == "application/json":
            fields = await request.json()
        else:
            async with request.form() as form:
                fields = {
                    name: value if isinstance(value, str) else value.filename for name, value in form.items()
                }
                self.uploads = {
                    name: await value.read() for name, value in form.items() if not isinstance(value, str)
                }
        self.asked.append(RequestedJob("POST", "/v1/jobs", fields, request.headers.get("idempotency-key")))
        if self.refusal is not None:
            raise self.refusal
        assert self.accepted is not None
        return Response(self.accepted.model_dump_json(), media_type="application/json")

    async def _create_batch(self, request: Request) -> Response:
        async with request.form() as form:
            file = form["file"]
            assert not isinstance(file, str)
            lines = (await file.read()).decode().splitlines()
        if self.refusal is not None:
            raise self.refusal
        counts = server_schemas.RequestCounts(total=len(lines), completed=0, failed=0, cancelled=0)
        answer = server_schemas.Batch(
            id="batch_1", status="in_progress", created_at=1, request_counts=counts, manifest_url=""
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _list(
        self, ended: bool, limit: int = 20, after: str | None = None, favourite: bool = False
    ) -> Response:
        jobs = self.stored if ended else [job for job in self.state.open if job.id not in self.cancelled]
        jobs = [job for job in jobs if job.favourite or not favourite]
        start = next((n for n, job in enumerate(jobs, start=1) if job.id == after), 0)
        answer = schemas.JobList.of(jobs[start : start + limit + 1], limit)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _change(self, job_id: str, request: Request) -> Response:
        self.asked.append(RequestedJob("POST", f"/v1/jobs/{job_id}", await request.json()))
        return Response("{}", media_type="application/json")

    async def _line(self, job_id: str) -> Response:
        return Response(self.lines[job_id], media_type="application/json")

    async def _favour(self, job_id: str, value: bool) -> Response:
        self.asked.append(RequestedJob("PUT", f"/v1/jobs/{job_id}/favourite", {"value": value}))
        job = next(job for job in [*self.state.finished, *self.stored] if job.id == job_id)
        return Response(job.model_copy(update={"favourite": value}).model_dump_json())

    async def _cancel(self, job_id: str) -> Response:
        self.asked.append(RequestedJob("POST", f"/v1/jobs/{job_id}/cancel"))
        self.cancelled.add(job_id)
        if self.refusal is not None:
            raise self.refusal
        return Response("{}", media_type="application/json")

    async def _delete(self, job_id: str) -> Response:
        self.asked.append(RequestedJob("DELETE", f"/v1/jobs/{job_id}"))
        if self.refusal is not None:
            raise self.refusal
        answer = schemas.Deleted(id=job_id, object="image.deleted", deleted=False, status="cancelled")
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _job(self, job_id: str) -> Response:
        assert self.accepted is not None
        return Response(self.accepted.model_dump_json(), media_type="application/json")

    async def _content(self, job_id: str, variant: str | None = None) -> Response:
        name = f"{job_id}?{variant}" if variant else job_id
        if name not in self.files:
            raise ApiError(404, f"there is no job {job_id}")
        content, kind = self.files[name]
        return Response(content, media_type=kind)


def _event(name: str, body: str) -> bytes:
    return f"event: {name}\ndata: {body}\n\n".encode()
