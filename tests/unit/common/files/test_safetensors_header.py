"""The reader of safetensors headers, beside the library's own, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from maskserve_common.files.safetensors_header import (
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_NAME,
    MAX_TENSORS,
    BadHeader,
    Header,
    encode_header,
    header_of,
    read_header,
)
from tests.support.draws import fresh_rng

ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array(7, np.int8),
    "nothing": np.zeros((0, 5), np.float16),
    "z": np.arange(6, dtype=np.uint16).reshape(1, 2, 3),
}


def read(raw: bytes) -> Header:
    return read_header(lambda begin, end: raw[begin:end], len(raw))


def raw_file(header: Mapping[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_places_are_those_of_the_librarys_files(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(ARRAYS, file, {"made": "here"})
    header, raw = header_of(file), file.read_bytes()
    assert header.metadata == {"made": "here"}
    assert header.tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        place = header.tensors[name]
        assert place.shape == array.shape
        assert raw[place.begin : place.end] == array.tobytes()


@pytest.mark.parametrize("align", [8, 64])
def test_the_library_reads_what_is_written_behind_our_header(align: int) -> None:
    codes = {"float32": "F32", "int8": "I8", "float16": "F16", "uint16": "U16"}
    spans = {n: (codes[a.dtype.name], a.shape, a.nbytes) for n, a in ARRAYS.items()}
    head = encode_header(spans, {"made": "there"}, align)
    raw = head + b"".join(array.tobytes() for array in ARRAYS.values())
    assert len(head) % align == 0
    assert read(raw).begin == len(head)
    arrays = safetensors.numpy.load(raw)
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)


def test_what_the_library_refuses_is_refused() -> None:
    """One to three bytes of a header are others: nothing is read that the library would not."""
    raw, rng = bytes(safetensors.numpy.save(ARRAYS)), fresh_rng()
    head, accepted_count = 8 + int.from_bytes(raw[:8], "little"), 0
    for _ in range(3000):
        changed = bytearray(raw)
        for place in rng.integers(head, size=int(rng.integers(1, 4))):
            changed[place] = int(rng.choice(list(b'0123456789[]{},":BFIUaz ')))
        try:
            header = read(bytes(changed))
        except BadHeader:
            continue
        arrays = safetensors.numpy.load(bytes(changed))
        assert {n: t.shape for n, t in header.tensors.items()} == {
            n: a.shape for n, a in arrays.items()
        }
        accepted_count += 1
    assert accepted_count


HOSTILE = {
    "a name of 64 KB": ({"a" * 65536: tensor([1], 0, 1)}, b"x"),
    "40,000 dimensions": ({"a": tensor([2**40] * 40_000, 0, 1)}, b"x"),
    "a shape beyond all bytes": ({"a": tensor([2**52] * MAX_DIMENSIONS, 0, 1)}, b"x"),
    "a number of 4,000 digits": ({"a": tensor([10**4000], 0, 1)}, b"x"),
    "a negative side": ({"a": tensor([-1, -1], 0, 1)}, b"x"),
    "a place that ends before it begins": ({"a": tensor([1], 1, 0)}, b"x"),
    "tensors over one another": ({"a": tensor([2], 0, 2), "b": tensor([2], 1, 3)}, b"xyz"),
    "a hole": ({"a": tensor([1], 0, 1), "b": tensor([1], 2, 3)}, b"xyz"),
    "bytes behind the last": ({"a": tensor([1], 0, 1)}, b"xyz"),
    "a tensor beyond the end": ({"a": tensor([5], 0, 5)}, b"xyz"),
    "an unknown dtype": ({"a": tensor([1], 0, 1, "Q3" * 9999)}, b"x"),
    "too many tensors": ({f"{n}": tensor([0], 0, 0) for n in range(MAX_TENSORS + 2)}, b""),
    "metadata that is no text": ({"__metadata__": {"a": 1}}, b""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_in_a_short_sentence(name: str) -> None:
    raw = raw_file(*HOSTILE[name])
    with pytest.raises(BadHeader) as refused:
        read(raw)
    assert len(str(refused.value)) < 200
    assert "\n" not in str(refused.value)


def test_a_header_at_all_bounds_is_read() -> None:
    count = MAX_HEADER_BYTES // (MAX_NAME + 120)
    named = {f"{n:0{MAX_NAME}}": tensor([1] * MAX_DIMENSIONS, n, n + 1) for n in range(count)}
    assert len(read(raw_file(named, bytes(count))).tensors) == count
