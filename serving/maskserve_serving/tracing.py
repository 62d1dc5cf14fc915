"""OpenTelemetry traces of one worker: the arguments for Triton, which follow `[trace]`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from maskserve_common.config import TraceConfig
from maskserve_serving.files import with_values
from maskserve_serving.options import ServeOptions

# `control` is called many times a second to watch a worker, and would fill the traces.
UNTRACED = "control"
_PROTOCOLS = ("http", "grpc")


def with_trace(tables: dict[str, Any], options: ServeOptions) -> dict[str, Any]:
    """Return the configuration tables with the trace options of the command line."""
    if options.otlp_url:
        tables = with_values(tables, "trace", otlp_url=options.otlp_url)
    if options.trace_rate is not None:
        tables = with_values(tables, "trace", rate=options.trace_rate)
    return tables


def trace_arguments(config: TraceConfig, worker: str) -> list[str]:
    """Return tritonserver's arguments for traces."""
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
        # Triton sends batches of 512, and accepts no shorter queue.
        f"opentelemetry,bsp_max_queue_size={max(config.queue, 512)}",
    )
    return [f"--trace-config={setting}" for setting in settings]


def forwarded_headers(config: TraceConfig) -> list[str]:
    """Return tritonserver's arguments for the headers that models receive as parameters."""
    # The fronts read `traceparent`, because Triton misses it in some requests. `control` reads
    # `origin`, because no web page may call it.
    header_pattern = "origin|traceparent" if config.otlp_url else "origin"
    return [
        f"--{protocol}-header-forward-pattern=(?i)({header_pattern})" for protocol in _PROTOCOLS
    ]


def untrace(http_url: str) -> str | None:
    """Turn off a running Triton's traces of `control`; return an error text, or None."""
    body = json.dumps({"trace_level": ["OFF"]}).encode()
    request = urllib.request.Request(
        f"{http_url}/v2/models/{UNTRACED}/trace/setting", data=body, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=5):
            return None
    except (urllib.error.URLError, OSError) as error:
        return f"traces will show every call of {UNTRACED}: {error}"
