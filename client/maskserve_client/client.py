"""The blocking client."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from maskserve_client import wire
from maskserve_client.calls import Answers, PendingAnswer
from maskserve_client.errors import ServerUnavailable, from_rpc
from maskserve_client.events import EditResult, Event, Final
from maskserve_client.interrupts import deferred
from maskserve_client.wire import DEFAULT_URL, Answer, ImageInput, ModelCall
from maskserve_common.errors import Cancelled


class Endpoint:
    """A channel to a server, for gRPC's blocking calls or its asyncio calls.

    Args:
        url: host:port of the gRPC endpoint.
        credentials: TLS credentials; None: plain text.
        headers: metadata sent with every call, such as an API key.

    Raises:
        InvalidRequest: `url` is an HTTP address.
    """

    _grpc: Any = grpc

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url = wire.address(url)
        self._metadata = tuple((headers or {}).items())
        self._channel: Any = (
            self._grpc.insecure_channel(self._url, wire.CHANNEL_OPTIONS)
            if credentials is None
            else self._grpc.secure_channel(self._url, credentials, wire.CHANNEL_OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)


class Client(Endpoint):
    """Edits over gRPC, from one worker or a router. Threads may share one client.

        with Client("localhost:9001") as client:
            result = client.edit("room.png", "mask.png", "a red sofa", seed=7)
            result.image.save("edited.png")

    Arguments are those of `Endpoint`. Errors are those of maskserve_common.errors, and
    ServerUnavailable.
    """

    def edit(
        self,
        image: ImageInput | None = None,
        mask: ImageInput | None = None,
        prompt: str = "",
        *,
        images: Sequence[ImageInput] = (),
        control: Sequence[ImageInput] = (),
        timeout: float | None = None,
        **settings: Any,
    ) -> EditResult:
        """Run one edit and wait for it.

        Args:
            image: the source; None with the setting `template_id`.
            mask: mask of the same size; it edits where it is white, or where alpha is 0 if it has
                transparency. None with the setting `expand`: the new part is edited. None without
                it: the whole picture is, by models that edit by instruction, or with the setting
                `strength` below 1.
            prompt: what to paint there.
            images: references, which the model sees beside the source or the template. Without
                either, the first is the source. With the setting `ip_adapter` the last is its
                picture, and a picture without a source has this one alone.
            control: pictures of the same size for the ControlNets in the setting `controls`.
            timeout: seconds after which the edit is cancelled.
            settings: see maskserve_common.contracts.settings.EditSettings.

        Raises:
            MaskserveError: the server's error, or ServerUnavailable.
            OSError: a path cannot be read.
        """
        return self._infer(wire.edit(image, mask, prompt, settings, control, images), timeout)

    def generate(
        self,
        prompt: str,
        size: str = "auto",
        *,
        control: Sequence[ImageInput] = (),
        timeout: float | None = None,
        **settings: Any,
    ) -> EditResult:
        """Make a picture without a source and wait for it.

        Args:
            prompt: what to paint.
            size: WIDTHxHEIGHT, as 1024x768; `auto`: the model's native square.
            control: pictures of that size for the ControlNets in the setting `controls`.
            timeout: seconds after which it is cancelled.
            settings: as in `edit`.

        Raises:
            MaskserveError: the server's error, or ServerUnavailable.
            OSError: a path cannot be read.
        """
        return self.edit(
            None, None, prompt, control=control, timeout=timeout, size=size, **settings
        )

    def edit_stream(
        self,
        image: ImageInput | None = None,
        mask: ImageInput | None = None,
        prompt: str = "",
        *,
        images: Sequence[ImageInput] = (),
        control: Sequence[ImageInput] = (),
        timeout: float | None = None,
        **settings: Any,
    ) -> Generator[Event, None, None]:
        """Yield Progress and Preview events of one edit, then one Final. Without an image, a
        picture is made (`generate`).

        The edit is sent when the first event is requested. Closing or dropping the iterator cancels
        the edit on the server. Arguments and errors are those of `edit`; `progress` is on unless it
        is set.
        """
        request = wire.edit_stream(image, mask, prompt, settings, control, images)
        return self._events(request, timeout, progress=settings.get("progress", True))

    def control(self, op: str, *, timeout: float | None = 10.0, **fields: Any) -> dict[str, Any]:
        """Run an operation on the worker: `status`, `heartbeat`, `templates`, `cancel`, …

        Args:
            op: name of the operation.
            timeout: seconds to wait for the answer.
            fields: its fields, such as `request_id`; bytes are sent as base64 text.

        Raises:
            MaskserveError: the server's error, or ServerUnavailable.
        """
        return self._infer(wire.control(op, fields), timeout)

    def register(
        self, image: ImageInput, *, shared: bool = False, timeout: float | None = 60.0
    ) -> str:
        """Register a template and return its id, for the setting `template_id`.

        Args:
            image: the picture.
            shared: True to share it with every client of a router with API keys.
            timeout: seconds to wait for the answer.

        Raises:
            MaskserveError: the server's error, or ServerUnavailable.
        """
        return self._infer(wire.register(image, shared), timeout)

    def run_workflow(
        self,
        name: str,
        inputs: Mapping[str, ImageInput],
        *,
        timeout: float | None = None,
        **settings: Any,
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Run a workflow of a router and wait for it.

        Args:
            name: name of the workflow.
            inputs: inputs by name; a str is text, and pictures have the other types that `edit`
                takes.
            timeout: seconds after which the run is cancelled.
            settings: settings of all its edits; see
                maskserve_common.contracts.settings.EditSettings.

        Returns:
            Outputs by name, encoded, and META.

        Raises:
            MaskserveError: the server's error, or ServerUnavailable.
        """
        return self._infer(wire.workflow(name, inputs, settings), timeout)

    def cancel(self, request_id: str, *, timeout: float | None = 10.0) -> bool:
        """Cancel an edit by its id. Return False: no such edit is in flight."""
        return self._infer(wire.cancel(request_id), timeout)

    def close(self) -> None:
        """Close the connection; edits in flight are cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _infer(self, call: ModelCall[Answer], timeout: float | None) -> Answer:
        answer: PendingAnswer | None = None
        try:
            with deferred():
                answer = PendingAnswer(
                    self._stub.ModelInfer.future(
                        call.request, timeout=timeout, metadata=self._metadata
                    )
                )
            return call.read(answer.get())
        except grpc.RpcError as error:
            raise from_rpc(error, self._url) from None
        except grpc.FutureCancelledError:
            raise Cancelled(f"{self._url}: the client was closed") from None
        finally:
            if answer is not None:
                answer.cancel()  # no effect once it is done; otherwise the caller was interrupted

    def _events(
        self, request: service_pb2.ModelInferRequest, timeout: float | None, *, progress: bool
    ) -> Generator[Event, None, None]:
        answers: Answers | None = None
        reported_step = 0
        try:
            with deferred():
                answers = Answers(
                    self._stub.ModelStreamInfer(
                        iter((request,)), timeout=timeout, metadata=self._metadata
                    )
                )
            for message in answers:
                event = wire.stream_event(message)
                if event is not None:
                    # The server ends the stream right after the final answer. Do not cancel: that
                    # would only race with the end.
                    if isinstance(event, Final):
                        answers.drain()
                        if progress and (last := wire.last_step(event, reported_step)):
                            yield last
                        yield event
                        return
                    reported_step = event.step
                    yield event
        except grpc.RpcError as error:
            raise from_rpc(error, self._url) from None
        finally:
            if answers is not None:
                answers.cancel()
        raise ServerUnavailable(f"{self._url}: the stream ended before the final answer")
