"""The operators' listener: metrics, workers, drain, reload. It is not for clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from maskserve_common.config import ConfigError
from maskserve_common.sites import foreign_site
from maskserve_router.metrics import Metrics
from maskserve_router.operations.control import cluster_status
from maskserve_router.scheduling.admission import Admission
from maskserve_router.scheduling.pending_queue import PendingQueue
from maskserve_router.scheduling.served_workflows import ServedWorkflows
from maskserve_router.workers.pool import Pool

_JSON = "application/json"
_LONGEST_WAIT_S = 3600.0


class Admin:
    """Makes the application of the operators' port.

    Args:
        name: name of the router.
        pool: the workers.
        pending: waiting edits.
        admission: counts of edits.
        metrics: the metrics to show.
        workflows: the workflows and their node servers.
        reload: reads the configuration again.
        names: accepted host names, as `maskserve_common.sites.has_name`.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        pending: PendingQueue,
        admission: Admission,
        metrics: Metrics,
        workflows: ServedWorkflows,
        reload: Callable[[], Awaitable[None]],
        names: Sequence[str] = (),
    ) -> None:
        self._name, self._pool, self._pending = name, pool, pending
        self._admission, self._metrics, self._reload = admission, metrics, reload
        self._workflows, self._names = workflows, names

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/metrics", self._metrics_page),
                Route("/healthz", self._live),
                Route("/readyz", self._ready),
                Route("/workers", self._workers),
                Route("/workers/{address}/drain", self._drain, methods=["POST"]),
                Route("/workers/{address}/resume", self._resume, methods=["POST"]),
                Route("/reload", self._reload_configuration, methods=["POST"]),
            ],
            middleware=[Middleware(_RefuseForeignSites, self._names)],
        )

    async def _metrics_page(self, _: Request) -> Response:
        metrics, workers = self._metrics, self._pool.workers
        metrics.worker_up.clear()
        metrics.inflight.clear()
        for address, worker in workers.items():
            metrics.worker_up.labels(address).set(worker.ready)
            metrics.inflight.labels(address).set(len(worker.sent))
            metrics.ejections.labels(address)  # a rate needs a zero before the first event
        for model, busy in self._workflows.busy().items():
            metrics.nodes_busy.labels(model).set(busy)
        metrics.waiting.set(len(self._pending))
        metrics.edits.set(self._admission.edits)
        metrics.bytes.set(self._admission.bytes)
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _live(self, _: Request) -> Response:
        return Response()

    async def _ready(self, _: Request) -> Response:
        return Response(status_code=200 if self._pool.ready() else 503)

    async def _workers(self, _: Request) -> Response:
        status = cluster_status(self._name, self._pool.workers.values(), self._metrics.predictions)
        return Response(msgspec.json.encode(status), media_type=_JSON)

    async def _drain(self, request: Request) -> Response:
        """Send the worker no more edits; with `?wait=SECONDS`, wait until it is empty."""
        worker = self._pool.workers.get(request.path_params["address"])
        if worker is None:
            return Response(b'{"error":"no such worker"}', 404, media_type=_JSON)
        worker.draining = True
        try:
            wait = min(float(request.query_params.get("wait", "0")), _LONGEST_WAIT_S)
        except ValueError:
            return Response(b'{"error":"wait is not a number"}', 400, media_type=_JSON)
        end = time.monotonic() + wait
        while worker.sent and time.monotonic() < end:
            await asyncio.sleep(0.02)
        answer = {"draining": True, "in_flight": len(worker.sent)}
        return Response(msgspec.json.encode(answer), media_type=_JSON)

    async def _resume(self, request: Request) -> Response:
        """Send a drained worker edits again."""
        worker = self._pool.workers.get(request.path_params["address"])
        if worker is None:
            return Response(b'{"error":"no such worker"}', 404, media_type=_JSON)
        worker.draining = False
        self._pending.dispatch()
        return Response(b'{"draining":false}', media_type=_JSON)

    async def _reload_configuration(self, _: Request) -> Response:
        try:
            await self._reload()
        except ConfigError as error:
            return Response(msgspec.json.encode({"error": str(error)}), 400, media_type=_JSON)
        return Response(msgspec.json.encode(sorted(self._pool.workers)), media_type=_JSON)


class _RefuseForeignSites:
    """Refuses requests that a browser makes for another site's page."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and (
            foreign := foreign_site(Request(scope).headers, self._names)
        ):
            message = f"{foreign}; accepted: this port's own, and [listen] admin_names"
            answer = Response(msgspec.json.encode({"error": message}), 403, media_type=_JSON)
        await answer(scope, receive, send)
