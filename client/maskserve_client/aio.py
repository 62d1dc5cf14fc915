"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from maskserve_client import wire
from maskserve_client.client import Endpoint
from maskserve_client.errors import ServerUnavailable, from_rpc
from maskserve_client.events import EditResult, Event, Final
from maskserve_client.wire import Answer, ImageInput, ModelCall


class AsyncClient(Endpoint):
    """`Client` for one event loop. Cancelling the awaiting task cancels the edit.

        async with AsyncClient("localhost:9001") as client:
            async with contextlib.aclosing(
                client.edit_stream("room.png", "mask.png", "a red sofa")
            ) as events:
                async for event in events:
                    ...

    Arguments are those of `Endpoint`.
    """

    _grpc = grpc.aio

    async def edit(
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
        """Run one edit; see `Client.edit`."""
        # Files and pixels are read and written off the event loop, as everywhere below.
        call = await asyncio.to_thread(wire.edit, image, mask, prompt, settings, control, images)
        return await self._infer(call, timeout)

    async def generate(
        self,
        prompt: str,
        size: str = "auto",
        *,
        control: Sequence[ImageInput] = (),
        timeout: float | None = None,
        **settings: Any,
    ) -> EditResult:
        """Make a picture without a source; see `Client.generate`."""
        return await self.edit(
            None, None, prompt, control=control, timeout=timeout, size=size, **settings
        )

    async def edit_stream(
        self,
        image: ImageInput | None = None,
        mask: ImageInput | None = None,
        prompt: str = "",
        *,
        images: Sequence[ImageInput] = (),
        control: Sequence[ImageInput] = (),
        timeout: float | None = None,
        **settings: Any,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one edit; see `Client.edit_stream`.

        Leaving the loop early cancels the edit only when the iterator is closed: use
        contextlib.aclosing.
        """
        request = await asyncio.to_thread(
            wire.edit_stream, image, mask, prompt, settings, control, images
        )

        async def requests() -> AsyncGenerator[service_pb2.ModelInferRequest, None]:
            yield request

        reported_step = 0
        call = self._stub.ModelStreamInfer(requests(), timeout=timeout, metadata=self._metadata)
        try:
            async for message in call:
                event = await asyncio.to_thread(wire.stream_event, message)
                if event is not None:
                    # As in `Client`: no cancel may race with the end of the stream.
                    if isinstance(event, Final):
                        await _drain(call)
                        last = wire.last_step(event, reported_step)
                        if last and settings.get("progress", True):
                            yield last
                        yield event
                        return
                    reported_step = event.step
                    yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._url) from None
        finally:
            call.cancel()
        raise ServerUnavailable(f"{self._url}: the stream ended before the final answer")

    async def control(
        self, op: str, *, timeout: float | None = 10.0, **fields: Any
    ) -> dict[str, Any]:
        """Run an operation on the worker; see `Client.control`."""
        return await self._infer(wire.control(op, fields), timeout)

    async def register(
        self, image: ImageInput, *, shared: bool = False, timeout: float | None = 60.0
    ) -> str:
        """Register a template; see `Client.register`."""
        return await self._infer(await asyncio.to_thread(wire.register, image, shared), timeout)

    async def cancel(self, request_id: str, *, timeout: float | None = 10.0) -> bool:
        """Cancel an edit by its id. Return False: no such edit is in flight."""
        return await self._infer(wire.cancel(request_id), timeout)

    async def close(self) -> None:
        """Close the connection; edits in flight are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _infer(self, call: ModelCall[Answer], timeout: float | None) -> Answer:
        rpc = self._stub.ModelInfer(call.request, timeout=timeout, metadata=self._metadata)
        try:
            response = await rpc
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._url) from None
        finally:
            rpc.cancel()  # no effect once it is done
        return await asyncio.to_thread(call.read, response)


async def _drain(call: Any) -> None:
    """Read a stream to its end, and ignore errors: the answer is there already."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass
