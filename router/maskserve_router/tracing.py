"""The router's trace spans, between the client's and Triton's."""

from __future__ import annotations

from maskserve_common.config import Config
from maskserve_common.tracing import TRACEPARENT, OpenSpan, make_tracer
from maskserve_router.config import RouterConfig
from maskserve_router.messages.edit_call import EditCall


class Tracing:
    """Opens a span for each edit and makes the worker's spans its children."""

    def __init__(self, config: RouterConfig) -> None:
        self._tracer = make_tracer(Config(trace=config.trace, worker=config.name), "router")
        self._rate = config.trace.rate
        self._edits = 0

    def open(self, call: EditCall) -> OpenSpan:
        """Open a span in the client's trace, or, for one edit in `rate`, in a new trace."""
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
