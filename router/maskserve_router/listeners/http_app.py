"""The application of the HTTP listener: its paths and its handlers of metadata and health."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from maskserve_router.api.http_answers import (
    JSON,
    Handler,
    error_boundary,
    http_exception_response,
    json_response,
)
from maskserve_router.api.http_inference import HttpInference, model_of
from maskserve_router.api.server_calls import ServerCalls, operators_only, shared_memory_refused
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.json_values import values_of
from maskserve_router.messages.request_limits import read_json

OPENAPI = Path(__file__).with_name("openapi.json")
"""The OpenAPI document of these paths, which `scripts/bench openapi` writes."""


class HttpApp:
    """Makes the application.

    Args:
        calls: answers calls about models and the server.
        inference: answers inference calls.
        identify: returns the caller by the headers of a request.
        routes: further routes.
        origins: origins of web pages that may call.
        jobs: returns the state of jobs, for readiness.
    """

    def __init__(
        self,
        calls: ServerCalls,
        inference: HttpInference,
        identify: Callable[[Mapping[str, str]], KeyHolder],
        routes: Sequence[Route] = (),
        origins: Sequence[str] = (),
        jobs: Callable[[], str] = lambda: "off",
    ) -> None:
        self._calls, self._inference, self._identify = calls, inference, identify
        self._routes, self._origins, self._jobs = routes, origins, jobs

    def app(self) -> Starlette:
        model = "/v2/models/{model}"
        versions = (model, model + "/versions/{version}")
        routes = [
            _get("/openapi.json", self._document),
            _get("/healthz", self._live),
            _get("/readyz", self._readyz),
            _get("/v2", self._server),
            _get("/v2/", self._server),
            _get("/v2/health/live", self._live),
            _get("/v2/health/ready", self._ready),
            _get("/v2/models/stats", self._statistics),
            _post("/v2/repository/index", self._index),
            _post("/v2/repository/models/{rest:path}", self._operators),
            _any("/v2/trace/{rest:path}", self._operators),
            _any("/v2/logging", self._operators),
        ]
        for base in versions:
            routes += [
                _get(base, self._metadata),
                _get(base + "/ready", self._model_ready),
                _get(base + "/config", self._config),
                _get(base + "/stats", self._statistics),
                _post(base + "/infer", self._inference.infer),
                _post(base + "/generate", self._inference.generate),
                _post(base + "/generate_stream", self._inference.generate_stream),
                _any(base + "/trace/{rest:path}", self._operators),
            ]
        for kind in ("systemsharedmemory", "cudasharedmemory"):
            for region in ("", "/region/{region}"):
                routes += [
                    _get(f"/v2/{kind}{region}/status", self._no_regions),
                    _post(f"/v2/{kind}{region}/unregister", self._unregistered),
                    _post(f"/v2/{kind}{region}/register", self._register),
                ]
        for route in routes:  # Triton answers HEAD with 405
            if route.methods is not None:
                route.methods.discard("HEAD")
        routes += self._routes
        app = Starlette(
            routes=routes,
            exception_handlers={404: http_exception_response, 405: http_exception_response},
        )
        if self._origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self._origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],  # SDKs add headers of their own
                expose_headers=["x-request-id", "retry-after"],
            )
        # A redirect would name the address that the client gave as its Host.
        app.router.redirect_slashes = False
        return app

    def _client(self, request: Request) -> KeyHolder:
        """Return the caller. If there are keys, all calls but health checks need one."""
        return self._identify(request.headers)

    async def _document(self, _: Request) -> Response:
        return Response(OPENAPI.read_bytes(), media_type=JSON)

    async def _live(self, _: Request) -> Response:
        return Response()

    async def _readyz(self, _: Request) -> Response:
        ready = self._calls.ready()
        body = msgspec.json.encode({"edits": ready, "jobs": self._jobs()})
        return Response(body, 200 if ready else 503, media_type=JSON)

    async def _ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._calls.ready() else 503)

    async def _model_ready(self, request: Request) -> Response:
        ready = self._calls.model_ready(*model_of(request))
        return Response(status_code=200 if ready else 400)

    async def _server(self, request: Request) -> Response:
        self._client(request)
        return json_response(await self._calls.server_metadata())

    async def _metadata(self, request: Request) -> Response:
        self._client(request)
        return json_response(await self._calls.model_metadata(*model_of(request)))

    async def _config(self, request: Request) -> Response:
        self._client(request)
        return json_response((await self._calls.model_config(*model_of(request))).config)

    async def _statistics(self, request: Request) -> Response:
        client = self._client(request)
        return json_response(await self._calls.statistics(*model_of(request), client))

    async def _index(self, request: Request) -> Response:
        self._client(request)
        body = await self._inference.body(request) or b"{}"
        index_request = read_json(body, _read_index, "a JSON object", 'nothing, or {"ready": true}')
        models = self._calls.repository_index(ready=index_request.ready).models
        return Response(
            msgspec.json.encode([values_of(model) for model in models]), 200, None, JSON
        )

    async def _no_regions(self, _: Request) -> Response:
        return Response(b"[]", media_type=JSON)

    async def _unregistered(self, _: Request) -> Response:
        return Response()

    async def _register(self, _: Request) -> Response:
        raise shared_memory_refused()

    async def _operators(self, request: Request) -> Response:
        raise operators_only(request.url.path)


class _Index(msgspec.Struct):
    """The body of a request for the repository's index."""

    ready: bool = False


_read_index = msgspec.json.Decoder(_Index).decode


def _get(path: str, handler: Handler) -> Route:
    return Route(path, error_boundary(handler), methods=["GET"])


def _post(path: str, handler: Handler) -> Route:
    return Route(path, error_boundary(handler), methods=["POST"])


def _any(path: str, handler: Handler) -> Route:
    return Route(path, error_boundary(handler), methods=["GET", "POST"])
