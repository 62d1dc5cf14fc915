"""HTTP requests that Triton itself refuses before any of our code runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.corpus.tensors import CHANGES, Change, cell
from tests.fakes.hostile import good_inputs

UNREADABLE = (400, 500)
"""Triton 2.51 answers 500 to unreadable JSON, later versions answer 400."""


@dataclass(frozen=True)
class HttpCase:
    """The body of POST /v2/models/<model>/infer."""

    name: str
    body: bytes
    header_length: str | None
    """Inference-Header-Content-Length; None leaves it out."""
    statuses: tuple[int, ...]
    error_text: str
    """A part of the expected error message."""
    path: str = "/v2/models/edit/infer"
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def http_cases() -> Iterator[HttpCase]:
    for tensor in good_inputs():
        for key, change in CHANGES.items():
            document, data = _document({tensor: change})
            error_text = change.error_text or tensor
            yield _http(f"{tensor} {key}", document, data, (400,), error_text)
        document, data = _document({}, without=tensor)
        yield _http(f"{tensor} missing", document, data, (400,), tensor)
    yield from _odd_documents()
    yield from _odd_headers()
    document, data = _document({})
    for name, path in {
        "of an unknown model": "/v2/models/nope/infer",
        "of an unknown version": "/v2/models/edit/versions/7/infer",
    }.items():
        body = json.dumps(document).encode() + data
        length = str(len(body) - len(data))
        yield HttpCase(name, body, length, (404,), "unknown model", path)


def _odd_documents() -> Iterator[HttpCase]:
    """JSON that Triton cannot read as a request, or that contradicts itself."""
    document, data = _document({})
    texts = {
        "no JSON": b"{",
        "UTF-16": json.dumps(document).encode("utf-16"),
        "NULs": bytes(50),
        "null": b"null",
        "a list": b"[]",
        "no inputs": b"{}",
        "inputs of null": b'{"inputs": null}',
        "inputs of numbers": b'{"inputs": [1]}',
        "inputs nested 1000 times": b'{"inputs": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    }
    for name, text in texts.items():
        yield HttpCase(name, text, str(len(text)), UNREADABLE, "error")
    for key, value in {"id": 5, "parameters": 5, "outputs": 5, "inputs": {}}.items():
        changed = {**document, key: value}
        yield _http(f"{key} of {value}", changed, data, UNREADABLE, "error")
    outputs = {**document, "outputs": [{"name": "NOPE"}]}
    yield _http("an unknown output", outputs, data, (400,), "NOPE")
    for key, value in {"name": None, "shape": [-1], "shape ": ["1"], "datatype": 5}.items():
        inputs = [dict(tensor) for tensor in document["inputs"]]
        inputs[2][key.strip()] = value
        named = {"inputs": inputs}
        yield _http(f"{key.strip()} of {value}", named, data, UNREADABLE, key.strip())
    extra = {"name": "EXTRA", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    added = {"inputs": [*document["inputs"], extra]}
    yield _http("an extra tensor", added, data, (400,), "EXTRA")
    for value in ([1], [None], [True], [{}], "a", {}, None, [], ["a", "b"]):
        inputs = [dict(tensor) for tensor in document["inputs"]]
        inputs[3] = {"name": "SETTINGS", "shape": [1], "datatype": "BYTES", "data": value}
        part = data[: -len(cell(good_inputs()["SETTINGS"]))]
        yield _http(f"data of {json.dumps(value)}", {"inputs": inputs}, part, UNREADABLE, "error")
    for size in (-1, 2**62, "5", None):
        inputs = [dict(tensor) for tensor in document["inputs"]]
        inputs[3]["parameters"] = {"binary_data_size": size}
        yield _http(f"a size of {size}", {"inputs": inputs}, data, UNREADABLE, "error")
    region = {"shared_memory_region": "nope", "shared_memory_byte_size": 9}
    inputs = [{**document["inputs"][0], "parameters": region}, *document["inputs"][1:]]
    yield _http("an unknown shared memory", {"inputs": inputs}, data, (400, 404), "nope")


def _odd_headers() -> Iterator[HttpCase]:
    """Cases with a document and its tensors, cut at the wrong place."""
    document, data = _document({})
    text = json.dumps(document).encode()
    for length in ("0", "-1", "99999999", "abc", "", "18446744073709551616", "5"):
        name = f"Inference-Header-Content-Length of {length or 'nothing'}"
        yield HttpCase(name, text + data, length, UNREADABLE, "error")
    yield HttpCase("no Inference-Header-Content-Length", text + data, None, UNREADABLE, "error")
    yield HttpCase("no tensors behind", text, str(len(text)), (400,), "IMAGE")
    yield HttpCase("tensors cut short", text + data[:-5], str(len(text)), (400,), "SETTINGS")
    yield HttpCase(
        "bytes behind the tensors", text + data + b"more", str(len(text)), (400,), "data"
    )
    yield HttpCase("nothing at all", b"", None, UNREADABLE, "error")
    for coding, statuses in {"gzip": (400,), "deflate": (400,), "br": (400, 501)}.items():
        headers = {"Content-Encoding": coding}
        yield HttpCase(
            f"{coding} that is none",
            text + data,
            str(len(text)),
            statuses,
            "error",
            headers=headers,
        )


def _document(changes: dict[str, Change], without: str = "") -> tuple[dict[str, Any], bytes]:
    """JSON and the bytes of the tensors after it."""
    inputs, data = [], b""
    for name, value in good_inputs().items():
        if name == without:
            continue
        change = changes.get(name, Change())
        part = cell(value) if change.data is None else change.data
        inputs.append(
            {
                "name": change.name or name,
                "shape": [1] if change.shape is None else change.shape,
                "datatype": change.datatype or "BYTES",
                "parameters": {"binary_data_size": len(part)},
            }
        )
        data += part
    return {"inputs": inputs}, data


def _http(
    name: str, document: dict[str, Any], data: bytes, statuses: tuple[int, ...], error_text: str
) -> HttpCase:
    text = json.dumps(document).encode()
    return HttpCase(name, text + data, str(len(text)), statuses, error_text)
