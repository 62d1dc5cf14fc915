"""Entries as bytes: the safetensors format, with a checksum over everything that is read from it.

Any safetensors tool opens such a file. Its metadata name the anchor, the template and the digest
(XXH3, 128 bits) of the other metadata and of all tensors. It is written here, tensor by tensor,
because a full disk must be an error of `write` (the library maps the file: a signal that ends the
process on a full tmpfs), and because the checksum is taken on the same way.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from maskserve_core.contracts.entry_key import Anchor
from maskserve_engine.cache.codec import Coded
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry
from maskserve_engine.cache.tier import Note

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FIELDS = ("hidden", "keys", "values", "end", "map")
_ALIGN = 64


class BadEntry(ValueError):
    """Bytes that are not a whole, unchanged entry."""


class _Header(NamedTuple):
    tensors: dict[str, dict[str, Any]]
    """dtype, shape and data_offsets of each."""
    metadata: dict[str, str]
    begin: int
    """Where the data begin."""


class EntryFile:
    """An entry whose tensors lie in host memory, ready to be written."""

    def __init__(self, entry: AnchorEntry, note: Note) -> None:
        self._tensors = _tensors(entry)
        formats = {coded.format for _, coded in _coded_tensors(entry)} - {"model"}
        (format,) = formats or {"model"}
        anchor = entry.anchor
        metadata = {
            "layout": json.dumps({"blocks": len(entry.blocks), "format": format}),
            "note": json.dumps(asdict(note)),
            "anchor": json.dumps([anchor.sigma, anchor.timestep, anchor.input_scale]),
        }
        metadata["digest"] = _digest(self._tensors, metadata)
        header: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for name, tensor in self._tensors.items():
            begin, end = end, end + tensor.nbytes
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        self._head = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self._head) + end

    def write(self, file: BinaryIO) -> None:
        """Raises OSError as the medium says."""
        file.write(self._head)
        for tensor in self._tensors.values():
            file.write(_bytes(tensor))


def dump_entry(entry: AnchorEntry, note: Note) -> bytes:
    """An entry as the bytes of its file."""
    file = io.BytesIO()
    EntryFile(entry, note).write(file)
    return file.getvalue()


def read_note(head: bytes) -> Note:
    """The note in the first bytes of a file.

    Raises:
        BadEntry: there is none.
    """
    try:
        return Note(**json.loads(_header(memoryview(head)).metadata["note"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadEntry(f"no note: {error}") from error


def read_entry(buffer: Any) -> tuple[AnchorEntry, Note]:
    """The entry whose tensors lie in a writable buffer, which they keep alive; nothing is copied.

    Raises:
        BadEntry: the buffer is cut off or changed.
    """
    try:
        header = _header(memoryview(buffer))
        metadata = header.metadata
        layout = json.loads(metadata["layout"])
        note, anchor = Note(**json.loads(metadata["note"])), Anchor(*json.loads(metadata["anchor"]))
        found = {name: _tensor(buffer, header.begin, s) for name, s in header.tensors.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadEntry(f"cut off, or not an entry: {error}") from error
    if _digest(found, metadata) != metadata.get("digest"):
        raise BadEntry("the checksum differs")
    blocks = tuple(
        BlockEntry(**{field: _coded(found, n, field, layout["format"]) for field in _FIELDS})
        for n in range(layout["blocks"])
    )
    return AnchorEntry(anchor, blocks), note


def _coded_tensors(entry: AnchorEntry) -> list[tuple[str, Coded]]:
    return [
        (f"{number}.{field}", coded)
        for number, block in enumerate(entry.blocks)
        for field in _FIELDS
        if (coded := getattr(block, field)) is not None
    ]


def _tensors(entry: AnchorEntry) -> dict[str, Tensor]:
    """In the order in which a step reads them."""
    return {
        f"{name}.{part}": tensor
        for name, coded in _coded_tensors(entry)
        for part in ("data", "scale", "groups")
        if (tensor := getattr(coded, part)) is not None
    }


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy()


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = xxhash.xxh3_128()
    for key in sorted(set(metadata) - {"digest"}):
        digest.update(f"{key}={metadata[key]};".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _header(view: memoryview) -> _Header:
    size = int.from_bytes(view[:8], "little")
    if not 2 <= size <= len(view) - 8:
        raise ValueError(f"a header of {size} bytes")
    header = json.loads(bytes(view[8 : 8 + size]))
    return _Header(header, header.pop("__metadata__"), 8 + size)


def _tensor(buffer: Any, begin: int, spec: dict[str, Any]) -> Tensor:
    dtype, (low, high) = _DTYPES[spec["dtype"]], spec["data_offsets"]
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=high - low, offset=begin + low)
    return flat.view(dtype).view(spec["shape"])


def _coded(found: dict[str, Tensor], block: int, field: str, format: str) -> Coded | None:
    at = f"{block}.{field}."
    if f"{at}data" not in found:
        return None
    scale = found.get(f"{at}scale")
    # Maps' means and variances are as computed beside tensors in any format.
    return Coded(
        "model" if scale is None else format, found[f"{at}data"], scale, found.get(f"{at}groups")
    )
