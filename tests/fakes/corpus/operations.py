"""OP of `control`: operations that must be refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.fakes.corpus.case import Refused
from tests.fakes.hostile import bad_images

_ID = "0" * 32
_NEEDS = {"cancel": "request_id", "register": "image"} | dict.fromkeys(
    ("prime", "pin", "unpin", "evict"), "template_id"
)
_ADAPTER = ("adapter_check", "adapter_load", "adapter_pin", "adapter_unpin", "adapter_evict")
_NEEDS |= dict.fromkeys(_ADAPTER, "name")
_PLAIN = ("adapters", "status", "heartbeat", "templates", "drain")


@dataclass(frozen=True)
class OperationCase:
    name: str
    op: bytes
    expected: Refused

    def __str__(self) -> str:
        return self.name


def operation_cases() -> Iterator[OperationCase]:
    for name, op in _NO_OBJECTS.items():
        yield OperationCase(name, op, Refused("OP"))
    for name, (values, field) in _WRONG_OBJECTS.items():
        op = values if isinstance(values, bytes) else json.dumps(values).encode()
        yield OperationCase(name, op, Refused(f"OP.{field}"))
    for op, key in _NEEDS.items():
        yield _case(f"{op} without {key}", {"op": op}, key)
        for value in ("", 5, None, True, [], {}, ["a"], 1e999):
            yield _case(f"{op} of {json.dumps(value)}", {"op": op, key: value}, key)
        yield _case(f"{op} of more", {"op": op, key: "x", "more": 1}, "more")
        if key == "template_id":
            for value in ("x", "../../etc", _ID[:15], _ID * 3, _ID.upper() + "A", _ID + "\0"):
                yield _case(f"{op} of {value!r}", {"op": op, key: value}, key)
            missing = json.dumps({"op": op, key: _ID}).encode()
            expected = Refused(f"OP.{key}", "TEMPLATE_NOT_FOUND")
            yield OperationCase(f"{op} of an unknown template", missing, expected)
    for op in _PLAIN:
        yield _case(f"{op} of more", {"op": op, "template_id": _ID}, "template_id")
    for name, data in bad_images().items():
        image = base64.b64encode(data).decode()
        yield _case(f"register of {name}", {"op": "register", "image": image}, "image")
    for image in ("\ud800", "x" * 200_000, "data:,", "é" * 99, "\0", "/etc/passwd"):
        yield _case(f"register of {image[:20]!r}", {"op": "register", "image": image}, "image")


def _case(name: str, values: dict[str, Any], field: str) -> OperationCase:
    return OperationCase(name, json.dumps(values).encode(), Refused(f"OP.{field}"))


_NO_OBJECTS = {
    "empty": b"",
    "blanks": b"  ",
    "no JSON": b"{",
    "plain word": b"status",
    "null": b"null",
    "number": b"1",
    "text": b'"status"',
    "list": b'["status"]',
    "not UTF-8": b'{"op": "\xff"}',
    "UTF-16": '{"op": "status"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"op": "status"}',
    "NUL behind": b'{"op": "status"}\0',
    "60,000 brackets": b"[" * 60_000,
    "5000 digits": b'{"op": ' + b"9" * 5000 + b"}",
    "100,000 objects": b"[" + b"{}," * 100_000 + b"{}]",
    "100,000 keys": json.dumps({f"k{i}": i for i in range(100_000)}).encode(),
    "an image": b"\x89PNG\r\n\x1a\n" + bytes(99),
}
_WRONG_OBJECTS: dict[str, tuple[Any, str]] = {
    "no op": ({}, "op"),
    "op of null": ({"op": None}, "op"),
    "op of a number": ({"op": 1}, "op"),
    "op of a list": ({"op": ["status"]}, "op"),
    "op nested": (b'{"op": ' + b"[" * 900 + b"]" * 900 + b"}", "op"),
    "empty op": ({"op": ""}, "op"),
    "unknown op": ({"op": "explode"}, "op"),
    "op in capitals": ({"op": "Status"}, "op"),
    "op with a blank": ({"op": "status "}, "op"),
    "op of surrogates": ({"op": "\ud800"}, "op"),
    "op of control characters": ({"op": "a\n\0\x1b"}, "op"),
    "long op": ({"op": "x" * 60_000}, "op"),
    "a method of the code": ({"op": "__init__"}, "op"),
    "op twice": (b'{"op": "status", "op": "drain"}', "op"),
    "key of surrogates": ({"op": "status", "\ud800": 1}, "\\ud800"),
    "long key": ({"op": "status", "k" * 60_000: 1}, "k" * 40),
    "unknown key": ({"op": "status", "all": True}, "all"),
}
