"""OpenTelemetry traces of one worker: what Triton is told, beside `[trace]` of the models."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from maskserve_common.config import TraceConfig
from maskserve_serving.files import with_values
from maskserve_serving.options import ServeOptions

# `control` is asked many times a second by whoever watches a worker: that is nothing to trace,
# and where one request in so many is traced, it would be one of those most of the time.
UNTRACED = "control"
_PROTOCOLS = ("http", "grpc")


def with_trace(tables: dict[str, Any], options: ServeOptions) -> dict[str, Any]:
    """Configuration tables with what the command line says of traces laid over them."""
    if options.otlp_url:
        tables = with_values(tables, "trace", otlp_url=options.otlp_url)
    if options.trace_rate is not None:
        tables = with_values(tables, "trace", rate=options.trace_rate)
    return tables


def trace_arguments(config: TraceConfig, worker: str) -> list[str]:
    """Further arguments for tritonserver."""
    if not config.otlp_url:
        return []
    settings = (
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        f"rate={config.rate}",
        f"opentelemetry,url={config.otlp_url}",
        "opentelemetry,resource=service.name=maskserve",
        f"opentelemetry,resource=service.instance.id={worker}",
        f"opentelemetry,bsp_schedule_delay={round(1e3 * config.interval_s)}",
        # Triton sends batches of 512, and takes no queue that is shorter.
        f"opentelemetry,bsp_max_queue_size={max(config.queue, 512)}",
    )
    return [f"--trace-config={setting}" for setting in settings]


def forwarded_headers(config: TraceConfig) -> list[str]:
    """Further arguments for tritonserver: headers that models are told as parameters."""
    # `traceparent` for the fronts, as Triton overlooks that of some requests itself; `origin` for
    # `control`, which no page is to ask.
    header_pattern = "origin|traceparent" if config.otlp_url else "origin"
    return [
        f"--{protocol}-header-forward-pattern=(?i)({header_pattern})" for protocol in _PROTOCOLS
    ]


def untrace(http_url: str) -> str | None:
    """Have a running Triton trace no `control`; what went wrong, in words."""
    body = json.dumps({"trace_level": ["OFF"]}).encode()
    request = urllib.request.Request(
        f"{http_url}/v2/models/{UNTRACED}/trace/setting", data=body, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=5):
            return None
    except (urllib.error.URLError, OSError) as error:
        return f"traces will show every call of {UNTRACED}: {error}"
