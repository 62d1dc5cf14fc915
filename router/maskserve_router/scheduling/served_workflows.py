"""Workflows and node servers as the rest of the router sees them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts.tensors import Contract
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.edit_call import MODELS, UnknownModel
from maskserve_router.messages.model_request import ModelRequest


class ServedWorkflows:
    """The workflows of a router that serves none. `workflows.Workflows` serves some."""

    models: Mapping[str, Contract] = MODELS
    """Model name -> tensors, for all models that clients may call."""
    names: Collection[str] = ()
    """Names of the workflows, which are models."""

    def start(self) -> None:
        """Begin to watch the node servers."""

    async def close(self) -> None:
        """Close the connections to node servers."""

    def metadata(self, name: str) -> pb.ModelMetadataResponse:
        """Return the metadata of a workflow as a model."""
        raise UnknownModel(name)

    def config(self, name: str) -> pb.ModelConfigResponse:
        """Return Triton's configuration of a workflow as a model."""
        raise UnknownModel(name)

    def cancel(self, request_id: str) -> bool:
        """Cancel a run and all its nodes. Return False: none with this id is under way."""
        return False

    async def listed(self, client: KeyHolder) -> dict[str, Any]:
        """Return the answer of `/v1/workflows`: all plans, and the servers of their models."""
        return {"object": "list", "data": []}

    async def node_servers(self, client: KeyHolder) -> dict[str, Any]:
        """Return each node server's record; None: the server does not answer."""
        return {}

    def node_servers_needed(self) -> int:
        """Return the number of node servers that recent calls need; 0: none are configured."""
        return 0

    def busy(self) -> Mapping[str, float]:
        """Return model -> node servers that its recent calls kept busy, over all routers."""
        return {}

    def stream(
        self, message: ModelRequest, context: CallContext, *, watched: bool = True
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """Yield the events of a run, then the answer.

        `progress` adds an event for each finished node and the edits' progress; `preview_every`
        adds previews.

        Args:
            message: the checked request.
            context: the call that brought it.
            watched: False if the client sees only the answer.

        Raises:
            MaskserveError: it cannot run, a node failed, it was cancelled, or it was late.
            Failure: an error of a worker or node server.
        """
        raise UnknownModel(message.head.model_name, models=self.models)

    async def infer(self, message: ModelRequest, context: CallContext) -> bytes:
        """Return only the answer; raises as `stream` does."""
        raise UnknownModel(message.head.model_name, models=self.models)
