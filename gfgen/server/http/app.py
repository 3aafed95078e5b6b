"""The HTTP application: routes, guard, errors, and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from gfgen.server.http import routes_batches, routes_images, routes_jobs, routes_server
from gfgen.server.http.guard import ApiKeys, RequestGuard
from gfgen.server.http.streams import StateFeed
from gfgen.server.jobs.prometheus import ServerMetrics
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import problems, schemas

TITLE = "gfgen"
_TEXT = "Pictures and videos, elastically, on all GPUs of one machine. Every error response is an `Error`."
_STREAMED_MODELS = (schemas.JobEvent, schemas.LiveState, schemas.Change)
"""Models that only event streams send; FastAPI does not find them."""


def make_app(
    service: JobService,
    *,
    feed: StateFeed,
    metrics: ServerMetrics,
    keys: ApiKeys,
    is_loopback: bool,
    version: str,
) -> FastAPI:
    """The application for one JobService."""
    app = FastAPI(
        title=TITLE,
        description=_TEXT,
        version=version,
        docs_url=None,  # would load scripts from other hosts
        redoc_url=None,
        generate_unique_id_function=_operation_id,
        redirect_slashes=False,
        responses=problems.responses(401, 403),
    )
    app.state.service, app.state.feed, app.state.metrics = service, feed, metrics
    app.state.keys, app.state.page = keys, routes_server.read_page()
    for router in (*routes_jobs.ROUTERS, routes_images.router, routes_batches.router, routes_server.router):
        app.include_router(router)
    problems.install(app)
    app.add_middleware(RequestGuard, keys=keys, limits=service.limits, is_loopback=is_loopback)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, cached."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        known = document["components"]["schemas"]
        for model in _STREAMED_MODELS:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            for name, definition in schema.pop("$defs", {}).items():
                known.setdefault(name, definition)
            known.setdefault(model.__name__, schema)
        for name in ("HTTPValidationError", "ValidationError"):
            known.pop(name, None)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None) if _is_fastapis(operation) else None
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}, {}]
        app.openapi_schema = document
    return app.openapi_schema


def _is_fastapis(operation: dict[str, Any]) -> bool:
    """Whether its 422 is the one that FastAPI adds to every route and this server never sends."""
    return "HTTPValidationError" in str(operation["responses"].get("422", ""))
