"""Requests to a router, and masks with a known number of tokens."""

from __future__ import annotations

import io
import json
import struct
from functools import lru_cache

import numpy as np
from PIL import Image
from tritonclient.grpc import service_pb2 as pb

from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.model_request import ModelRequest

INFER = "/inference.GRPCInferenceService/ModelInfer"


def edit_request(image: bytes, mask: bytes, **settings: object) -> bytes:
    """A request to `edit`."""
    message = pb.ModelInferRequest(model_name="edit")
    tensors = {
        "IMAGE": image,
        "MASK": mask,
        "PROMPT": b"a red star",
        "SETTINGS": json.dumps(settings).encode(),
    }
    for name, value in tensors.items():
        message.inputs.add(name=name, datatype="BYTES", shape=[1])
        message.raw_input_contents.append(struct.pack("<I", len(value)) + value)
    encoded: bytes = message.SerializeToString()
    return encoded


def context_of(client: KeyHolder, timeout: float | None = None) -> CallContext:
    """A call of a client."""
    return CallContext(client, 0, {}, "test", timeout)


def parsed(message: pb.ModelInferRequest) -> ModelRequest:
    """A message in the router's form."""
    return ModelRequest.parse(message.SerializeToString())


@lru_cache(maxsize=4096)
def mask_of(active: int, side: int) -> bytes:
    """A mask of `side` by `side` pixels that selects this many of them."""
    flat = np.zeros(side * side, np.uint8)
    flat[:active] = 255
    return _png(flat.reshape(side, side))


def _png(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()
