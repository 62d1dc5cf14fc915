"""Our codec of BYTES tensors beside tritonclient's."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from maskserve_common.contracts import bytes_tensor
from tests.support.draws import fresh_rng


def test_elements_are_packed_as_tritonclient_packs_them() -> None:
    rng = fresh_rng()
    for _ in range(20):
        elements = [rng.bytes(int(rng.integers(0, 400))) for _ in range(int(rng.integers(1, 9)))]
        raw = bytes_tensor.pack(elements)
        assert raw == serialize_byte_tensor(np.array(elements, np.object_)).item()
        assert deserialize_bytes_tensor(raw).tolist() == elements
        assert bytes_tensor.count(raw, 64) == len(elements)


def test_the_only_element_is_read_where_it_lies() -> None:
    raw = bytes_tensor.pack([b"abc"])
    element = bytes_tensor.only(raw)
    assert element == b"abc"
    assert element.obj is raw


@pytest.mark.parametrize(
    ("raw", "elements"),
    [
        (b"", 0),
        (bytes(4) * 2, 2),
        (bytes_tensor.pack([b"a", b"b"]), 2),
        (b"\x09\0\0\0abc", -1),
        (b"\x01\0\0\0abc", -1),
        (b"\x01\0", -1),
        (b"\xff\xff\xff\xff", -1),
    ],
)
def test_what_is_not_one_element_is_refused(raw: bytes, elements: int) -> None:
    assert bytes_tensor.count(raw, 64) == elements
    with pytest.raises(ValueError, match="not one BYTES element"):
        bytes_tensor.only(raw)


def test_messages_have_their_tensors_by_name() -> None:
    request, response = pb.ModelInferRequest(), pb.ModelInferResponse()
    bytes_tensor.add_input(request, "PICTURES", [b"a", b"bc"])
    assert list(request.inputs[0].shape) == [2]
    assert request.raw_input_contents[0] == bytes_tensor.pack([b"a", b"bc"])
    bytes_tensor.add_output(response, "A", [b"1"])
    bytes_tensor.add_output(response, "B", [b"2"])
    assert bytes_tensor.outputs(response) == {"A": b"1", "B": b"2"}
    response.raw_output_contents[1] += b"x"
    with pytest.raises(ValueError, match="B is not one"):
        bytes_tensor.outputs(response)
    del response.raw_output_contents[1]
    with pytest.raises(ValueError, match="argument"):
        bytes_tensor.outputs(response)


def test_elements_are_counted_up_to_a_bound():
    assert bytes_tensor.count(bytes(4 * 10**6), 64) == -1
