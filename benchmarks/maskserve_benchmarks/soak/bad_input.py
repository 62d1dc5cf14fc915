"""Requests that must be refused, one error each: damaged, contradictory, hostile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from maskserve_benchmarks.soak.pictures import draw, encode, png_file
from maskserve_benchmarks.soak.visitor import Visitor, must_refuse

_SIZE = (40, 56)


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request and its required answer."""

    inputs: Mapping[str, bytes]
    field: str
    """The field that the message must name."""
    code: str = "INVALID_REQUEST"


def bad_requests() -> tuple[BadRequest, ...]:
    """Return all bad requests."""
    picture = draw(1, *_SIZE)
    good = {"IMAGE": picture.image, "MASK": picture.mask, "PROMPT": b"a red star"}
    images = bad_images(picture.image)
    height, width = _SIZE
    changes: list[tuple[str, dict[str, bytes]]] = [
        *((field, {field: data}) for data in images.values() for field in ("IMAGE", "MASK")),
        ("MASK", {"MASK": draw(2, height + 1, width).mask}),
        ("MASK", {"MASK": encode(np.zeros(_SIZE, np.uint8))}),
        ("PROMPT", {"PROMPT": b"a red \xff\xfe star"}),
        ("PROMPT", {"PROMPT": b"a" * 32_001}),
        *((field, {"SETTINGS": raw}) for raw, field in bad_settings().values()),
    ]
    requests = [
        BadRequest({**good, "SETTINGS": b"{}", **change}, field) for field, change in changes
    ]
    unknown = json.dumps({"template_id": "0" * 32}).encode()
    unknown_template = {**good, "IMAGE": b"", "SETTINGS": unknown}
    return (*requests, BadRequest(unknown_template, "SETTINGS.template_id", "TEMPLATE_NOT_FOUND"))


def bad_images(png: bytes) -> dict[str, bytes]:
    """Return bytes that are not a usable PNG, JPEG or WebP, by name; some are derived from a good
    `png`.
    """
    damaged = bytearray(png)
    damaged[-40] ^= 0xFF
    return {
        "zeros": bytes(64),
        "text": b"not an image at all",
        "broken data URI": b"data:image/png;base64,@@@@",
        "truncated PNG": png[: len(png) // 2],
        "PNG with a wrong checksum": bytes(damaged),
        "bomb PNG": png_file(60_000, 60_000, 8, 2, bytes(1000)),
        "bomb PNG of the largest size": png_file(2**31 - 1, 2**31 - 1, 8, 2, bytes(1000)),
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    }


def bad_settings() -> dict[str, tuple[bytes, str]]:
    """Return SETTINGS that no model accepts and the field that the refusal names, by name."""
    values: dict[str, tuple[object, str]] = {
        "unknown": ({"stepz": 4}, "SETTINGS.stepz"),
        "mistyped": ({"num_inference_steps": "4"}, "SETTINGS.num_inference_steps"),
        "10000 steps": ({"num_inference_steps": 10_000}, "SETTINGS.num_inference_steps"),
        "NaN strength": ({"strength": float("nan")}, "SETTINGS.strength"),
        "huge seed": ({"seed": 10**400}, "SETTINGS.seed"),
        "other model": ({"model": "no-such-model"}, "SETTINGS.model"),
        "alpha of a mask without": ({"mask_mode": "alpha"}, "SETTINGS.mask_mode"),
        "huge feather": ({"mask_feather": 10**6}, "SETTINGS.mask_feather"),
        "output format": ({"output_format": "gif"}, "SETTINGS.output_format"),
        "request id": ({"request_id": "a b"}, "SETTINGS.request_id"),
        "template id": ({"template_id": "../../etc/passwd"}, "SETTINGS.template_id"),
        "another image's template": ({"template_id": "0" * 32}, "SETTINGS.template_id"),
        "a list": ([], "SETTINGS"),
    }
    return {
        **with_json(values),
        "not JSON": (b"{seed: 1}", "SETTINGS"),
        "not UTF-8": (b'{"model": "\xff"}', "SETTINGS"),
        "deeply nested": (b"[" * 30_000, "SETTINGS"),
        "too long": (b" " * 70_000 + b"{}", "SETTINGS"),
    }


def with_json(values: Mapping[str, tuple[object, str]]) -> dict[str, tuple[bytes, str]]:
    """Return the same with values as JSON."""
    return {name: (json.dumps(value).encode(), field) for name, (value, field) in values.items()}


BAD_REQUESTS = bad_requests()


def bad_input(visitor: Visitor) -> str:
    """Send three bad requests."""
    for request in visitor.rng.sample(BAD_REQUESTS, 3):
        send = visitor.http.edit if visitor.rng.random() < 0.5 else visitor.grpc.edit
        must_refuse(partial(send, request.inputs), request.code, request.field)
    return "refused"


def bad_operation(visitor: Visitor) -> str:
    """Send operations with missing or invalid names."""
    control, unknown = visitor.grpc.control, "0" * 32
    op = visitor.rng.choice(("prime", "pin", "evict"))
    must_refuse(lambda: control(op, template_id=unknown), "TEMPLATE_NOT_FOUND", "OP.template_id")
    must_refuse(lambda: control(op, template_id="../x"), "INVALID_REQUEST", "OP.template_id")
    must_refuse(lambda: control("register", image="bm8="), "INVALID_REQUEST", "OP.image")
    must_refuse(lambda: control("reboot"), "INVALID_REQUEST", "OP.op")
    return "refused"
