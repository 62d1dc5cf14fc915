"""The header of a safetensors file, read before any tensor.

Eight bytes give the length of the JSON behind them. It names each tensor with its dtype, shape and
place; the tensors follow one after the other:

    | length | {"NAME": {"dtype", "shape", "data_offsets"}, …, "__metadata__": {…}} | tensors |

Anybody may have written the file. So reading takes time in proportion to the header, which is
bounded, and the result fits the file: no tensor lies outside of it or over another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta

MAX_HEADER_BYTES = 16 * 2**20
"""A LoRA of a thousand layers has 300 KB."""
MAX_TENSORS = 2**16
MAX_NAME = 512
"""Most characters of a name; the longest of a published model has some 100."""
MAX_DIMENSIONS = 8
FIRST_READ = 256 * 1024
"""Bytes that hold most headers whole."""

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_BITS = {
    name: bits
    for bits, names in (
        (8, "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0"),
        (16, "U16 I16 F16 BF16"),
        (32, "U32 I32 F32"),
        (64, "U64 I64 F64 C64"),
    )
    for name in names.split()
}
_Name = Annotated[str, Meta(max_length=MAX_NAME)]
_Size = Annotated[int, Meta(ge=0, le=2**53)]


class BadHeader(ValueError):
    """A file that is no whole safetensors file; the text is the end of a sentence about it."""


class TensorPlace(NamedTuple):
    """A tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's first byte in the file."""
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Header(NamedTuple):
    """Header of a safetensors file."""

    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]
    begin: int
    """Offset of the first tensor's first byte in the file."""


class _Declared(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


_read_names = msgspec.json.Decoder(
    Annotated[dict[_Name, msgspec.Raw], Meta(max_length=MAX_TENSORS + 1)]
).decode
_read_declared = msgspec.json.Decoder(_Declared).decode
_read_metadata = msgspec.json.Decoder(dict[str, str]).decode


def read_header(read: Callable[[int, int], bytes], nbytes: int) -> Header:
    """Return the header of a file.

    Args:
        read: returns the file's bytes [begin, end).
        nbytes: bytes of the file.

    Raises:
        BadHeader: it is not a safetensors file, or not whole.
    """
    head = head_of(read, nbytes)
    if len(head) < _LENGTH_BYTES + 2:
        raise BadHeader(f"is {nbytes} bytes long, too short for a safetensors file")
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or head[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        raise BadHeader(
            "is not a safetensors file; other formats are not read, as they may run code"
        )
    begin = _LENGTH_BYTES + length
    if begin > nbytes:
        raise BadHeader("is cut short: its header is not whole")
    try:
        raw_tensors = _read_names(head[_LENGTH_BYTES:begin])
        metadata = _read_metadata(raw_tensors.pop(_METADATA, msgspec.Raw(b"{}")))
        declared = {name: _read_declared(raw) for name, raw in raw_tensors.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadHeader("is not a safetensors file: its header cannot be read") from error
    tensors = {name: _placed(name, tensor, begin) for name, tensor in declared.items()}
    _check_places(tensors, begin, nbytes)
    return Header(tensors, metadata, begin)


def head_of(read: Callable[[int, int], bytes], nbytes: int) -> bytes:
    """Return a file's first bytes, with its whole header unless that is too long or missing.
    Arguments are those of `read_header`.
    """
    head = read(0, min(FIRST_READ, nbytes))
    begin = _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")
    if len(head) < begin <= min(nbytes, _LENGTH_BYTES + MAX_HEADER_BYTES):
        head += read(len(head), begin)
    return head


def header_of(file: Path) -> Header:
    """The header of a file of this host; raises as `read_header`, and OSError."""
    with file.open("rb") as handle:
        return read_header(reader_of(handle), file.stat().st_size)


def reader_of(handle: BinaryIO) -> Callable[[int, int], bytes]:
    """Gives the bytes [begin, end) of an open file."""

    def read(begin: int, end: int) -> bytes:
        handle.seek(begin)
        return handle.read(end - begin)

    return read


def encode_header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]],
    metadata: Mapping[str, str],
    align: int = 8,
) -> bytes:
    """The bytes that stand before the tensors.

    Args:
        tensors: dtype, shape and bytes of each, in the order in which they follow.
        metadata: beside them.
        align: the first tensor begins at a multiple of it.
    """
    header: dict[str, object] = {_METADATA: metadata}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        begin, end = end, end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % align)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def short(name: str) -> str:
    """Return a tensor's name in a form for sentences."""
    text = name if len(name) <= 80 else f"{name[:77]}..."
    return "".join(char if char.isprintable() else "?" for char in text)


def _placed(name: str, declared: _Declared, data: int) -> TensorPlace:
    first, last = declared.data_offsets
    bits = _BITS.get(declared.dtype)
    if bits is None:
        raise BadHeader(f"holds {short(name)} in {declared.dtype[:20]}, which is not read")
    for size in sorted(declared.shape):  # a side of 0 first; no product grows beyond its bytes
        bits *= size
        if bits > 8 * (last - first):
            break
    if bits != 8 * (last - first):
        raise BadHeader(f"holds {short(name)} in bytes that do not fit its shape")
    return TensorPlace(declared.dtype, declared.shape, data + first, data + last)


def _check_places(tensors: Mapping[str, TensorPlace], begin: int, nbytes: int) -> None:
    """Refuse tensors that overlap, leave gaps, or end beyond the file's end."""
    end = begin
    for name, place in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if place.begin != end:
            raise BadHeader(
                f"is not a safetensors file: {short(name)} overlaps another tensor or leaves a gap"
            )
        end = place.end
        if end > nbytes:
            raise BadHeader(f"is cut short: {short(name)} is not whole")
    if end != nbytes:
        raise BadHeader(
            f"is not a safetensors file: {nbytes - end} of its bytes belong to no tensor"
        )
