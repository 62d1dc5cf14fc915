"""Spans of the router, between the client's and Triton's own."""

from __future__ import annotations

from maskserve_common.config import Config
from maskserve_common.tracing import TRACEPARENT, OpenSpan, make_tracer
from maskserve_router.config import RouterConfig
from maskserve_router.messages.edit_call import EditCall


class Tracing:
    """Opens a span per edit, and has the worker record below it."""

    def __init__(self, config: RouterConfig) -> None:
        self._tracer = make_tracer(Config(trace=config.trace, worker=config.name), "router")
        self._rate = config.trace.rate
        self._edits = 0

    def open(self, call: EditCall) -> OpenSpan:
        """A span in the client's trace, or, of one edit in so many, in a new one."""
        headers = dict(call.metadata)
        parent = headers.get(TRACEPARENT, "")
        self._edits += 1
        if not parent and self._edits % self._rate:
            return OpenSpan()
        span = self._tracer.begin("route", parent)
        if span.traceparent:
            headers[TRACEPARENT] = span.traceparent
            call.metadata = tuple(headers.items())
        return span

    def close(self) -> None:
        self._tracer.close()
