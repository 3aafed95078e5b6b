"""The HTTP application: routes, guard, errors, and the OpenAPI document."""

from __future__ import annotations

import ipaddress
import logging
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from gfgen.errors import OutputError
from gfgen.server.http import (
    a1111,
    routes_batches,
    routes_images,
    routes_jobs,
    routes_server,
)
from gfgen.server.http.guard import ApiKeys, RequestGuard
from gfgen.server.http.streams import StateFeeds
from gfgen.server.jobs.service import JobService
from gfgen.server.protocol import picture_schemas, server_schemas
from gfgen.server.protocol.problems import ApiError, invalid

logger = logging.getLogger(__name__)

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
    app.state.keys, app.state.page = keys, routes_server.read_page()
    app.state.a1111_models = {}  # that each key has chosen
    for router in _ROUTERS:
        if router is a1111.router and not service.api.a1111:
            continue
        app.include_router(router)
        for route in router.routes:
            if isinstance(route, APIRoute) and "GET" in _methods(route):  # not in the document, as twice
                app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    install_errors(app)
    if ipaddress.ip_address(address).is_loopback and not keys.is_needed:  # against DNS rebinding
        own = urlsplit(service.api.public_url or "").hostname or "localhost"
        hosts = [own, "localhost", "*.localhost", "127.0.0.1", "[::1]", address]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(
        RequestGuard, keys=keys, limits=service.limits, api=service.api, metrics=service.mirror.metrics
    )
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
            return ApiError(507, str(error), retry_after_s=30)
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
