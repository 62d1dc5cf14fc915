"""Requests that must be refused, one error each: damaged, contradictory, hostile."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from maskserve_harness.soaking.pictures import Picture, draw, encode
from maskserve_harness.soaking.visitor import Visitor, refused

_SIZE = (40, 56)


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request and what it must be answered with."""

    inputs: Mapping[str, bytes]
    field: str
    """What the message names."""
    code: str = "INVALID_REQUEST"


def bad_requests() -> tuple[BadRequest, ...]:
    """All of them."""
    picture = draw(1, *_SIZE)
    good = {"IMAGE": picture.image, "MASK": picture.mask, "PROMPT": b"a red star"}
    height, width = _SIZE
    changes: list[tuple[str, dict[str, bytes]]] = [
        *((field, {field: data}) for data in _bad_images(picture) for field in ("IMAGE", "MASK")),
        ("MASK", {"MASK": draw(2, height + 1, width).mask}),
        ("MASK", {"MASK": encode(np.zeros(_SIZE, np.uint8))}),
        ("PROMPT", {"PROMPT": b"a red \xff\xfe star"}),
        ("PROMPT", {"PROMPT": b"a" * 32_001}),
        *((field, {"SETTINGS": raw}) for raw, field in _bad_settings()),
    ]
    made = [BadRequest({**good, "SETTINGS": b"{}", **change}, field) for field, change in changes]
    unknown = json.dumps({"template_id": "0" * 32}).encode()
    gone = {**good, "IMAGE": b"", "SETTINGS": unknown}
    return (*made, BadRequest(gone, "SETTINGS.template_id", "TEMPLATE_NOT_FOUND"))


def _bad_images(picture: Picture) -> list[bytes]:
    whole = picture.image
    damaged = bytearray(whole)
    damaged[-40] ^= 0xFF
    return [
        bytes(64),
        b"not an image at all",
        b"data:image/png;base64,@@@@",
        whole[: len(whole) // 2],
        bytes(damaged),
        _png_of(60_000, 60_000),
        _png_of(2**31 - 1, 2**31 - 1),
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    ]


def _png_of(width: int, height: int) -> bytes:
    """A PNG that says it is this large, and holds next to nothing."""
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1000))),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )


def _bad_settings() -> list[tuple[bytes, str]]:
    """SETTINGS and the field that the refusal names."""
    values: list[tuple[object, str]] = [
        ({"stepz": 4}, "SETTINGS.stepz"),
        ({"num_inference_steps": "4"}, "SETTINGS.num_inference_steps"),
        ({"num_inference_steps": 10_000}, "SETTINGS.num_inference_steps"),
        ({"strength": float("nan")}, "SETTINGS.strength"),
        ({"seed": 10**400}, "SETTINGS.seed"),
        ({"model": "no-such-model"}, "SETTINGS.model"),
        ({"mask_mode": "alpha"}, "SETTINGS.mask_mode"),
        ({"mask_feather": 10**6}, "SETTINGS.mask_feather"),
        ({"output_format": "gif"}, "SETTINGS.output_format"),
        ({"request_id": "a b"}, "SETTINGS.request_id"),
        ({"template_id": "../../etc/passwd"}, "SETTINGS.template_id"),
        ({"template_id": "0" * 32}, "SETTINGS.template_id"),
        ([], "SETTINGS"),
    ]
    plain = [(json.dumps(value).encode(), field) for value, field in values]
    raw = [(b"{seed: 1}", "SETTINGS"), (b'{"model": "\xff"}', "SETTINGS")]
    return [*plain, *raw, (b"[" * 30_000, "SETTINGS"), (b" " * 70_000 + b"{}", "SETTINGS")]


BAD_REQUESTS = bad_requests()


def bad_input(visitor: Visitor) -> str:
    """Three bad requests."""
    for bad in visitor.rng.sample(BAD_REQUESTS, 3):
        way = visitor.http.edit if visitor.rng.random() < 0.5 else visitor.grpc.edit
        refused(partial(way, bad.inputs), bad.code, bad.field)
    return "refused"


def bad_operation(visitor: Visitor) -> str:
    """Operations that name nothing or nonsense."""
    control, unknown = visitor.grpc.control, "0" * 32
    op = visitor.rng.choice(("prime", "pin", "evict"))
    refused(lambda: control(op, template_id=unknown), "TEMPLATE_NOT_FOUND", "OP.template_id")
    refused(lambda: control(op, template_id="../x"), "INVALID_REQUEST", "OP.template_id")
    refused(lambda: control("register", image="bm8="), "INVALID_REQUEST", "OP.image")
    refused(lambda: control("reboot"), "INVALID_REQUEST", "OP.op")
    return "refused"
