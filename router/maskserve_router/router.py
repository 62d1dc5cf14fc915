"""The router: its parts, its listeners, and how it starts and stops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType

from maskserve_core.routing import make_policy
from maskserve_router.admin import Admin
from maskserve_router.admission import Admission
from maskserve_router.config import RouterConfig
from maskserve_router.control import ClusterControl
from maskserve_router.dispatch import Dispatcher
from maskserve_router.front import Front
from maskserve_router.grpc_server import GrpcServer
from maskserve_router.http_app import HttpApp
from maskserve_router.http_inference import HttpInference
from maskserve_router.http_server import HttpServer
from maskserve_router.keys import KeyRing
from maskserve_router.metrics import Metrics
from maskserve_router.open_calls import OpenCalls
from maskserve_router.openai.edits import ImageEdits
from maskserve_router.openai.image_urls import ImageUrls
from maskserve_router.openai.routes import openai_routes
from maskserve_router.openai.templates import TemplateRoutes
from maskserve_router.pending_queue import PendingQueue
from maskserve_router.pool import Pool
from maskserve_router.server_calls import ServerCalls
from maskserve_router.tracing import Tracing

log = logging.getLogger("maskserve.router")


class Router:
    """One front door for the workers of a configuration; use it as an async context manager.

    Args:
        config: as it is at the start.
        read_config: reads it anew for a reload; of that, the workers are taken on.
    """

    def __init__(
        self, config: RouterConfig, read_config: Callable[[], RouterConfig] | None = None
    ) -> None:
        self._config, self._read_config = config, read_config or (lambda: config)
        self.metrics = Metrics()
        self.pool = Pool(config, self._workers_changed)
        self.pending = PendingQueue(
            self.pool,
            make_policy(config.routing.policy),
            config.admission.aging_s,
            self.metrics.route_seconds.observe,
        )
        self.admission = Admission(config.admission, self.metrics)
        self._dispatcher = Dispatcher(config, self.pool, self.pending, self.admission, self.metrics)
        self._tracing = Tracing(config)
        self._control = control = ClusterControl(
            config.name, self.pool, self._dispatcher, self.metrics.predictions
        )
        keys = KeyRing(config.keys, config.admission.max_edits)
        front = Front(keys, self._dispatcher, control, self.metrics, self._tracing)
        calls = ServerCalls(self.pool)
        listen = config.listen
        self.grpc = GrpcServer(config, front, calls, OpenCalls(config.grpc, self.metrics))
        self._urls = urls = ImageUrls(config.image_urls, config.limits, self.admission)
        edits = ImageEdits(config.http, config.limits, front, self.admission, self.pool, urls)
        templates = TemplateRoutes(config.http, front, control, self.admission)
        inference = HttpInference(config.http, front, self.admission)
        self.http = HttpServer(
            HttpApp(calls, inference, keys.client, openai_routes(edits, templates)).app(),
            config.http,
            listen.host,
            listen.http_port,
            listen.tls_cert,
            listen.tls_key,
        )
        admin = Admin(
            config.name, self.pool, self.pending, self.admission, self.metrics, self.reload
        )
        self.admin = HttpServer(admin.app(), config.http, listen.admin_host, listen.admin_port)

    async def __aenter__(self) -> Router:
        await self.pool.start()
        await self.http.start()
        await self.admin.start()
        await self.grpc.start()
        log.info(
            "listening: HTTP %d, gRPC %d, admin %d",
            self.http.port,
            self.grpc.port,
            self.admin.port,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def _workers_changed(self) -> None:
        self.pending.dispatch()
        self._control.missed.bring()

    async def reload(self) -> None:
        """Take on the workers that the configuration names now.

        Raises:
            ConfigError: it cannot be read; all stays as it was.
        """
        await self.pool.reload(self._read_config())

    async def stop(self) -> None:
        """Take no more edits, finish those under way within the grace, and close."""
        self.admission.closed = True
        end = time.monotonic() + self._config.faults.drain_grace_s
        while self.admission.edits and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await self.grpc.stop(1.0)
        await self.http.stop()
        await self.admin.stop()
        await self._urls.close()
        await self._control.missed.close()
        await self.pool.close()
        self._dispatcher.close()
        self._tracing.close()
