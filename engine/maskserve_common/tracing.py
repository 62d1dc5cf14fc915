"""Spans of this server inside the trace that Triton keeps of a request (docs/operate.md#traces).

A front reads the trace context of its request (Triton's, or else the client's) and opens the span
`pipeline` below it, which ends with the response. The models get that span as the request parameter
`traceparent`, and each records its work below it, from times taken before and after.

OpenTelemetry is optional, and imported only if `[trace] otlp_url` is set. A thread of the library
sends the spans; if a collector does not answer, there is a warning and spans are lost.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from maskserve_common.config import Config, TraceConfig
from maskserve_common.contracts.parameters import parameters
from maskserve_common.errors import MaskserveError

log = logging.getLogger(__name__)

TRACEPARENT = "traceparent"
"""Request parameter, and W3C header, that names the span to record below."""

_PREFIX = "maskserve."
# https://www.w3.org/TR/trace-context/#traceparent-header; ids of zeros are not valid.
_TRACEPARENT = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_CLOSE_S = 1.0
"""Seconds that a stopping worker waits for its last spans to be sent."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Something that was done for a request. Times are nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[tuple[str, int]] = ()
    """Names and times of events."""
    error: BaseException | None = None


class OpenSpan:
    """A span that other processes record below before it ends. Does nothing around None."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """The span's name in other processes; empty: there is none."""
        if self._span is None:
            return ""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, error: BaseException | None, **attributes: Any) -> None:
        if self._span is not None:
            with _harmless():
                _finish(self._span, attributes, error)
                self._span.end()


class Tracer:
    """Records the spans of one process.

    Args:
        provider: OpenTelemetry's TracerProvider; None records nothing.
    """

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("maskserve")

    def open(self, name: str, request: Any) -> OpenSpan:
        """Begin a span in the trace of `request`, if the request is traced."""
        if self._tracer is not None:
            with _harmless():
                parent = _parent_of_front(request)
                if parent:
                    return OpenSpan(self._start(name, parent, time.time_ns()))
        return OpenSpan()

    def begin(self, name: str, parent: str) -> OpenSpan:
        """Begin a span below the one named by `parent`; without one, in a new trace."""
        if self._tracer is not None:
            with _harmless():
                return OpenSpan(self._start(name, parent, time.time_ns()))
        return OpenSpan()

    def record(self, parent: str, stages: Sequence[Stage]) -> None:
        """Record work below the span named by `parent`; nothing if that is empty."""
        if self._tracer is None or not parent:
            return
        with _harmless():
            for stage in stages:
                span = self._start(stage.name, parent, stage.start_ns)
                for name, at_ns in stage.events:
                    span.add_event(name, timestamp=at_ns)
                _finish(span, stage.attributes, stage.error)
                span.end(stage.end_ns)

    def close(self) -> None:
        """Send the remaining spans, for a moment at most."""
        if self._provider is not None:
            # A thread, as the library's own limit is half a minute.
            closing = threading.Thread(target=self._provider.shutdown, daemon=True)
            closing.start()
            closing.join(_CLOSE_S)

    def _start(self, name: str, parent: str, start_ns: int) -> Any:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        assert self._tracer is not None
        context = TraceContextTextMapPropagator().extract({TRACEPARENT: parent})
        return self._tracer.start_span(name, context, start_time=start_ns)


def make_tracer(config: Config, model: str) -> Tracer:
    if not config.trace.otlp_url:
        return Tracer()
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError as error:
        log.warning(
            "no spans: [trace] otlp_url is set, but %s (in the checkout: "
            "pip install -e '.[trace]')",
            error,
        )
        return Tracer()
    resource = Resource(
        {
            "service.name": "maskserve",
            "service.instance.id": config.worker,
            "triton.model_name": model,
        }
    )
    # Not at exit: Triton ends its Python processes as it likes.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(_sender(config.trace))
    return Tracer(provider)


@contextmanager
def _harmless() -> Iterator[None]:
    """Suppress errors of tracing, so that the request continues."""
    try:
        yield
    except Exception:
        log.exception("a span was lost")


def parent_of(request: Any) -> str:
    """Return the trace parent that a front passed to the models behind it; empty: none."""
    return str(parameters(request).get(TRACEPARENT, ""))


def _parent_of_front(request: Any) -> str:
    """Triton's own span of `request`; empty if it is not traced.

    TRITON-2.51: it overlooks some clients' traces where edits are cancelled. It then has no span,
    or one in a trace of its own; in that case the client's span.
    """
    raw = request.trace().get_context()
    of_triton = str(json.loads(raw).get(TRACEPARENT, "")) if raw else ""
    of_client = _client_span(request)
    overlooked = of_client and _trace_id(of_client) != _trace_id(of_triton)
    return of_client if overlooked else of_triton


def _client_span(request: Any) -> str:
    """Return the span that a client names in its header, which Triton passes on as a parameter; or
    "".
    """
    for name, value in parameters(request).items():
        if name.lower() == TRACEPARENT and _TRACEPARENT.fullmatch(str(value)):
            return str(value)
    return ""


def _trace_id(traceparent: str) -> str:
    return traceparent[3:35]


def _finish(span: Any, attributes: Mapping[str, Any], error: BaseException | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes({_PREFIX + name: value for name, value in attributes.items()})
    if error is not None:
        # Other errors than this server's may contain private data.
        code = error.code if isinstance(error, MaskserveError) else type(error).__name__
        description = str(error) if isinstance(error, MaskserveError) else code
        span.set_attribute("error.type", code)
        span.set_status(Status(StatusCode.ERROR, description))


def _sender(config: TraceConfig) -> Any:
    """Return an exporter that sends spans from its own thread."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import (
        BatchSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    # The library writes a line or more for each batch that it cannot send.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    class Sender(SpanExporter):
        """Logs once that the collector does not take spans, and once that it takes them again."""

        def __init__(self) -> None:
            self._inner: SpanExporter = OTLPSpanExporter(config.otlp_url, timeout=config.timeout_s)
            self._failing = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = self._inner.export(spans)
            failed = result is not SpanExportResult.SUCCESS
            if failed and not self._failing:
                log.warning("spans are lost: %s does not take them", config.otlp_url)
            elif self._failing and not failed:
                log.info("%s takes spans again", config.otlp_url)
            self._failing = failed
            return result

        def shutdown(self) -> None:
            self._inner.shutdown()

    return BatchSpanProcessor(
        Sender(),
        max_queue_size=config.queue,
        schedule_delay_millis=1e3 * config.interval_s,
        max_export_batch_size=min(512, config.queue),
    )
