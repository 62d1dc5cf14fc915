"""Requests of a router's benchmark."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from functools import lru_cache

import numpy as np
from PIL import Image
from tritonclient.grpc import service_pb2 as pb

INFER = "/inference.GRPCInferenceService/ModelInfer"
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


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


@lru_cache(maxsize=4096)
def mask_of(active: int, side: int) -> bytes:
    """A mask of `side` by `side` pixels that selects so many of them."""
    flat = np.zeros(side * side, np.uint8)
    flat[:active] = 255
    return _png(flat.reshape(side, side))


def picture(side: int, size: int) -> bytes:
    """A PNG of about `size` bytes, and of so many pixels a side: what is left over is in a chunk
    that decoders skip.
    """
    plain = _png(np.zeros((side, side, 3), np.uint8))
    rest = max(size - len(plain) - 12, 0)
    chunk = b"prVt" + os.urandom(rest)
    more = struct.pack(">I", rest) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return plain[:-12] + more + plain[-12:]


def _png(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()
