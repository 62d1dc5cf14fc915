"""A workflow as a model of Triton: its metadata and configuration."""

from __future__ import annotations

from typing import Final

from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts.tensors import Contract

_PLATFORM: Final = "maskserve_workflow"


def metadata_of(name: str, contract: Contract) -> pb.ModelMetadataResponse:
    response = pb.ModelMetadataResponse(name=name, versions=["1"], platform=_PLATFORM)
    for tensors, among in (
        (contract.inputs, response.inputs),
        (contract.outputs, response.outputs),
    ):
        for tensor in tensors:
            among.add(name=tensor.name, datatype=tensor.dtype, shape=tensor.dims)
    return response


def config_of(name: str, contract: Contract) -> pb.ModelConfigResponse:
    response = pb.ModelConfigResponse()
    response.config.name, response.config.platform = name, _PLATFORM
    for tensor in contract.inputs:
        response.config.input.add(
            name=tensor.name, data_type="TYPE_STRING", dims=tensor.dims, optional=tensor.optional
        )
    for tensor in contract.outputs:
        response.config.output.add(name=tensor.name, data_type="TYPE_STRING", dims=tensor.dims)
    response.config.model_transaction_policy.decoupled = contract.decoupled
    return response
