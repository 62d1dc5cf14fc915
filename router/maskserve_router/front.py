"""What both listeners serve: an inference by whoever may ask for it, logged and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager

from tritonclient.grpc import service_pb2 as pb

from maskserve_core.contracts.tensors import Contract
from maskserve_core.errors import Cancelled, MaskserveError
from maskserve_core.worker.logs import about
from maskserve_core.workflows.plan import WorkflowPlan
from maskserve_router.admission import Admission
from maskserve_router.control import ClusterControl
from maskserve_router.dispatch import Dispatcher
from maskserve_router.edit_call import EditCall, make_edit_call, parse_request
from maskserve_router.failures import Failure, guarded
from maskserve_router.forwarded import known_headers
from maskserve_router.keys import EditCounts, KeyHolder, KeyRing
from maskserve_router.masks import MaskFinder
from maskserve_router.metrics import Metrics
from maskserve_router.model_request import ModelRequest
from maskserve_router.tracing import Tracing
from maskserve_router.turns import Turns
from maskserve_router.workflows import Workflows

log = logging.getLogger("maskserve.router")


class Front:
    """Serves inferences, unary and streamed."""

    def __init__(
        self,
        keys: KeyRing,
        dispatcher: Dispatcher,
        control: ClusterControl,
        admission: Admission,
        turns: Turns,
        metrics: Metrics,
        tracing: Tracing,
        workflows: Workflows,
        masks: MaskFinder,
    ) -> None:
        self._workflows, self._masks = workflows, masks
        self._keys, self._dispatcher, self._control = keys, dispatcher, control
        self._admission, self._turns = admission, turns
        self._metrics, self._tracing = metrics, tracing

    @property
    def models(self) -> Mapping[str, Contract]:
        """What clients may call: tensors by name."""
        return self._workflows.models

    @property
    def plans(self) -> Mapping[str, WorkflowPlan]:
        """Workflows by name."""
        return self._workflows.plans

    def client(self, headers: Mapping[str, str]) -> KeyHolder:
        """Who calls; see `KeyRing.client`."""
        return self._keys.client(headers)

    async def may_read(self, headers: Mapping[str, str]) -> None:
        """Wait until the next message of a call with these headers may be read."""
        await self._turns.may_read(self.client(headers))

    async def parse(self, raw: bytes, client: KeyHolder, held: ExitStack) -> ModelRequest:
        """The message of a client's call, held against its bytes until `held` is closed.

        Raises:
            InvalidRequest: as `parse_request`.
            RetryLater: too many bytes are under way.
        """
        self._turns.came(client, len(raw))
        held.enter_context(self._admission.hold(client, len(raw)))
        return await self._turns.run(client, len(raw), parse_request, raw, self.models)

    async def infer(
        self,
        message: ModelRequest,
        size: int,
        client: KeyHolder,
        headers: Mapping[str, str],
        timeout: float | None,
        route: str,
    ) -> bytes:
        """The answer to one request, a ModelInferResponse as bytes.

        Args:
            message: the request, as `parse_request` checked it.
            size: its bytes.
            client: who calls.
            headers: of the call, names in lower case.
            timeout: seconds the client waits.
            route: which way it came, for logs and metrics.

        Raises:
            MaskserveError: the router's own.
            Failure: the worker's.
        """
        if message.head.model_name == "control":
            return await self._control.infer(message, client)
        if message.head.model_name in self._workflows.plans:
            return await self._workflows.infer(message, headers, timeout, client, self)
        await self._masks.filled_in(message, client)
        call = _edit_call(message, size, headers, timeout, client)
        with self._told(call, client, route):
            return await self._dispatcher.infer(call, client)

    async def stream(
        self,
        message: ModelRequest,
        size: int,
        client: KeyHolder,
        headers: Mapping[str, str],
        timeout: float | None,
        route: str,
    ) -> AsyncGenerator[bytes, None]:
        """The answers to one request, ModelStreamInferResponses as bytes; as `infer` otherwise."""
        if message.head.model_name == "control":
            answer = pb.ModelInferResponse.FromString(await self._control.infer(message, client))
            yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
            return
        if message.head.model_name in self._workflows.plans:
            run = self._workflows.stream(message, headers, timeout, client, self)
            async with aclosing(run) as events:
                async for event in events:
                    yield await self._turns.run(client, event.ByteSize(), _in_stream, event)
            return
        await self._masks.filled_in(message, client)
        call = _edit_call(message, size, headers, timeout, client)
        with self._told(call, client, route):
            async with aclosing(self._dispatcher.stream(call, client)) as answers:
                async for answer_bytes in answers:
                    yield answer_bytes

    @contextmanager
    def _told(self, call: EditCall, client: KeyHolder, route: str) -> Iterator[None]:
        """Tell of an edit when it ends: a log line, a count, a span."""
        span = self._tracing.open(call)
        error: MaskserveError | Failure | None = None
        begin = time.monotonic()
        try:
            yield
        except (MaskserveError, Failure) as known:
            error = known
            raise
        except Exception as surprise:
            error = guarded(call.request_id, surprise)
            raise error from None
        except BaseException:
            error = Cancelled("the client left")
            raise
        finally:
            code = error.code if error is not None else "OK"
            self._metrics.requests.labels(route, code).inc()
            served = client.served.setdefault(call.message.head.model_name, EditCounts())
            served.add(time.monotonic() - begin, succeeded=error is None)
            worker = call.worker
            span.end(error if isinstance(error, MaskserveError) else None, worker=worker, code=code)
            fields = {
                "code": code,
                "route": route,
                "client": client.name,
                "upstream": worker,
                "tries": call.tries,
                "seconds": round(time.monotonic() - begin, 4),
            }
            if error is not None and code != "OK":
                told = error.details if isinstance(error, Failure) else str(error)
                fields["error"] = told[:300]
            log.info(
                "edit %s", code, extra={**about(call.request_id), "event": "edit", "fields": fields}
            )


def _in_stream(event: pb.ModelInferResponse) -> bytes:
    """A message of a stream."""
    message: bytes = pb.ModelStreamInferResponse(infer_response=event).SerializeToString()
    return message


def _edit_call(
    message: ModelRequest,
    size: int,
    headers: Mapping[str, str],
    timeout: float | None,
    client: KeyHolder,
) -> EditCall:
    """A client's edit.

    Raises:
        InvalidRequest: naming the setting.
        AdapterNotFound: it names another key's LoRA.
    """
    private, known = client.private_prompts, known_headers(headers)
    call = make_edit_call(message, size, known, timeout, client.scope, private_prompt=private)
    if call.settings is not None:
        client.check_adapters((lora.name for lora in call.settings.loras), "SETTINGS.loras")
    return call
