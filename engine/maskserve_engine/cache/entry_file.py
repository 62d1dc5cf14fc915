"""Entries in files: the safetensors format, with a checksum over everything that is read from it.

Any safetensors tool opens such a file. Its metadata name the anchor, the template and the digest
(XXH3, 128 bits) of the other metadata and of all tensors. This module writes it tensor by tensor,
for two reasons. A full disk must be an error of `write`; the library maps the file, and on a full
tmpfs a signal ends the process. And the checksum is taken in the same pass. Files are not mapped
for reading either: a file may be cut off under its reader, which must be an error of `read`. (Files
that a device reads by itself are mapped: `registered`.)
"""

from __future__ import annotations

import io
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from maskserve_common.contracts.keys import Anchor
from maskserve_common.files.safetensors_header import TensorPlace, encode_header, read_header
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, Coded, cut_at
from maskserve_engine.cache.registered import Registered
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
_PIECE = 2**18
"""Bytes per read: small enough to stay in a core's own cache."""


_Contents: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...], Iterable[Any]]]
"""Dtype, shape and bytes in pieces of each tensor, by name."""


class BadEntry(ValueError):
    """The bytes are not a whole, unchanged entry."""


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
        metadata["digest"] = _digest(
            {name: (t.dtype, tuple(t.shape), [_bytes(t)]) for name, t in self._tensors.items()},
            metadata,
        )
        spans = {n: (_NAMES[t.dtype], t.shape, t.nbytes) for n, t in self._tensors.items()}
        self._head = encode_header(spans, metadata, _ALIGN)
        self.nbytes = len(self._head) + sum(t.nbytes for t in self._tensors.values())

    def write(self, file: BinaryIO) -> None:
        """Write the file.

        Raises:
            OSError: the medium refuses.
        """
        file.write(self._head)
        for tensor in self._tensors.values():
            file.write(_bytes(tensor))


def dump_entry(entry: AnchorEntry, note: Note) -> bytes:
    file = io.BytesIO()
    EntryFile(entry, note).write(file)
    return file.getvalue()


def read_note(read: Callable[[int, int], bytes], nbytes: int) -> Note:
    """Return the note in a file's header.

    Args:
        read: returns the file's bytes [begin, end).
        nbytes: size of the file.

    Raises:
        BadEntry: there is none.
    """
    try:
        return Note(**json.loads(read_header(read, nbytes).metadata["note"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadEntry(f"no note: {error}") from error


class _Head(NamedTuple):
    """Header of an entry's file."""

    anchor: Anchor
    note: Note
    blocks: int
    format: str
    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]

    @classmethod
    def read(cls, read: Callable[[int, int], bytes], nbytes: int) -> _Head:
        """Read the header of a file; arguments as in `read_header`.

        Raises:
            BadEntry: the file is cut off, or not an entry.
        """
        try:
            tensors, metadata, _ = read_header(read, nbytes)
            layout, note = json.loads(metadata["layout"]), Note(**json.loads(metadata["note"]))
            anchor, blocks = Anchor(*json.loads(metadata["anchor"])), int(layout["blocks"])
            if unknown := {place.dtype for place in tensors.values()} - _DTYPES.keys():
                raise ValueError(f"tensors of {', '.join(sorted(unknown))}")
            return cls(anchor, note, blocks, layout["format"], tensors, metadata)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadEntry(f"cut off, or not an entry: {error}") from error

    def check(self, contents: _Contents) -> None:
        """Raise BadEntry if the checksum of the metadata and of these tensors differs."""
        if _digest(contents, self.metadata) != self.metadata.get("digest"):
            raise BadEntry("the checksum differs")


def read_entry(buffer: Any) -> tuple[AnchorEntry, Note]:
    """Return the entry whose tensors lie in a writable buffer, without a copy; they keep it alive.

    Raises:
        BadEntry: the buffer is cut off or changed.
    """
    view = memoryview(buffer)
    head = _Head.read(lambda begin, end: bytes(view[begin:end]), len(view))
    try:
        tensors = {name: _tensor(buffer, place) for name, place in head.tensors.items()}
    except (ValueError, RuntimeError) as error:  # torch has no tensor without bytes in a buffer
        raise BadEntry(f"not an entry: {error}") from error
    head.check({name: (t.dtype, tuple(t.shape), [_bytes(t)]) for name, t in tensors.items()})
    blocks = tuple(
        BlockEntry(**{field: _coded(tensors, n, field, head.format) for field in _FIELDS})
        for n in range(head.blocks)
    )
    return AnchorEntry(head.anchor, blocks), head.note


class OpenFile:
    """A file that stays open while tensors of it are in use.

    It can be read after it was renamed or unlinked.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.nbytes = os.fstat(self.descriptor).st_size
        self.broken = False
        self.registered: Registered | None = None
        """The whole file, registered for a device that reads it by itself; None: it is not
        registered.
        """
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, out: Any, offset: int) -> None:
        """Fill a writable buffer.

        Raises:
            OSError: the file was cut off, or the medium failed.
        """
        view = memoryview(out).cast("B")
        while view:
            try:
                count = os.preadv(self.descriptor, [view], offset)
                if not count:
                    raise OSError("the file was cut off while it was open")
            except OSError:
                self.broken = True
                raise
            view, offset = view[count:], offset + count

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield these bytes in pieces; a piece is valid until the next."""
        buffer = memoryview(bytearray(min(_PIECE, end - begin)))
        for offset in range(begin, end, _PIECE):
            piece = buffer[: min(_PIECE, end - offset)]
            self.read(piece, offset)
            yield piece


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor [tokens, ...] as it lies in an open file."""

    file: OpenFile
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    cut: tuple[FileTensor, int] | None = None
    """Tensor of which this is a range of columns, and the range's first byte in each token."""

    def __len__(self) -> int:
        return self.shape[0]

    def columns(self, begin: int, end: int) -> FileTensor:
        """Return the numbers `begin` to `end` of each token."""
        item_bytes = self.dtype.itemsize
        shape = (len(self), end - begin)
        nbytes = len(self) * (end - begin) * item_bytes
        return replace(self, shape=shape, nbytes=nbytes, cut=(self, begin * item_bytes))

    def read(self, ids: NDArray[np.int64] | None, out: NDArray[np.uint8]) -> None:
        """Read the tokens `ids` (None: all) into `out` [n, bytes of a token].

        Runs of tokens are read in place. Scattered tokens are read together with the tokens between
        them, in pieces that stay in the core's cache, and copied from there.

        Raises:
            OSError: the file was cut off, or the medium failed.
        """
        if self.cut is not None:
            all_columns, first = self.cut
            tokens = np.empty((len(out), all_columns.nbytes // max(1, len(self))), np.uint8)
            all_columns.read(ids, tokens)
            np.copyto(out, tokens[:, first : first + out.shape[1]])
            return
        if ids is None or not len(ids):
            self.file.read(out, self.offset)
            return
        width = out.shape[1]
        if np.any(ids[1:] <= ids[:-1]):  # not in the order of a file
            unique, places = np.unique(ids, return_inverse=True)
            rows = np.empty((len(unique), width), np.uint8)
            self.read(unique, rows)
            np.take(rows, places, axis=0, out=out)
            return
        most = max(1, _PIECE // width)
        buffer = np.empty((min(most, len(self)), width), np.uint8)
        begin = 0
        while begin < len(ids):
            first = int(ids[begin])
            end = int(np.searchsorted(ids, first + most))
            span = int(ids[end - 1]) + 1 - first
            whole = span == end - begin
            target = out[begin:end] if whole else buffer[:span]
            self.file.read(target, self.offset + first * width)
            if not whole:
                # Any other mode copies once more.
                np.take(target, ids[begin:end] - first, axis=0, out=out[begin:end], mode="clip")
            begin = end


@dataclass(frozen=True, slots=True)
class StoredCoded:
    """`Coded` whose tokens lie in a file; its scales per channel lie in memory."""

    format: str
    data: FileTensor
    scale: Tensor | None
    groups: FileTensor | None
    scale_at: FileTensor | None = None
    """Place of the scales in the file; None: there are none, or some channels were cut out."""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.data, self.scale, self.groups) if t is not None)

    def nbytes_of(self, tokens: int) -> int:
        fixed = 0 if self.scale is None else self.scale.nbytes
        return fixed + (self.nbytes - fixed) * tokens // max(1, len(self.data))

    def columns(self, begin: int, end: int, of: int) -> StoredCoded:

        def cut(t: FileTensor) -> FileTensor:
            return t.columns(*cut_at(t.shape[1], begin, end, of))

        scale = self.scale
        if scale is not None:
            scale = scale[slice(*cut_at(len(scale), begin, end, of))]
        groups = None if self.groups is None else cut(self.groups)
        return StoredCoded(self.format, cut(self.data), scale, groups)

    @property
    def whole(self) -> bool:
        """Whether these are all channels."""
        return self.data.cut is None and (self.scale is None) == (self.scale_at is None)

    def places(self) -> tuple[FileTensor, ...]:
        """Return the tensors' places in the file, in its order."""
        return tuple(t for t in (self.data, self.scale_at, self.groups) if t is not None)

    def viewed(self, view_of: Callable[[FileTensor], Tensor]) -> Coded:
        """Return the tensors of a copy of the file, in which `view_of` finds them."""
        scale = None if self.scale_at is None else view_of(self.scale_at)
        groups = None if self.groups is None else view_of(self.groups)
        return Coded(self.format, view_of(self.data), scale, groups)

    def map(
        self,
        tokens: Callable[[FileTensor], Tensor],
        channels: Callable[[Tensor], Tensor] | None = None,
    ) -> Coded:
        scale = self.scale if self.scale is None or channels is None else channels(self.scale)
        groups = None if self.groups is None else tokens(self.groups)
        return Coded(self.format, tokens(self.data), scale, groups)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """`BlockEntry` in a file."""

    parts: dict[str, tuple[StoredCoded, ...]]

    def part(self, name: str) -> tuple[StoredCoded, ...]:
        """Return the tensors of one of PARTS; none if it is not kept."""
        return self.parts.get(name, ())


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """`AnchorEntry` in an open, checked file; its tokens are read when a loader moves them."""

    anchor: Anchor
    blocks: tuple[StoredBlock, ...]
    file: OpenFile

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    @property
    def broken(self) -> bool:
        """Whether a read has failed: the file is no longer what was checked."""
        return self.file.broken

    def write(self, file: BinaryIO) -> None:
        """Copy the file.

        Raises:
            OSError: a medium refuses.
        """
        for piece in self.file.pieces(0, self.file.nbytes):
            file.write(piece)


@dataclass(slots=True)
class EntrySource:
    """An entry in memory or in an open file."""

    entry: AnchorEntry | StoredEntry
    tier: str
    found_in: str
    """Tier of the entry when it was found; its first reader counts as served from there."""


def open_entry(path: str | os.PathLike[str]) -> tuple[StoredEntry, Note]:
    """Open the entry in a file; read it once as a whole, and check it.

    Raises:
        BadEntry: the file is cut off or changed.
        OSError: the medium failed.
    """
    file = OpenFile(path)
    head = _Head.read(lambda begin, end: b"".join(map(bytes, file.pieces(begin, end))), file.nbytes)
    spans = {name: _span(file, place) for name, place in head.tensors.items()}
    head.check(
        {
            n: (s.dtype, s.shape, file.pieces(s.offset, s.offset + s.nbytes))
            for n, s in spans.items()
        }
    )
    blocks = tuple(StoredBlock(_stored_parts(spans, n, head.format)) for n in range(head.blocks))
    return StoredEntry(head.anchor, blocks, file), head.note


def _span(file: OpenFile, place: TensorPlace) -> FileTensor:
    return FileTensor(file, place.begin, _DTYPES[place.dtype], place.shape, place.nbytes)


def _stored_parts(
    spans: dict[str, FileTensor], block: int, format: str
) -> dict[str, tuple[StoredCoded, ...]]:
    fields = {field: _stored(spans, f"{block}.{field}.", format) for field in _FIELDS}
    parts = {"h": ("hidden",), "kv": ("keys", "values"), "end": ("end",), "map": ("map",)}
    return {
        part: coded_parts
        for part, names in parts.items()
        if len(coded_parts := tuple(c for n in names if (c := fields[n]) is not None)) == len(names)
    }


def _stored(spans: dict[str, FileTensor], at: str, format: str) -> StoredCoded | None:
    if f"{at}data" not in spans:
        return None
    scale, scale_at = None, spans.get(f"{at}scale")
    if scale_at is not None:
        scale = torch.empty(scale_at.shape, dtype=scale_at.dtype)
        scale_at.file.read(_bytes(scale), scale_at.offset)
    # Maps' means and variances are as computed beside tensors in any format.
    coded = spans[f"{at}data"], scale, spans.get(f"{at}groups"), scale_at
    return StoredCoded("model" if scale is None else format, *coded)


def _coded_tensors(entry: AnchorEntry) -> list[tuple[str, Coded]]:
    return [
        (f"{number}.{field}", coded)
        for number, block in enumerate(entry.blocks)
        for field in _FIELDS
        if (coded := getattr(block, field)) is not None
    ]


def _tensors(entry: AnchorEntry) -> dict[str, Tensor]:
    """Return the entry's tensors by name, in the order in which a step reads them."""
    return {
        f"{name}.{part}": tensor
        for name, coded in _coded_tensors(entry)
        for part in ("data", "scale", "groups")
        if (tensor := getattr(coded, part)) is not None
    }


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy()


def _digest(contents: _Contents, metadata: dict[str, str]) -> str:
    """Return the XXH3 digest of the metadata and of each tensor's name, dtype, shape and bytes."""
    digest = xxhash.xxh3_128()
    for key in sorted(set(metadata) - {"digest"}):
        digest.update(f"{key}={metadata[key]};".encode())
    for name in sorted(contents):
        dtype, shape, pieces = contents[name]
        digest.update(f"{name}:{dtype}:{shape};".encode())
        for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()


def _tensor(buffer: Any, place: TensorPlace) -> Tensor:
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=place.nbytes, offset=place.begin)
    return flat.view(_DTYPES[place.dtype]).view(place.shape)


def _coded(tensors: dict[str, Tensor], block: int, field: str, format: str) -> Coded | None:
    at = f"{block}.{field}."
    if f"{at}data" not in tensors:
        return None
    scale = tensors.get(f"{at}scale")
    # Maps' means and variances are as computed beside tensors in any format.
    return Coded(
        "model" if scale is None else format,
        tensors[f"{at}data"],
        scale,
        tensors.get(f"{at}groups"),
    )
