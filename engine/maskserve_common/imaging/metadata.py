"""Metadata that a response keeps from its source: EXIF, XMP, IPTC, texts, resolution.

The source is untrusted: each kind has a bound, and longer or damaged metadata is left out. So is
metadata that is no longer true: the source's orientation, its thumbnail, signatures of its pixels.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from xml.etree import ElementTree

from maskserve_common.imaging.exif import MOST_BYTES

MOST_XMP_BYTES = 60_000
"""Most bytes of an XMP packet: with the server's mark it fits into a segment of a JPEG file."""
MOST_TEXTS = 64
_PHOTOSHOP = b"Photoshop 3.0\0"
_RESOURCE, _IPTC = b"8BIM", 0x0404
_METRES = 0.0254
_TURNED = re.compile(r"(tiff:Orientation(?:\s*=\s*[\"']|>))[0-9]+")
_NAMES = "DigitalSourceType|HasExtendedXMP|provenance"
"""XMP properties that apply only to the source."""
_UNTRUE = re.compile(
    rf"\s[\w.-]+:(?:{_NAMES})\s*=\s*(?:\"[^\"]*\"|'[^']*')"
    rf"|<([\w.-]+:(?:{_NAMES}))\b(?:[^>]*/>|.*?</\1\s*>)",
    re.DOTALL,
)
_EMPTY = re.compile(
    r"<rdf:Description(?:\s+(?:xmlns:[\w.-]+|rdf:about)\s*=\s*(?:\"[^\"]*\"|'[^']*'))*\s*/>"
)
_PACKET = re.compile(r"<\?xpacket.*?\?>", re.DOTALL)
_END = re.compile(r"</([\w.-]+:RDF)\s*>")
_DESCRIPTION = re.compile(r"<rdf:Description\b.*/>", re.DOTALL)
_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata of one picture, upright."""

    exif: bytes = b""
    """EXIF block."""
    xmp: bytes = b""
    """XMP packet, UTF-8."""
    iptc: bytes = b""
    """IPTC-IIM records."""
    texts: tuple[tuple[bytes, bytes], ...] = ()
    """PNG's text chunks, none deflated: name and body."""
    dpi: tuple[float, float] | None = None
    """Pixels per inch, across and down."""

    def __bool__(self) -> bool:
        return self != NOTHING

    @property
    def identity(self) -> bytes:
        """Key that differs between pictures with different metadata."""
        if not self:
            return b""
        if self == Metadata(exif=self.exif):
            return b"exif" + self.exif
        fields = repr((self.exif, self.xmp, self.iptc, self.texts, self.dpi)).encode()
        return b"metadata" + hashlib.blake2b(fields).digest()

    def marked(self, mark: bytes) -> bytes:
        """Return the XMP packet with the server's packet in it; only that if there is no other."""
        if not self.xmp or not mark:
            return self.xmp or mark
        text = self.xmp.decode()
        last = list(_END.finditer(text))[-1]
        description = _DESCRIPTION.search(mark.decode())
        assert description is not None, "the mark is one description"
        inside = description[0].replace(
            "<rdf:Description", f'<rdf:Description xmlns:rdf="{_RDF}"', 1
        )
        return (text[: last.start()] + inside + text[last.start() :]).encode()

    @property
    def jfif_dpi(self) -> tuple[int, int] | None:
        """The resolution as JFIF can say it."""
        across, down = (round(resolution) for resolution in self.dpi or (0, 0))
        return (across, down) if 0 < min(across, down) <= max(across, down) < 2**16 else None

    @property
    def app13(self) -> bytes:
        """The IPTC records as a segment of a JPEG file."""
        if not self.iptc:
            return b""
        padded = self.iptc + bytes(len(self.iptc) % 2)
        body = _PHOTOSHOP + _RESOURCE + struct.pack(">HHI", _IPTC, 0, len(self.iptc)) + padded
        return b"\xff\xed" + struct.pack(">H", len(body) + 2) + body

    @property
    def chunks(self) -> tuple[tuple[bytes, bytes], ...]:
        """Texts, IPTC records and resolution as chunks of a PNG file."""
        parts = list(self.texts)
        if self.iptc:
            profile = f"\niptc\n{len(self.iptc):8}\n{self.iptc.hex()}\n".encode()
            parts.append((b"tEXt", b"Raw profile type iptc\0" + profile))
        if self.dpi is not None:
            across, down = (round(resolution / _METRES) for resolution in self.dpi)
            parts.append((b"pHYs", struct.pack(">IIB", across, down, 1)))
        return tuple(parts)


NOTHING = Metadata()


def xmp_of(packet: bytes) -> bytes:
    """An XMP packet as an answer has it; empty: it is too long, or none that can be read."""
    try:
        text = _PACKET.sub("", packet.decode("utf-8-sig")).strip("\0 \t\r\n")
        if len(packet) > MOST_XMP_BYTES or "<!" in text or not _END.search(text):
            return b""
        text = _UNTRUE.sub("", _TURNED.sub(r"\g<1>1", text))
        text = _EMPTY.sub("", text)
        tree = ElementTree.fromstring(text)  # without entities it is no larger than its text
        return text.encode() if tree.find(f".//{{{_RDF}}}Description") is not None else b""
    except (ValueError, ElementTree.ParseError):
        return b""


def iptc_of(app13: bytes) -> bytes:
    """The IPTC-IIM records among Photoshop's resources; empty where there are none."""
    at = len(_PHOTOSHOP) if app13.startswith(_PHOTOSHOP) else 0
    while app13[at : at + 4] == _RESOURCE and at + 12 <= len(app13):
        (kind,) = struct.unpack_from(">H", app13, at + 4)
        at += 6 + (2 + app13[at + 6]) // 2 * 2  # a name behind its length, to an even place
        if at + 4 > len(app13):
            break
        (length,) = struct.unpack_from(">I", app13, at)
        at += 4
        if kind == _IPTC:
            records = app13[at : at + length]
            return records if len(records) == length and length < MOST_BYTES - 64 else b""
        at += length + length % 2
    return b""


def dpi_of_jfif(app0: bytes) -> tuple[float, float] | None:
    """Return the resolution in a JPEG's JFIF segment; None: there is none."""
    if not app0.startswith(b"JFIF\0") or len(app0) < 12 or app0[7] not in (1, 2):
        return None
    across, down = struct.unpack_from(">HH", app0, 8)
    inch = 1 if app0[7] == 1 else 2.54
    return (across * inch, down * inch) if across and down else None


def dpi_of_phys(chunk: bytes) -> tuple[float, float] | None:
    """Return the resolution in PNG's chunk pHYs; None: there is none."""
    if len(chunk) != 9 or chunk[8] != 1:
        return None
    across, down = struct.unpack_from(">II", chunk)
    if not (0 < across < 2**31 and 0 < down < 2**31):
        return None
    return across * _METRES, down * _METRES
