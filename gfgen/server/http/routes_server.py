"""The server itself: health, models, policy, metrics, the live state, and the page."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from gfgen.errors import PolicyError
from gfgen.policies.catalog import BUILT_IN, load_policy
from gfgen.server.http.bodies import read_json
from gfgen.server.http.guard import COOKIE
from gfgen.server.http.routes_jobs import service_of
from gfgen.server.http.streams import state_stream
from gfgen.server.jobs.prometheus import CONTENT_TYPE
from gfgen.server.protocol import schemas
from gfgen.server.protocol.problems import ApiError, checked, responses

router = APIRouter()

PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}


def read_page() -> dict[str, tuple[bytes, str]]:
    """The page's files by name, with their media types; read once, so that no request names a file."""
    folder = resources.files("gfgen.server") / "page"
    if not folder.is_dir():
        return {}
    files = [file for file in folder.iterdir() if file.is_file()]
    kinds = {file.name: PAGE_TYPES.get(file.name[file.name.rfind(".") :]) for file in files}
    return {file.name: (file.read_bytes(), kind) for file in files if (kind := kinds[file.name])}


@router.get("/health", tags=["server"], response_model=schemas.Health, summary="Is the server alive?")
async def health() -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get(
    "/ready",
    tags=["server"],
    response_model=schemas.Ready,
    responses=responses(503),
    summary="Are the models loaded and all workers up?",
)
async def ready(request: Request) -> Response:
    service = service_of(request)
    service.check_ready()
    waiting = [rank for rank in service.mirror.lanes.lanes if rank.status in ("starting", "lost")]
    if waiting:
        names = ", ".join(f"rank {rank.rank} ({rank.status})" for rank in waiting)
        raise ApiError(503, f"not up: {names}", code="not_ready", retry_after_s=5)
    answer = schemas.Ready(ranks=sum(rank.status != "retired" for rank in service.mirror.lanes.lanes))
    return Response(answer.model_dump_json(), media_type="application/json")


@router.get(
    "/metrics",
    tags=["server"],
    response_class=Response,
    responses={**responses(), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    summary="What Prometheus reads",
)
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


@router.get(
    "/v1/models",
    tags=["server"],
    response_model=schemas.ModelList,
    responses=responses(),
    summary="List models",
)
async def list_models(request: Request) -> Response:
    answer = schemas.ModelList(data=service_of(request).mirror.models())
    return Response(answer.model_dump_json(), media_type="application/json")


@router.get(
    "/v1/models/{model:path}",
    tags=["server"],
    response_model=schemas.ServedModel,
    responses=responses(404),
    summary="Tell of a model",
)
async def get_model(request: Request, model: str) -> Response:
    for each in service_of(request).mirror.models():
        if each.id == model:
            return Response(each.model_dump_json(), media_type="application/json")
    raise ApiError(404, "there is no such model", param="model", code="model_not_found")


@router.get(
    "/v1/policy",
    tags=["server"],
    response_model=schemas.PolicyState,
    responses=responses(503),
    summary="Which policy decides?",
)
async def get_policy(request: Request) -> Response:
    service = service_of(request)
    service.check_ready()
    return Response(service.mirror.policy.model_dump_json(), media_type="application/json")


@router.post(
    "/v1/policy",
    tags=["server"],
    response_model=schemas.PolicyState,
    responses=responses(400, 408, 413, 503),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schemas.PolicyRequest.model_json_schema()}},
        }
    },
    summary="Let another policy decide from now on",
)
async def set_policy(request: Request) -> Response:
    """A built-in policy with its options; what runs goes on, and its next step is decided by the new one."""
    service = service_of(request)
    service.check_ready()
    requested = checked(schemas.PolicyRequest, await read_json(request, most_bytes=service.limits.json_bytes))
    name = requested.policy.partition(",")[0].strip()
    if name not in BUILT_IN:  # others would be looked for among the server's files
        raise ApiError(400, f"policy: built-in ones are accepted: {', '.join(BUILT_IN)}", param="policy")
    try:
        policy = load_policy(requested.policy)
    except PolicyError as error:
        raise ApiError(400, str(error).removeprefix("--policy "), param="policy") from None
    service.set_policy(policy.name)
    return Response(service.mirror.policy.model_dump_json(), media_type="application/json")


@router.get(
    "/v1/state",
    tags=["server"],
    response_model=schemas.LiveState,
    responses=responses(),
    summary="All that the page shows",
)
async def get_state(request: Request) -> Response:
    return Response(service_of(request).mirror.state().model_dump_json(), media_type="application/json")


@router.get(
    "/v1/state/events",
    tags=["server"],
    response_class=StreamingResponse,
    responses={**responses(429), 200: {"content": {"text/event-stream": {}}}},
    summary="The live state, and its changes",
)
async def follow_state(request: Request) -> Response:
    """Server-sent events: `state` with a `LiveState`, then `change` with a `Change`."""
    return state_stream(service_of(request), request.app.state.feed)


@router.post(
    "/v1/session",
    tags=["server"],
    status_code=204,
    response_class=Response,
    responses=responses(400, 408, 413),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schemas.SessionRequest.model_json_schema()}},
        }
    },
    summary="Exchange the key for a cookie",
)
async def open_session(request: Request) -> Response:
    """For the page: a cookie that its later requests carry, pictures and streams included."""
    service, keys = service_of(request), request.app.state.keys
    requested = checked(
        schemas.SessionRequest, await read_json(request, most_bytes=service.limits.json_bytes)
    )
    if not keys.is_right(requested.api_key):
        raise ApiError(401, "the key is wrong")
    response = Response(status_code=204)
    if keys.is_needed:
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, keys.cookie, httponly=True, samesite="strict", secure=secure, path="/")
    return response


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    return _page_file(request, "index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(request: Request, name: str) -> Response:
    return _page_file(request, name)


def _page_file(request: Request, name: str) -> Response:
    found = request.app.state.page.get(name)
    if found is None:
        raise ApiError(404, "there is no such path")
    content, kind = found
    return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})
