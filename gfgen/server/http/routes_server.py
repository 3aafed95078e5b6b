"""The server itself: health, models, policy, metrics, the live state, and the page."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from gfgen.errors import OutputError, PolicyError
from gfgen.policies.catalog import BUILT_IN, load_policy
from gfgen.server.http.bodies import json_body, read_model, sends
from gfgen.server.http.guard import COOKIE, Access, slow_down
from gfgen.server.http.routes_jobs import Service
from gfgen.server.http.streams import STREAM, event_stream, state_events
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import server_schemas
from gfgen.server.protocol.problems import ApiError
from gfgen.server.shown.prometheus import CONTENT_TYPE
from gfgen.server.store import RemovedError

router = APIRouter(tags=["server"])
ROUTERS = (router,)

PAGE = {file.name: file for file in (Path(__file__).parents[1] / "page").iterdir()}
"""The page's files by name, so that no request names another file."""


@router.get("/health", summary="Does the server take jobs?")
async def health(service: Service) -> dict[str, str]:
    """200 once jobs are accepted: clients that know no /ready wait for this."""
    service.check_ready()
    return {"status": "ok"}


@router.get("/ready", summary="Are the models loaded, all workers up and the disk writable?")
async def ready(service: Service) -> dict[str, str | int]:
    service.check_ready()
    try:
        await service.store.check_writable()
    except OutputError as error:
        code = "not_ready" if isinstance(error, RemovedError) else "disk_full"
        raise ApiError(503, str(error), code=code, retry_after_s=30) from None
    ranks = service.mirror.run.ranks.values()
    waiting = [rank for rank in ranks if rank.status in ("starting", "lost")]
    if not ranks:
        raise ApiError(503, "no node is up", code="not_ready", retry_after_s=5)
    if waiting:
        names = ", ".join(f"rank {rank.rank} ({rank.status})" for rank in waiting)
        raise ApiError(503, f"not up: {names}", code="not_ready", retry_after_s=5)
    return {"status": "ready", "ranks": sum(rank.status != "retired" for rank in ranks)}


@router.get("/metrics", **sends("text/plain"), summary="Metrics for Prometheus")
async def metrics(request: Request, service: Service) -> Response:
    if not Access.of(request.scope).only_metrics:
        _check_admin(service)
    return Response(service.mirror.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/version", summary="Get the version")
async def version(service: Service) -> dict[str, str]:
    return {"version": service.mirror.version}


@router.get("/v1/models", summary="List models")
async def list_models(service: Service) -> server_schemas.ModelList:
    return server_schemas.ModelList(data=service.models())


@router.get("/v1/models/{model:path}", summary="Get a model")
async def get_model(service: Service, model: str) -> server_schemas.ServedModel:
    for each in service.models():
        if each.id.strip("/") == model.strip("/"):
            return each
    raise ApiError(404, "there is no such model", param="model", code="model_not_found")


@router.get("/v1/policy", summary="Get the policy")
async def get_policy(service: Service) -> server_schemas.PolicyState:
    service.check_ready()
    return service.mirror.policy


@router.post("/v1/policy", openapi_extra=json_body(server_schemas.PolicyRequest), summary="Change the policy")
async def set_policy(request: Request, service: Service) -> server_schemas.PolicyState:
    """Accepts a built-in policy with its options. Running steps finish; the new policy decides the next."""
    _check_admin(service)
    service.check_ready()
    requested = await read_model(request, server_schemas.PolicyRequest, service=service)
    name = requested.policy.partition(",")[0].strip()
    if name not in BUILT_IN:  # others would be looked for among the server's files
        raise ApiError(400, f"policy: built-in ones are accepted: {', '.join(BUILT_IN)}", param="policy")
    try:
        policy = load_policy(requested.policy)
    except PolicyError as error:
        raise ApiError(400, str(error).removeprefix("--policy "), param="policy") from None
    service.set_policy(policy.name)
    return service.mirror.policy


@router.get("/v1/state", summary="Get the live state")
async def get_state(service: Service) -> server_schemas.LiveState:
    return service.mirror.state(service.owner)


@router.get("/v1/state/events", **STREAM, summary="Stream the live state and its changes")
async def follow_state(request: Request, service: Service) -> Response:
    """Server-sent events: `state` with a `LiveState`, then `change` with a `Change`."""
    feed = request.app.state.feeds.of(service.owner)
    return event_stream(service, lambda: state_events(service, feed))


@router.post(
    "/v1/session",
    status_code=204,
    openapi_extra=json_body(server_schemas.SessionRequest),
    summary="Exchange the key for a cookie",
)
async def open_session(request: Request, service: Service) -> Response:
    """The page sends this cookie with its later requests, including those for pictures and streams."""
    keys = request.app.state.keys
    requested = await read_model(request, server_schemas.SessionRequest, service=service)
    if (access := keys.by_key(requested.api_key)) is None:
        await slow_down(request.scope, service.limits.wrong_key_s)
        raise ApiError(401, "the key is wrong")
    response = Response(status_code=204)
    if keys.is_needed:
        response.set_cookie(
            COOKIE,
            keys.cookie(access),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
            path=service.api.root_path or "/",
        )
    return response


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return await page_file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    if name not in PAGE:
        raise ApiError(404, "there is no such path")
    return FileResponse(PAGE[name], headers={"Cache-Control": "no-cache"})


def _check_admin(service: JobService) -> None:
    if service.owner is not None:
        raise ApiError(403, "only the admin key may do this (gfgen serve --api-key)")
