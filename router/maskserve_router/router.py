"""The router: it builds the parts, starts the listeners and stops them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from starlette.routing import Route

from maskserve_common.config import ConfigError
from maskserve_common.files.values import Values
from maskserve_common.routing import make_policy
from maskserve_router.api.front import Front
from maskserve_router.api.http_body import Bodies
from maskserve_router.api.http_inference import HttpInference
from maskserve_router.api.no_jobs import NoJobs
from maskserve_router.api.openai.edits import ImageEdits
from maskserve_router.api.openai.form import ModelForm
from maskserve_router.api.openai.form_pictures import FormPictures
from maskserve_router.api.openai.form_reader import FormReader
from maskserve_router.api.openai.image_urls import ImageUrls
from maskserve_router.api.openai.masks import mask_routes
from maskserve_router.api.openai.picture_urls import PictureUrls
from maskserve_router.api.openai.routes import model_routes, openai_routes
from maskserve_router.api.openai.served_models import ServedModels
from maskserve_router.api.openai.templates import TemplateRoutes
from maskserve_router.api.outputs import Outputs
from maskserve_router.api.server_calls import ServerCalls
from maskserve_router.api.workflow_routes import workflow_routes
from maskserve_router.config import RouterConfig, check_change
from maskserve_router.extras import ExtraMissing, extra
from maskserve_router.fair_share import FairShare
from maskserve_router.keys import KeyRing
from maskserve_router.listeners.admin import Admin
from maskserve_router.listeners.certificates import Certificates
from maskserve_router.listeners.descriptors import connections
from maskserve_router.listeners.grpc_server import GrpcServer
from maskserve_router.listeners.http_app import HttpApp
from maskserve_router.listeners.http_server import HttpServer
from maskserve_router.listeners.open_calls import OpenCalls
from maskserve_router.metrics import Metrics
from maskserve_router.operations.control import ClusterControl
from maskserve_router.scheduling.admission import Admission
from maskserve_router.scheduling.dispatch import Dispatcher
from maskserve_router.scheduling.edits import Edits
from maskserve_router.scheduling.mask_finder import MaskFinder, no_segmenter
from maskserve_router.scheduling.pending_queue import PendingQueue
from maskserve_router.scheduling.served_workflows import ServedWorkflows
from maskserve_router.tracing import Tracing
from maskserve_router.workers.pool import Pool

if TYPE_CHECKING:
    from maskserve_router.jobs.jobs import Jobs
    from maskserve_router.workflow_parts import WorkflowParts

log = logging.getLogger("maskserve.router")
_OPERATORS = 64
"""Connections of the operators' port; clients cannot use them up."""
_LOCK_S = 0.1
"""Longest seconds that a process may hold the lock of the values folder while others wait."""
_POLL_S = 2.0
"""Seconds between two checks of the files of keys and certificates."""


class Router:
    """One entry point for the workers of a configuration. Use it as an async context manager.

    Args:
        config: configuration at the start.
        read_config: reads the configuration again for a reload.
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
        self._fair_share = fair_share = FairShare(config.routing.decoding_threads)
        values = Values(config.values, _LOCK_S)
        self._dispatcher = Dispatcher(
            config, self.pool, self.pending, self.admission, fair_share, self.metrics, values
        )
        self._tracing = Tracing(config)
        parts = _workflow_parts(config, fair_share, values)
        masks = MaskFinder(no_segmenter if parts is None else parts.segment, fair_share)
        edits = Edits(self._dispatcher, masks, self.metrics, self._tracing)
        workflows, forms = ServedWorkflows(), dict[str, ModelForm]()
        if parts is not None:
            workflows = parts.workflows(edits, self.pool, self._dispatcher, self.admission)
            forms = parts.forms
        self._workflows = workflows
        self._control = control = ClusterControl(
            config.name,
            self.pool,
            self._dispatcher,
            self.admission,
            fair_share,
            self.metrics.predictions,
            workflows,
        )
        self._certificates = Certificates(config.listen)
        self._keys = keys = KeyRing(
            config.keys,
            config.admission.max_edits,
            config.jobs.webhook_secret,
            config.outputs.urls,
            config.http.cors_origins,
        )
        front = Front(keys, self.admission, fair_share, edits, control, workflows)
        calls = ServerCalls(self.pool, workflows)
        self.grpc = GrpcServer(
            config, front, calls, OpenCalls(config.grpc, self.metrics), self._certificates
        )
        self._urls = ImageUrls(config.image_urls, config.limits, self.admission, fair_share)
        self._outputs = Outputs(config.outputs.timeout_s)
        bodies = Bodies(config.http, self.admission, fair_share)
        self._jobs, routes = self._openai(front, bodies, masks, forms)
        inference = HttpInference(bodies, front, fair_share)
        origins = config.http.cors_origins
        app = HttpApp(calls, inference, keys.client, routes, origins, lambda: self._jobs.state)
        self.http = self._clients_server(app)
        self.admin = self._operators_server()
        self._secrets = self._stamps()
        self._watching: asyncio.Task[None] | None = None

    def _openai(
        self, front: Front, bodies: Bodies, masks: MaskFinder, forms: dict[str, ModelForm]
    ) -> tuple[Jobs | NoJobs, list[Route]]:
        """Return the jobs, and the HTTP routes beside those of KServe."""
        config, fair_share = self._config, self._fair_share
        picture_urls = PictureUrls(config.openai)
        models = ServedModels(self.pool, forms, config.openai.aliases)
        reader = FormReader(bodies, config.limits, front, fair_share, models, self._urls, forms)
        images = ImageEdits(
            config.limits,
            front,
            fair_share,
            reader,
            FormPictures(front, fair_share, forms),
            self._outputs,
            picture_urls,
        )
        templates = TemplateRoutes(bodies, front, self._control, fair_share)
        jobs, job_routes = _jobs(
            config, front, reader, images, self._keys, self.admission, fair_share, self.metrics
        )
        return jobs, [
            *openai_routes(images, templates, picture_urls),
            *model_routes(front, models),
            *mask_routes(bodies, front, masks, fair_share),
            *job_routes,
            *workflow_routes(self._keys.client, self._workflows),
        ]

    def _clients_server(self, app: HttpApp) -> HttpServer:
        """Return the listener of clients' HTTP calls."""
        listen, http = self._config.listen, self._config.http
        return HttpServer(
            app.app(),
            http,
            connections(http.max_connections),
            self.metrics,
            listen.host,
            listen.http_port,
            self._certificates,
        )

    def _operators_server(self) -> HttpServer:
        """Return the listener of the operators' port."""
        config, listen = self._config, self._config.listen
        admin = Admin(
            config.name,
            self.pool,
            self.pending,
            self.admission,
            self.metrics,
            self._workflows,
            self.reload,
            listen.admin_names,
        )
        return HttpServer(
            admin.app(),
            config.http,
            _OPERATORS,
            self.metrics,
            listen.admin_host,
            listen.admin_port,
        )

    async def __aenter__(self) -> Router:
        try:
            await self._jobs.start()
            await self.pool.all_polled()
            self._workflows.start()
            # Start gRPC first: a client that sees the router ready over HTTP may call over gRPC.
            await self.grpc.start()
            await self.http.start()
            await self.admin.start()
        except BaseException:
            await self.stop()
            raise
        self._watching = asyncio.create_task(self._watch_secrets())
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
        self._control.replication_queue.send_missed()

    async def reload(self) -> None:
        """Apply the current configuration: workers, keys and certificates, all or nothing.

        Raises:
            ConfigError: it cannot be read, or changes a key that needs a restart; nothing changes.
        """
        config = self._read_config()
        check_change(self._config, config)
        pair = self._certificates.read()
        # Nothing fails from here on.
        self._certificates.replace(pair)
        self._keys.change(config.keys)
        self._config = config
        log.info(
            "the new configuration is applied: keys %s", ", ".join(k.name for k in config.keys)
        )
        await self.pool.reload(config)

    def _stamps(self) -> list[tuple[int, ...]]:
        """Return stamps of the files with secrets; they change when a file is written."""
        files = [*self._certificates.files, *filter(None, [self._config.keys_file])]
        stamps: list[tuple[int, ...]] = []
        for file in files:
            with suppress(OSError):
                file_stat = os.stat(file)
                stamps.append((file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size))
        return stamps

    async def _watch_secrets(self) -> None:
        """Reload after changes of keys or certificates: mounted secrets send no signal."""
        while True:
            await asyncio.sleep(_POLL_S)
            stamps = self._stamps()
            if stamps == self._secrets:
                continue
            self._secrets = stamps
            try:
                await self.reload()
            except ConfigError as error:
                log.error("changed keys or certificates were not applied: %s", error)
            except Exception:
                log.exception("changed keys or certificates were not applied")

    async def stop(self) -> None:
        """Take no more edits, finish edits under way within `faults.drain_grace_s`, and close."""
        self.admission.closed = True
        end = time.monotonic() + self._config.faults.drain_grace_s
        while self.admission.edits and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await self._jobs.stop(end - time.monotonic())
        await self.grpc.stop(1.0)
        await self.http.stop()
        await self.admin.stop()
        await self._urls.close()
        self._outputs.close()
        await self._control.replication_queue.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.pool.close()
        await self._workflows.close()
        self._fair_share.close()
        self._tracing.close()


def _jobs(
    config: RouterConfig,
    front: Front,
    reader: FormReader,
    images: ImageEdits,
    keys: KeyRing,
    admission: Admission,
    fair_share: FairShare,
    metrics: Metrics,
) -> tuple[Jobs | NoJobs, list[Route]]:
    """Return the jobs and their routes. Only a router that takes jobs imports them.

    Raises:
        ConfigError: a database is configured, and the extra `jobs` is not installed.
    """
    if not config.jobs.enabled:
        no_jobs = NoJobs("are turned off here ([jobs] enabled)")
        return no_jobs, no_jobs.routes(front)
    try:
        with extra("jobs", "[jobs]: jobs"):
            from maskserve_router.jobs.database import JobDatabase
            from maskserve_router.jobs.jobs import Jobs
            from maskserve_router.jobs.routes import job_routes
            from maskserve_router.jobs.runner import JobServices
            from maskserve_router.jobs.webhooks import Webhooks
    except ExtraMissing as missing:
        if config.jobs.database or config.jobs.database_file:
            raise
        log.warning("the router takes no jobs: they %s", missing.lack)
        no_jobs = NoJobs(missing.lack)
        return no_jobs, no_jobs.routes(front)
    database, webhooks = JobDatabase(config, fair_share), Webhooks(config.jobs)
    jobs = Jobs(
        JobServices(
            config, database, reader, images, keys, admission, fair_share, webhooks, metrics
        )
    )
    return jobs, job_routes(front, reader, jobs)


def _workflow_parts(
    config: RouterConfig, fair_share: FairShare, values: Values
) -> WorkflowParts | None:
    """Return the parts for workflows; None: neither workflows nor node servers are configured.

    Raises:
        ConfigError: the extra `workflows` is not installed, or a plan cannot be read.
    """
    files = config.workflows
    if not (files.folder or files.nodes or files.node_path):
        return None
    with extra("workflows", "[workflows]: workflows and node servers"):
        from maskserve_router.workflow_parts import WorkflowParts
    return WorkflowParts(config, fair_share, values)
