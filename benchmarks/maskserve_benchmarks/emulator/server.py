"""The gRPC server of an emulated worker or node server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor

SERVICE = "inference.GRPCInferenceService"
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def server_of(methods: Mapping[str, Any]) -> tuple[grpc.aio.Server, int]:
    """Return a server, not yet started, of these methods of KServe's service, and its port."""
    server = grpc.aio.server(
        options=(
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        )
    )
    handlers = grpc.method_handlers_generic_handler(SERVICE, dict(methods))
    server.add_generic_rpc_handlers((handlers,))
    return server, int(server.add_insecure_port("127.0.0.1:0"))


def answer_of(model: str, outputs: Mapping[str, Sequence[bytes]]) -> bytes:
    """Return a model's response with the elements of each output."""
    response = pb.ModelInferResponse(model_name=model, model_version="1")
    for name, elements in outputs.items():
        bytes_tensor.add_output(response, name, elements)
    encoded: bytes = response.SerializeToString()
    return encoded
