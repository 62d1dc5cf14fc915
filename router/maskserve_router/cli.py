"""`maskserve-router`: run a router."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from maskserve_common.config import NODE_PATH_HELP, ConfigError, node_path_folders
from maskserve_common.garbage import without_garbage_collection
from maskserve_common.logs import log_handler
from maskserve_router.config import RouterConfig, load_router_config
from maskserve_router.extras import extra
from maskserve_router.listeners.descriptors import raise_limit
from maskserve_router.memory import keep_freed_memory

if TYPE_CHECKING:
    from maskserve_router.router import Router

log = logging.getLogger("maskserve.router")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; SIGHUP reloads the configuration."""
    options = parser().parse_args(arguments)
    keep_freed_memory()
    raise_limit()
    os.umask(0o077)
    try:
        config = _config(options)
        handler = log_handler(config.log, config.name, "router")
    except ConfigError as error:
        print(f"maskserve-router: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=config.log.level, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it logs each malformed request
    try:
        asyncio.run(_run(config, options))
    except (ConfigError, OSError) as error:
        print(f"maskserve-router: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 3
    return 0


async def _run(config: RouterConfig, options: argparse.Namespace) -> None:
    with extra("router", "routers"):
        from maskserve_router.router import Router
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as exit_stack:
        with without_garbage_collection():  # a full collection would hold up all edits for 0.1 s
            router = await exit_stack.enter_async_context(Router(config, lambda: _config(options)))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = asyncio.create_task(_reload(router))
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        await stopping.wait()
        log.info("stopping after the edits in flight are finished")


async def _reload(router: Router) -> None:
    try:
        await router.reload()
    except ConfigError as error:
        log.error("the new configuration was not applied: %s", error)


def _config(options: argparse.Namespace) -> RouterConfig:
    listen = {
        name: value
        for name in ("host", "http_port", "grpc_port", "admin_host", "admin_port")
        if (value := getattr(options, name)) is not None
    }
    over: dict[str, Any] = {"listen": listen}
    if options.worker:
        over["workers"] = {"addresses": options.worker}
    node_path = node_path_folders(options.node_path)
    workflows = {"folder": options.workflows, "nodes": options.node, "node_path": node_path}
    over["workflows"] = {name: value for name, value in workflows.items() if value}
    if options.values is not None:
        over["values"] = {"folder": options.values}
    if options.jobs == "off":
        over["jobs"] = {"enabled": False}
    elif options.jobs is not None:
        over["jobs"] = {"database": options.jobs}
    elif options.jobs_from is not None:
        over["jobs"] = {"database_file": options.jobs_from}
    if options.keys is not None:
        over["keys_file"] = options.keys
    if options.policy:
        over["routing"] = {"policy": options.policy}
    trace = {"otlp_url": options.otlp_url, "rate": options.trace_rate}
    over["trace"] = {name: value for name, value in trace.items() if value is not None}
    return load_router_config(options.config, **over)


def parser() -> argparse.ArgumentParser:
    argument_parser = argparse.ArgumentParser(
        prog="maskserve-router",
        description="Route requests to many workers: KServe v2 and OpenAI's image edits.",
    )
    add = argument_parser.add_argument
    add("--config", metavar="FILE", help="configuration file (TOML); the options below override it")
    add(
        "--worker",
        action="append",
        metavar="HOST:PORT",
        help="gRPC address of a worker, or dns:NAME:PORT; may be repeated",
    )
    add(
        "--workflows",
        metavar="DIR",
        help="folder of workflow plans; the router serves each plan as a model",
    )
    add("--node-path", default="", metavar="DIR[:DIR]", help=NODE_PATH_HELP)
    add(
        "--node",
        action="append",
        metavar="HOST:PORT",
        help="gRPC address of a node server for workflows, or dns:NAME:PORT; may be repeated",
    )
    add(
        "--values",
        metavar="DIR",
        help="folder in memory that workers and node servers of this host share with the router",
    )
    add(
        "--keys",
        metavar="FILE",
        help="TOML file with [[keys]]; the router does not start if the file has no key",
    )
    jobs = argument_parser.add_mutually_exclusive_group()
    jobs.add_argument(
        "--jobs",
        metavar="DATABASE",
        help="overrides [jobs] database; off: the router takes no jobs",
    )
    jobs.add_argument("--jobs-from", metavar="FILE", help="overrides [jobs] database_file")
    add(
        "--policy",
        help="choice of a worker: mask_aware (default), least_requests, least_tokens, round_robin",
    )
    add("--host", help="address of the clients' ports (default 127.0.0.1)")
    add("--http-port", type=int, help="HTTP port for clients (default 8080)")
    add("--grpc-port", type=int, help="gRPC port for clients (default 8081)")
    add("--admin-host", help="address of the operators' port (default 127.0.0.1)")
    add(
        "--admin-port",
        type=int,
        help="operators' port: metrics, workers, drain, reload (default 8082)",
    )
    add("--otlp-url", metavar="URL", help="send OpenTelemetry spans to this URL (OTLP over HTTP)")
    add("--trace-rate", type=int, metavar="N", help="trace one edit in N (default 1)")
    return argument_parser
