"""Valid files with random damage. They must be edited or refused, nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache

from hypothesis import strategies as st
from PIL import Image

from tests.fakes.corpus.case import Case, damaged
from tests.fakes.corpus.drawn import drawn
from tests.fakes.corpus.encoding import RGB, chunks_of, png, png_of
from tests.fakes.hostile import SIZE
from tests.fakes.pictures import blob_mask, encode, scene

DRAWN = 210


def mutation_cases() -> Iterator[Case]:
    for index, (field, damage, file) in enumerate(drawn(damaged_files(), DRAWN)):
        yield damaged("mutation", f"{index}: {field} {damage}", field, file)


def damaged_files() -> st.SearchStrategy[tuple[str, str, bytes]]:
    """(IMAGE or MASK, the sort of damage, the damaged file)."""
    seeds = [(field, kind) for field in ("IMAGE", "MASK") for kind in _KINDS]

    def damage(seed: tuple[str, str]) -> st.SearchStrategy[tuple[str, str, bytes]]:
        field, kind = seed
        whole = _file(field, kind)
        ways = [*_WAYS, *(_PNG_WAYS if "PNG" in kind else {})]
        return st.sampled_from(ways).flatmap(
            lambda way: st.tuples(
                st.just(field),
                st.just(f"{kind}, {way}"),
                {**_WAYS, **_PNG_WAYS}[way](whole),
            )
        )

    return st.sampled_from(seeds).flatmap(damage)


_KINDS = ("PNG", "interlaced PNG", "palette PNG", "JPEG", "progressive JPEG", "WebP", "lossy WebP")


@cache
def _file(field: str, kind: str) -> bytes:
    rgb = scene(*SIZE)
    if field == "MASK":
        rgb = blob_mask(*SIZE)[..., None].repeat(3, axis=2)
    return {
        "PNG": lambda: encode(rgb),
        "interlaced PNG": lambda: png(rgb, RGB, interlaced=True),
        "palette PNG": lambda: encode(Image.fromarray(rgb).quantize(64), transparency=3),
        "JPEG": lambda: encode(rgb, "JPEG"),
        "progressive JPEG": lambda: encode(rgb, "JPEG", progressive=True),
        "WebP": lambda: encode(rgb, "WEBP", lossless=True),
        "lossy WebP": lambda: encode(rgb, "WEBP", quality=60, exif=b"II*\0" + bytes(20)),
    }[kind]()


def _truncated(whole: bytes) -> st.SearchStrategy[bytes]:
    return st.integers(0, len(whole) - 1).map(lambda end: whole[:end])


def _bits_flipped(whole: bytes, reach: int = 0) -> st.SearchStrategy[bytes]:
    def flip(bits: list[int]) -> bytes:
        damaged = bytearray(whole)
        for bit in bits:
            damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)

    last = 8 * (min(reach, len(whole)) or len(whole)) - 1
    return st.lists(st.integers(0, last), min_size=1, max_size=8).map(flip)


def _overwritten(whole: bytes) -> st.SearchStrategy[bytes]:
    return st.builds(
        lambda at, junk: whole[:at] + junk + whole[at + len(junk) :],
        st.integers(0, len(whole) - 1),
        st.binary(min_size=1, max_size=40),
    )


def _spliced(whole: bytes) -> st.SearchStrategy[bytes]:
    """Leave a part out, or repeat it."""
    places = st.integers(0, len(whole))
    return st.builds(lambda a, b: whole[:a] + whole[b:], places, places)


def _joined(whole: bytes) -> st.SearchStrategy[bytes]:
    """Join the head of one file and the tail of another."""
    sampled_from = st.sampled_from([_file("IMAGE", kind) for kind in _KINDS])
    at = st.integers(1, len(whole))
    return st.builds(lambda other, n: whole[:n] + other[n:], sampled_from, at)


_WAYS: dict[str, Callable[[bytes], st.SearchStrategy[bytes]]] = {
    "cut": _truncated,
    "bits flipped": _bits_flipped,
    "bits of its head flipped": lambda whole: _bits_flipped(whole, 64),
    "overwritten": _overwritten,
    "spliced": _spliced,
    "joined to another": _joined,
}


def _swapped(whole: bytes) -> st.SearchStrategy[bytes]:
    """Whole chunks with right checksums in another order; some are repeated, some are missing."""
    chunks = chunks_of(whole)
    places = st.lists(st.integers(0, len(chunks) - 1), min_size=1, max_size=len(chunks) + 2)
    return places.map(lambda order: png_of(*(chunks[i] for i in order)))


def _headed(whole: bytes) -> st.SearchStrategy[bytes]:
    """Another header before the same pixels, with a right checksum."""
    chunks = chunks_of(whole)
    small = st.integers(0, 300)
    number = st.one_of(small, small, st.integers(0, 2**32 - 1))
    fields = st.tuples(
        number,
        number,
        st.sampled_from((0, 1, 2, 4, 8, 16, 255)),
        st.sampled_from((0, 2, 3, 4, 6, 255)),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 2),
    )
    return fields.map(
        lambda values: png_of((b"IHDR", struct.pack(">IIBBBBB", *values)), *chunks[1:])
    )


def _chunk_rewritten(whole: bytes) -> st.SearchStrategy[bytes]:
    """A file in which one chunk's content is replaced, with a right checksum."""
    chunks = chunks_of(whole)
    return st.builds(
        lambda at, junk: png_of(*chunks[:at], (chunks[at][0], junk), *chunks[at + 1 :]),
        st.integers(0, len(chunks) - 1),
        st.binary(max_size=60),
    )


_PNG_WAYS: dict[str, Callable[[bytes], st.SearchStrategy[bytes]]] = {
    "chunks swapped": _swapped,
    "another header": _headed,
    "a chunk rewritten": _chunk_rewritten,
}
