"""An OpenTelemetry collector that keeps its spans: OTLP over HTTP, JSON or protobuf."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: tuple[str, ...]
    error: str | None
    """The span's error message; None without an error."""


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self._spans: list[Span] = []

    def take(self, content_type: str, body: bytes) -> None:
        if "json" in content_type:
            values = json.loads(body)  # ids are hexadecimal
        else:
            values = MessageToDict(ExportTraceServiceRequest.FromString(body))  # and base64 here
        for resource in values.get("resourceSpans", []):
            about = _attributes(resource["resource"])
            for scope in resource["scopeSpans"]:
                self._spans += [_span(span, about) for span in scope["spans"]]

    def trace(self, trace_id: str) -> list[Span]:
        """The trace's spans so far, by start."""
        spans = [span for span in self._spans if span.trace_id == trace_id]
        return sorted(spans, key=lambda span: span.start_ns)

    def trace_ids(self) -> set[str]:
        return {span.trace_id for span in self._spans}


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.take(self.headers["Content-Type"], body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()


def draw(spans: list[Span]) -> str:
    """A trace as an indented list for people: offset and length in milliseconds."""
    span_ids = {span.span_id for span in spans}
    lines: list[str] = []

    def add(parent: str, depth: int) -> None:
        for span in spans:
            if span.parent_id == parent or (not depth and span.parent_id not in span_ids):
                begin = (span.start_ns - spans[0].start_ns) / 1e6
                end_ns = (span.end_ns - span.start_ns) / 1e6
                error_text = f"  ERROR {span.error}" if span.error is not None else ""
                lines.append(
                    f"{'  ' * depth + span.name:24} {begin:8.1f} {end_ns:8.1f}{error_text}"
                )
                add(span.span_id, depth + 1)

    add("", 0)
    return "\n".join(lines)


def _span(span: dict[str, Any], resource: dict[str, Any]) -> Span:
    status = span.get("status", {})
    failed = status.get("code") in (2, "STATUS_CODE_ERROR")
    return Span(
        name=span["name"],
        trace_id=_hex(span["traceId"]),
        span_id=_hex(span["spanId"]),
        parent_id=_hex(span.get("parentSpanId", "")),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_attributes(span),
        resource=resource,
        events=tuple(event["name"] for event in span.get("events", ())),
        error=status.get("message", "") if failed else None,
    )


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for attribute in holder.get("attributes", ()):
        [(kind, value)] = attribute["value"].items()
        attributes[attribute["key"]] = int(value) if kind == "intValue" else value
    return attributes


def _hex(identity: str) -> str:
    """An id of 16 or 8 bytes as hexadecimal digits; the input is hexadecimal or base64."""
    return identity if len(identity) in (0, 16, 32) else base64.b64decode(identity).hex()
