"""Reader of encoded images' headers, before anything is decoded.

Requests are untrusted. This module reads a container far enough to know its size, orientation,
transparency and colours, and rewrites PNG, JPEG, GIF and TIFF without their metadata, so that the
decoder meets pixels only: no text chunk, colour profile, EXIF block, animation or further page of a
stranger reaches it, and its warnings about them cannot arise.

A picture ends where its format says, whatever stands behind: phones put videos there. Bounds are
over the picture.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from maskserve_common.imaging.colour import CHUNKS, MOST_PROFILE_BYTES, PROFILE, Words
from maskserve_common.imaging.exif import MOST_BYTES, read_orientation, tiff_of, upright
from maskserve_common.imaging.gif import first_picture
from maskserve_common.imaging.isobmff import boxed_picture, brand_of
from maskserve_common.imaging.metadata import (
    MOST_TEXTS,
    NOTHING,
    Metadata,
    dpi_of_jfif,
    dpi_of_phys,
    iptc_of,
    xmp_of,
)
from maskserve_common.imaging.tiff import first_page

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PIXELS_SIGNATURE = b"\x89PIX\r\n\x1a\n"
"""Signature of pictures that pass between the nodes of a workflow: height and width, 4 bytes each,
then pixels, RGB or grey."""
ACCEPTED = "PNG, JPEG, WebP, AVIF, GIF or TIFF bytes, or their base64 text or data: URI"

_GIF, _TIFF = (b"GIF87a", b"GIF89a"), (b"II*\0", b"MM\0*")

# Parts of a file: PNG and WebP chunks, JPEG segments. Real files have some dozens.
_MAX_PARTS = 65_536
# A progressive JPEG costs a pass over all its pixels per scan; real ones have about ten.
_MAX_JPEG_SCANS = 64
_FILL_BYTES = re.compile(rb"\xff+")
# What ends a scan: neither a stuffed byte, nor a restart, nor fill.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_BARE_MARKERS = (0x01, 0xD8)
"""Markers without a length."""
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_PNG_XMP, _PNG_EXIF = b"XML:com.adobe.xmp", b"Raw profile type exif"
_PNG_PROFILE, _PNG_IPTC = b"Raw profile type ", (b"Raw profile type iptc", b"Raw profile type 8bim")
"""Keywords of text chunks. Profiles are hexadecimal; that of EXIF is older than eXIf."""
_JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_MOST_TEXT_BYTES = 2**20

_FOREIGN = (
    (b"II+\x00", "a BigTIFF"),
    (b"MM\x00+", "a BigTIFF"),
    (b"BM", "a BMP"),
    (b"%PDF", "a PDF"),
    (b"\x00\x00\x01\x00", "an ICO"),
    (b"\x00\x00\x00\x0cjP", "a JPEG 2000"),
    (b"\xff\x0a", "a JPEG XL"),
    (b"<svg", "an SVG"),
    (b"<?xml", "an XML document"),
)


class BadContainer(ValueError):
    """The bytes are no whole picture of a format that is read; continues "<field>: "."""


@dataclass(frozen=True, slots=True)
class Container:
    """One encoded image, read but not decoded."""

    kind: str
    """`png`, `jpeg`, `webp`, `avif`, `heic`, `gif` or `tiff`."""
    size: tuple[int, int]
    """(height, width) as stored, before the orientation is applied."""
    orientation: int
    """EXIF's orientation, 1 to 8, or XMP's where EXIF has none; 1 when absent or invalid."""
    payload: bytes
    """The image without its metadata, which the decoder reads."""
    bit_depth: int = 8
    colour_type: int = -1
    """PNG's colour type; -1 for other formats."""
    transparency: bytes = b""
    """PNG's tRNS chunk, which is not in the payload."""
    words: Words = field(default_factory=dict)
    """Colour information of the file that is not in the payload of PNG and JPEG."""
    end: int = 0
    """Bytes of the file that belong to the picture."""
    metadata: Metadata = NOTHING
    """Metadata that answers keep."""
    warning: str = ""
    """Warning for the client about the file; continues "<field>: "."""

    @property
    def upright_size(self) -> tuple[int, int]:
        """(height, width) after the orientation is applied."""
        return self.size[::-1] if self.orientation >= 5 else self.size


def read_container(encoded: bytes) -> Container:
    """Read the headers of an encoded image.

    Raises:
        BadContainer: another format, or cut short.
    """
    if encoded.startswith(PNG_SIGNATURE):
        return _read_png(encoded)
    if encoded.startswith(b"\xff\xd8\xff"):
        return _read_jpeg(encoded)
    if encoded[:4] == b"RIFF" and encoded[8:12] == b"WEBP":
        return _read_webp(encoded)
    try:
        if encoded.startswith(_GIF):
            return _read_gif(encoded)
        if encoded.startswith(_TIFF):
            return _read_tiff(encoded)
        if brand_of(encoded):
            return _read_boxes(encoded)
    except ValueError as problem:
        raise BadContainer(f"is {problem}") from None
    raise BadContainer(_foreign(encoded))


def is_container(data: bytes) -> bool:
    """Whether `data` begins like an image that `read_container` reads."""
    signatures = (PNG_SIGNATURE, PIXELS_SIGNATURE, b"\xff\xd8\xff", *_GIF, *_TIFF)
    boxed = data[4:8] == b"ftyp" and not data[0]  # else it is text
    return data.startswith(signatures) or boxed or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _foreign(encoded: bytes) -> str:
    for magic, name in _FOREIGN:
        if encoded.startswith(magic):
            return f"is {name}"
    if encoded[4:8] == b"ftyp":
        return "is a video file"
    return "is not an image"


@dataclass(slots=True)
class _PngChunks:
    """The parts of a PNG that are read. Of chunks that may be deflated, one of each name is kept,
    however many there are.
    """

    payload: list[bytes] = field(default_factory=lambda: [PNG_SIGNATURE])
    """The signature and whole chunks that the decoder reads: IHDR, PLTE, IDAT and IEND."""
    colours: dict[bytes, bytes] = field(default_factory=dict)
    """Bodies by name."""
    profiles: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)
    """Chunk name, and the bytes behind the keyword, of XMP, EXIF and IPTC in text chunks, by
    keyword.
    """
    texts: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    """Name, keyword and the bytes behind it of all other text chunks."""
    exif: bytes = b""
    transparency: bytes = b""
    dpi: tuple[float, float] | None = None
    end: int = 0
    """Bytes of the file that belong to the picture."""

    def keep(self, name: bytes, body: bytes, *, before_pixels: bool) -> None:
        """Keep a chunk that the decoder does not read, if it is known."""
        if name == b"tRNS":
            self.transparency = body
        elif name == b"eXIf":
            self.exif = body
        elif name in (b"tEXt", b"zTXt", b"iTXt"):
            keyword, _, text = body.partition(b"\0")
            if keyword in (_PNG_XMP, _PNG_EXIF, *_PNG_IPTC):
                self.profiles[keyword] = name, text[:_MOST_TEXT_BYTES]
            elif 0 < len(keyword) < 80 and not keyword.startswith(_PNG_PROFILE):
                self.texts.append((name, keyword, text))
        elif name == b"pHYs":
            self.dpi = dpi_of_phys(body)
        elif name in CHUNKS and before_pixels:
            self.colours.setdefault(name, body)

    def profile(self, keyword: bytes) -> bytes:
        """Return the inflated text of a keyword; empty: there is none."""
        return _text(*self.profiles[keyword]) if keyword in self.profiles else b""


def _read_png(data: bytes) -> Container:
    """Keep IHDR, PLTE, IDAT and IEND; note tRNS, the orientation in eXIf, and colours."""
    if data[8:16] != b"\0\0\0\x0dIHDR" or len(data) < 33:
        raise BadContainer("is a truncated or damaged PNG")
    width, height, depth, colour, deflate, filtering, interlace = struct.unpack_from(
        ">IIBBBBB", data, 16
    )
    if deflate or filtering or interlace > 1:
        raise BadContainer("is a damaged PNG")
    chunks = _read_png_chunks(data)
    xmp = chunks.profile(_PNG_XMP)
    exif = tiff_of(chunks.exif or _from_hex(chunks.profile(_PNG_EXIF)))
    profiles = (_from_hex(chunks.profile(keyword)) for keyword in _PNG_IPTC)
    iptc = next((iptc_of(profile) or profile for profile in profiles if profile), b"")
    metadata = Metadata(
        upright(exif),
        xmp_of(xmp),
        iptc if len(iptc) < MOST_BYTES - 64 else b"",
        _plain_texts(chunks.texts),
        chunks.dpi,
    )
    words = dict[bytes, bytes]()
    for name, body in chunks.colours.items():
        words |= _colour_chunk(name, body)
    return Container(
        "png",
        (height, width),
        _orientation(exif, xmp),
        b"".join(chunks.payload),
        depth,
        colour,
        chunks.transparency,
        words,
        chunks.end,
        metadata,
    )


def _read_png_chunks(data: bytes) -> _PngChunks:
    chunks, has_pixels, at = _PngChunks(), False, 8
    for number in range(_MAX_PARTS):
        if at + 12 > len(data):
            raise BadContainer("is a truncated PNG")
        length = int.from_bytes(data[at : at + 4], "big")
        name, end = data[at + 4 : at + 8], at + 12 + length
        if end > len(data):
            raise BadContainer("is a truncated PNG")
        if name == b"IHDR" and number > 0:
            # The decoder takes the last one, so a value read from the first could be wrong.
            raise BadContainer("is a damaged PNG")
        if name in (b"IHDR", b"PLTE", b"IDAT", b"IEND"):
            chunks.payload.append(data[at:end])
            has_pixels = has_pixels or name == b"IDAT"
        else:
            chunks.keep(name, data[at + 8 : end - 4], before_pixels=not has_pixels)
        chunks.end = end
        if name == b"IEND":
            return chunks
        at = end
    if not has_pixels or name == b"IDAT":
        raise BadContainer(f"is a PNG of more than {_MAX_PARTS} chunks")
    chunks.payload.append(_IEND)  # the picture is whole: what follows is its animation
    chunks.end = len(data)
    return chunks


def _plain_texts(texts: Sequence[tuple[bytes, bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Text chunks, given as name, keyword and what follows it, as none that is deflated; empty
    where they are too many or too long.
    """
    if len(texts) > MOST_TEXTS or sum(len(text) for _, _, text in texts) > MOST_BYTES:
        return ()
    plain = list[tuple[bytes, bytes]]()
    for name, keyword, text in texts:
        if name != b"iTXt":
            plain.append((b"tEXt", keyword + b"\0" + _text(name, text).replace(b"\0", b"")))
        elif text[2:].count(b"\0") >= 2:
            language, translated = text[2:].split(b"\0", 2)[:2]
            head = keyword + b"\0\0\0" + language + b"\0" + translated + b"\0"
            plain.append((b"iTXt", head + _text(name, text)))
    return tuple(plain) if sum(len(body) for _, body in plain) <= MOST_BYTES else ()


_IEND = b"\0\0\0\0IEND\xaeB\x60\x82"


def _colour_chunk(name: bytes, body: bytes) -> Words:
    """Return a chunk's colour information, its profile inflated; empty where it is damaged."""
    if name != PROFILE:
        return {name: body} if len(body) == CHUNKS[name] else {}
    begin = body.find(b"\0", 0, 80)
    if begin < 0 or body[begin + 1 : begin + 2] != b"\0":
        return {}
    profile = _inflated(body[begin + 2 :], MOST_PROFILE_BYTES)
    return {} if profile is None else {name: profile}


def _text(name: bytes, text: bytes) -> bytes:
    """Return a text chunk's value, inflated."""
    packed = name == b"zTXt"
    method = b""
    if packed:
        method, text = text[:1], text[1:]
    elif name == b"iTXt":
        packed, method = text[:1] != b"\0", text[1:2]
        text = text[2:].split(b"\0", 2)[-1]  # behind a language and a translated keyword
    if not packed:
        return text
    return (_inflated(text, _MOST_TEXT_BYTES) if method == b"\0" else None) or b""


def _inflated(data: bytes, most: int) -> bytes | None:
    """Inflate `data`; None: it is damaged, or larger than `most` bytes."""
    inflate = zlib.decompressobj()
    try:
        output = inflate.decompress(data, most)
    except zlib.error:
        return None
    return output if inflate.eof else None


def _from_hex(text: bytes) -> bytes:
    """Decode a profile in hexadecimal, which follows three lines: empty, its name, its length."""
    try:
        return bytes.fromhex("".join(text.decode("ascii").split("\n")[3:]))
    except ValueError:
        return b""


def _read_jpeg(data: bytes) -> Container:
    """Keep what decoding needs; of the application segments only JFIF's and Adobe's. Note the
    orientation and the profile.
    """
    segments = [data[:2]]
    size: tuple[int, int] | None = None
    exif, xmp, iptc, dpi, profile = b"", b"", b"", None, dict[int, bytes]()
    at = 2
    for _ in range(_MAX_PARTS):
        fill = _FILL_BYTES.match(data, at)  # any number of them before a marker
        at = fill.end() - 1 if fill else at
        marker = data[at + 1] if at + 4 <= len(data) and data[at] == 0xFF else None
        if marker is None:
            raise BadContainer("is a truncated or damaged JPEG")
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        end = at + 2 + length
        if length < 2 or end > len(data):
            raise BadContainer("is a truncated or damaged JPEG")
        body = data[at + 4 : min(end, at + 4 + 65_536)]
        if marker == 0xDA:
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if len(body) < 6 or size is not None:
                raise BadContainer("is a damaged JPEG")
            size = (int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big"))
        if marker == 0xE1 and body.startswith(b"Exif\x00\x00") and not exif:
            exif = tiff_of(body)
        if marker == 0xE1 and body.startswith(_JPEG_XMP):
            xmp = body
        if marker == 0xED:
            iptc = iptc or iptc_of(body)
        if marker == 0xE0:
            dpi = dpi or dpi_of_jfif(body)
        if marker == 0xE2 and body.startswith(b"ICC_PROFILE\0") and len(body) > 14:
            profile[body[12]] = body[14:]
        if marker in (0xE0, 0xEE) or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            segments.append(data[at:end])
        at = end
    else:
        raise BadContainer(f"is a JPEG of more than {_MAX_PARTS} segments")
    if size is None:
        raise BadContainer("is a damaged JPEG")
    end = _jpeg_end(data, at)
    # Inside compressed data 0xFF is always followed by 0x00 or a restart marker.
    if data.count(b"\xff\xda", at, end) > _MAX_JPEG_SCANS:
        raise BadContainer(f"is a JPEG of more than {_MAX_JPEG_SCANS} scans")
    segments.append(data[at:end])
    whole = b"".join(profile[part] for part in sorted(profile))
    words = {PROFILE: whole} if 0 < len(whole) <= MOST_PROFILE_BYTES else {}
    payload = b"".join(segments)
    turned = _orientation(exif, xmp)
    packet = xmp_of(xmp.removeprefix(_JPEG_XMP))
    metadata = Metadata(upright(exif), packet, iptc, dpi=dpi)
    return Container("jpeg", size, turned, payload, words=words, end=end, metadata=metadata)


def _jpeg_end(data: bytes, at: int) -> int:
    """Return where the scans that begin at `at` end, with EOI; the data's end where there is no
    EOI.
    """
    for _ in range(_MAX_PARTS):
        match = _MARKER.search(data, at)
        if match is None:
            break
        at = match.end()
        marker = data[at - 1]
        if marker == 0xD9:
            return at
        if marker not in _BARE_MARKERS:
            at += int.from_bytes(data[at : at + 2], "big")
    return len(data)


def _read_webp(data: bytes) -> Container:
    """Read the size of the canvas, the orientation and the profile; WebP's decoder takes the file
    whole.
    """
    end = int.from_bytes(data[4:8], "little") + 8
    if end > len(data):
        raise BadContainer("is a truncated WebP")
    data = data[:end]
    name, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise BadContainer("is a truncated WebP")
    # Every file's chunks are walked: the decoder walks them too, and has no bound.
    metadata_chunks = _webp_metadata(data)
    if name == b"VP8X":
        width = int.from_bytes(body[4:7], "little") + 1
        height = int.from_bytes(body[7:10], "little") + 1
    elif name == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif name == b"VP8 ":
        width = int.from_bytes(body[6:8], "little") & 0x3FFF
        height = int.from_bytes(body[8:10], "little") & 0x3FFF
    else:
        raise BadContainer("is a damaged WebP")
    if name != b"VP8X":
        metadata_chunks = {}  # stray chunks
    exif = tiff_of(metadata_chunks.get(b"EXIF", b"")) if body[0] & 0x08 else b""
    xmp = metadata_chunks.get(b"XMP ", b"") if body[0] & 0x04 else b""
    orientation = _orientation(exif, xmp)
    profile = metadata_chunks.get(b"ICCP", b"")
    words = {PROFILE: profile} if 0 < len(profile) <= MOST_PROFILE_BYTES else {}
    metadata = Metadata(upright(exif), xmp_of(xmp))
    return Container(
        "webp", (height, width), orientation, data, words=words, end=end, metadata=metadata
    )


def _webp_metadata(data: bytes) -> Mapping[bytes, bytes]:
    """Return the first EXIF, ICCP and XMP chunk, by name."""
    chunks: dict[bytes, bytes] = {}
    at = 12
    for _ in range(_MAX_PARTS):
        if at + 8 > len(data):
            return chunks
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name in (b"EXIF", b"ICCP", b"XMP "):
            chunks.setdefault(name, data[at + 8 : at + 8 + length])
        at += 8 + length + (length & 1)
    raise BadContainer(f"is a WebP of more than {_MAX_PARTS} chunks")


def _read_gif(data: bytes) -> Container:
    picture = first_picture(data)
    table = b"" if picture.clear is None else b"\xff" * picture.clear + b"\0"
    warning = "is an animation; its first picture is used" if picture.animated else ""
    return Container(
        "gif", picture.size, 1, picture.payload, colour_type=3, transparency=table, end=len(data),
        warning=warning,
    )  # fmt: skip


def _read_tiff(data: bytes) -> Container:
    page = first_page(data, MOST_PROFILE_BYTES, MOST_BYTES)
    words = {PROFILE: page.profile} if page.profile else {}
    iptc = iptc_of(page.iptc) or page.iptc
    metadata = Metadata(upright(page.exif), xmp_of(page.xmp), iptc, dpi=page.dpi)
    warning = "has several pages; the first is used" if page.pages else ""
    return Container(
        "tiff", page.size, page.orientation, page.payload, words=words, end=len(data),
        metadata=metadata, warning=warning,
    )  # fmt: skip


def _read_boxes(data: bytes) -> Container:
    """Read AVIF or HEIC; their decoders take the file whole, and HEIC's decoder rotates the
    picture.
    """
    picture = boxed_picture(data, MOST_BYTES, MOST_PROFILE_BYTES)
    words = {PROFILE: picture.profile} if picture.profile else {}
    metadata = Metadata(upright(tiff_of(picture.exif)), xmp_of(picture.xmp))
    size, turned = picture.size, picture.orientation
    if picture.kind == "heic":
        size, turned = size[::-1] if turned >= 5 else size, 1
    warning = "is an animation; its first picture is used" if picture.sequence else ""
    return Container(
        picture.kind,
        size,
        turned,
        data,
        words=words,
        end=len(data),
        metadata=metadata,
        warning=warning,
    )


def _orientation(exif: bytes, xmp: bytes | None) -> int:
    """Return EXIF's orientation, or XMP's where EXIF has none, as Pillow does."""
    value = read_orientation(exif)
    if value is None and xmp:
        match = _XMP_ORIENTATION.search(xmp)
        value = int(match[1]) if match else None
    return value if value is not None and 1 <= value <= 8 else 1
