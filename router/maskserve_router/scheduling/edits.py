"""Answers edits through a worker, and logs and counts each."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from maskserve_common.contracts.request import EditKind
from maskserve_common.errors import MaskserveError
from maskserve_common.servers.failure import Failure
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.edit_call import EditCall, make_edit_call
from maskserve_router.messages.forwarded_headers import foreign_id, known_headers
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import EditRoom
from maskserve_router.scheduling.client_calls import logged
from maskserve_router.scheduling.dispatch import Dispatcher
from maskserve_router.scheduling.mask_finder import MaskFinder
from maskserve_router.tracing import Tracing


class Edits:
    """Answers edits.

    Args:
        dispatcher: sends edits to workers.
        masks: makes masks that are requested by name or clicks.
        metrics: counters of requests.
        tracing: opens a span for each edit.
    """

    def __init__(
        self, dispatcher: Dispatcher, masks: MaskFinder, metrics: Metrics, tracing: Tracing
    ) -> None:
        self._dispatcher, self._masks = dispatcher, masks
        self._metrics, self._tracing = metrics, tracing

    async def alone_s(
        self, message: ModelRequest, client: KeyHolder, kind: EditKind
    ) -> float | None:
        """Return `Dispatcher.alone_s`."""
        return await self._dispatcher.alone_s(message, client, kind)

    async def encode(self, message: ModelRequest, client: KeyHolder) -> bytes:
        """Return `Dispatcher.encode`."""
        return await self._dispatcher.encode(message, client)

    async def infer(self, message: ModelRequest, context: CallContext, room: EditRoom) -> bytes:
        """Return the answer to one edit; arguments and errors are those of `Front.infer`."""
        await self._masks.fill_in_mask(message, context.client)
        call = _edit_call(message, context)
        with self._logged(call, context.route, foreign_id(context.headers)):
            return await self._dispatcher.infer(call, room)

    async def stream(
        self, message: ModelRequest, context: CallContext, room: EditRoom
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answers to one edit; arguments and errors are those of `Front.stream`."""
        await self._masks.fill_in_mask(message, context.client)
        call = _edit_call(message, context)
        with self._logged(call, context.route, foreign_id(context.headers)):
            async with aclosing(self._dispatcher.stream(call, room)) as answers:
                async for answer in answers:
                    yield answer

    @contextmanager
    def _logged(self, call: EditCall, route: str, foreign: str) -> Iterator[None]:
        """Write a log line, a count and a span when the edit ends."""
        span = self._tracing.open(call)

        def ended(code: str, error: MaskserveError | Failure | None) -> dict[str, Any]:
            self._metrics.requests.labels(route, code).inc()
            known = error if isinstance(error, MaskserveError) else None
            span.end(known, worker=call.worker, code=code)
            fields = {"route": route, "upstream": call.worker, "tries": call.tries}
            if foreign:
                fields["x_request_id"] = foreign
            return fields

        with logged(call, ended):
            yield


def _edit_call(message: ModelRequest, context: CallContext) -> EditCall:
    """Make the edit of a client's request.

    Raises:
        InvalidRequest: naming the setting.
        AdapterNotFound: the settings name a LoRA of another key.
    """
    headers = known_headers(context.headers)
    call = make_edit_call(message, context.size, context.client, headers, context.timeout)
    if call.settings is not None:
        names = (lora.name for lora in call.settings.loras)
        context.client.check_adapters(names, "SETTINGS.loras")
    return call
