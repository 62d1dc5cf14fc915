"""Requests as the router has them: what is large lies where it came and is copied as it is sent."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.containers import PNG_SIGNATURE
from maskserve_router.api.kserve_http import infer_request
from maskserve_router.messages.control_message import (
    check_image,
    control_request,
    image_size,
    read_operation,
    registration,
)
from maskserve_router.messages.edit_call import parse_request
from maskserve_router.messages.model_request import ModelRequest
from tests.support.router import control_request as asked_for
from tests.support.router_requests import edit_request

MIB = 2**20
IMAGE = base64.b64encode(PNG_SIGNATURE + bytes(6 * MIB)).decode()


def lies_in(content: Any, whole: bytes) -> bool:
    return isinstance(content, memoryview) and content.obj is whole


def test_contents_lie_where_they_came_and_are_copied_once_as_they_are_sent():
    """An image of an edit was there four times, beside what gRPC has of it."""
    raw = edit_request(bytes(8 * MIB), b"mask")
    tracemalloc.start()
    message = parse_request(raw)
    assert all(lies_in(content, raw) for content in message.contents)
    assert lies_in(message.view("IMAGE"), raw)
    assert tracemalloc.get_traced_memory()[1] < MIB
    encoded = message.encoded()
    assert tracemalloc.get_traced_memory()[1] < 10 * MIB
    tracemalloc.stop()
    assert pb.ModelInferRequest.FromString(encoded) == pb.ModelInferRequest.FromString(raw)


def test_binary_inputs_over_http_lie_in_the_body():
    tail = bytes_tensor.pack([bytes(MIB)])
    tensor = {"name": "IMAGE", "datatype": "BYTES", "shape": [1]}
    sized = {**tensor, "parameters": {"binary_data_size": len(tail)}}
    head = json.dumps({"inputs": [sized]}).encode()
    body = head + tail
    message, _ = infer_request("edit", "", body, len(head))
    assert lies_in(message.contents[0], body)
    assert message.read("IMAGE") == bytes(MIB)


@given(
    contents=st.lists(st.binary(max_size=300), max_size=4),
    between=st.sampled_from([b"", b"\x38\x05", b"\x1a\x01x"]),
)
def test_any_order_of_fields_is_read_as_protobuf_reads_it(contents: list[bytes], between: bytes):
    """Contents may stand before the inputs, among other fields, and beside one of their number
    that is no content.
    """
    inputs = pb.ModelInferRequest(model_name="edit")
    for number in range(len(contents)):
        inputs.inputs.add(name=str(number), datatype="BYTES", shape=[1])
    raw = between.join(
        [
            pb.ModelInferRequest(raw_input_contents=[raw_content]).SerializeToString()
            for raw_content in contents
        ]
        + [inputs.SerializeToString()]
    )
    expected, message = pb.ModelInferRequest.FromString(raw), ModelRequest.parse(raw)
    assert [bytes(content) for content in message.contents] == list(expected.raw_input_contents)
    decoded = pb.ModelInferRequest.FromString(message.encoded())
    expected.DiscardUnknownFields()
    decoded.DiscardUnknownFields()
    assert decoded == expected


def test_an_images_text_lies_where_it_came_and_is_copied_once_for_workers():
    """It was there nine times."""
    raw = asked_for("register", image=IMAGE, shared=True)  # type: ignore[arg-type]
    tracemalloc.start()
    operation = read_operation(parse_request(raw).view("OP"))
    check_image(operation)
    assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    encoded = control_request({**operation, "scope": "a"})
    assert tracemalloc.get_traced_memory()[1] < 1.5 * len(IMAGE)
    tracemalloc.stop()
    assert image_size(operation) == len(IMAGE) + 2
    operation_fields = json.loads(ModelRequest.parse(encoded).read("OP"))
    assert operation_fields == {"op": "register", "image": IMAGE, "shared": True, "scope": "a"}


IMAGES = {
    "short": "AAAA",
    "long": IMAGE,
    "at the bound": "A" * 65_520,
    "escapes": IMAGE.replace("A", "\\/", 1),
    "no ASCII": "é" * MIB,
    "a quote": '"' + IMAGE,
    "a backslash": IMAGE + "\\",
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("first", [True, False])
def test_images_reach_workers_as_they_were_sent(name: str, first: bool):
    fields = {"op": "register", "image": IMAGES[name]}
    text = json.dumps(fields if first else dict(reversed(fields.items()))).encode()
    encoded = control_request(read_operation(memoryview(text)))
    assert json.loads(ModelRequest.parse(encoded).read("OP")) == fields


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"op": "register", "image": "%s", "image": "A"}', "OP.image|twice|OP"),
        ('{"op": "evict", "image": "%s"}', "OP.image: is not a key of evict"),
        ('{"op": "%s"}', "OP.op"),
        ('{"op": "register", "%s": 1}', "is not a key of register"),
        ('{"op": "register", "image": "%s"', "not valid JSON"),
        ('{"op": "register", "image": "%s', "not valid JSON"),
    ],
)
def test_long_texts_that_are_no_image_are_refused(text: str, message: str):
    with pytest.raises(InvalidRequest, match=message):
        read_operation(memoryview((text % IMAGE).encode()))


@pytest.mark.parametrize("image", ["AAAA", "no base64!", "A" * 10**5, "\n\t" * 3000, "é" * 3000])
def test_what_begins_as_no_picture_is_refused(image: str):
    operation = read_operation(memoryview(json.dumps({"op": "register", "image": image}).encode()))
    with pytest.raises(InvalidRequest, match=r"OP\.image"):
        check_image(operation)


def test_a_picture_is_registered_as_base64():
    picture = PNG_SIGNATURE + bytes(100)
    operation = registration(picture)
    check_image(operation)
    assert base64.b64decode(msgspec.json.decode(operation["image"])) == picture
