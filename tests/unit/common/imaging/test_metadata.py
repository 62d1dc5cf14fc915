"""Author and print size of a picture stay in its answers, whatever the formats."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, IptcImagePlugin
from PIL.PngImagePlugin import PngInfo
from PIL.TiffImagePlugin import IFDRational, ImageFileDirectory_v2

from maskserve_common.config import Config
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.imaging.images import NO_LIMITS, decode_image
from maskserve_common.imaging.metadata import MOST_XMP_BYTES, Metadata, iptc_of, xmp_of
from maskserve_common.imaging.provenance import SOURCE_TYPE, edit_xmp
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import finish_edit
from maskserve_triton.preprocess import prepare_edit
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import blob_mask, encode, scene

SIZE = (40, 56)
SCENE, MASK = scene(*SIZE), encode(blob_mask(*SIZE))
RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
SAYS = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-'
    'syntax-ns#"><rdf:Description rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/" '
    'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{turned}" '
    'xmlns:i="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" i:DigitalSourceType="a camera">'
    "<dc:rights><rdf:Alt><rdf:li>(c) Jane</rdf:li></rdf:Alt></dc:rights></rdf:Description>"
    "</rdf:RDF></x:xmpmeta>"
)
PACKET = f'<?xpacket begin="\ufeff"?>{SAYS.format(turned=1)}  <?xpacket end="w"?>'
IPTC = b"\x1c\x02\x74" + struct.pack(">H", 8) + b"(c) Jane"
"""The record of a copyright notice."""


def source(form: str, **more: Any) -> bytes:
    """A file that says all that its format can."""
    if form == "PNG":
        texts = PngInfo()
        texts.add_text("Copyright", "(c) Jane")
        texts.add_text("Description", "a long one " * 40, zip=True)
        texts.add_itxt("Author", "J\u00e4ne", "de", zip=True)
        texts.add_itxt("XML:com.adobe.xmp", PACKET)
        hexed = f"\niptc\n{len(IPTC)}\n{IPTC.hex()}\n"
        texts.add_text("Raw profile type iptc", hexed, zip=True)
        return encode(SCENE, "PNG", pnginfo=texts, dpi=(300, 300), **more)
    if form == "JPEG":
        extra = Metadata(iptc=IPTC).app13
        return encode(SCENE, "JPEG", xmp=PACKET.encode(), dpi=(300, 300), extra=extra, **more)
    return encode(SCENE, "WEBP", lossless=True, xmp=PACKET.encode(), **more)


def answer(image: bytes, output_format: str) -> Image.Image:
    """The answer if the model returns its source."""
    settings = EditSettings(output_format=output_format)  # type: ignore[arg-type]
    accepted = accept_edit(settings, b"x", FILL_SPEC, Config())
    prepared_edit = prepare_edit(image, MASK, accepted, FILL_SPEC, Config())
    opened = Image.open(io.BytesIO(finish_edit(prepared_edit.pixels, prepared_edit.context)))
    opened.load()
    return opened


def packet_of(opened: Image.Image) -> str:
    packet = opened.info.get("xmp") or opened.info.get("XML:com.adobe.xmp")
    return packet if isinstance(packet, str) else packet.decode()


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_an_answer_says_what_its_source_says(form: str, output_format: str) -> None:
    opened = answer(source(form), output_format)
    tree = ElementTree.fromstring(packet_of(opened))
    assert [element.text for element in tree.iter(f"{RDF}li")] == ["(c) Jane"]
    assert packet_of(opened).count("DigitalSourceType=") == 1
    assert SOURCE_TYPE in packet_of(opened)
    if form != "WEBP" and output_format != "webp":
        assert opened.info["dpi"] == pytest.approx((300, 300), abs=0.1)
        iptc = IptcImagePlugin.getiptcinfo(opened) if output_format == "jpeg" else None
        if output_format == "jpeg":
            assert iptc == {(2, 116): b"(c) Jane"}
        else:
            assert IPTC.hex() in opened.info["Raw profile type iptc"]
    if form == "PNG" and output_format == "png":
        assert opened.info["Copyright"] == "(c) Jane"
        assert opened.info["Description"] == "a long one " * 40
        assert opened.info["Author"] == "J\u00e4ne"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("unit", "resolution"), [(2, 300), (3, 118.11), (None, 300), (1, None)])
def test_an_answer_says_what_a_tiff_says(
    order: str, unit: int | None, resolution: float | None
) -> None:
    directory = ImageFileDirectory_v2(prefix=b"II" if order == "<" else b"MM")
    directory[33_432], directory[315], directory[270] = "(c) Jane", "Jan", "a scene"
    if unit is not None:
        directory[296] = unit
    directory[282] = directory[283] = IFDRational(resolution or 300)
    prefix = {"big_tiff": False, "tiffinfo": directory}
    opened = answer(encode(SCENE, "TIFF", **prefix), "png")
    exif = opened.getexif()
    assert (exif[33_432], exif[315], exif[270]) == ("(c) Jane", "Jan", "a scene")
    if resolution is None:
        assert "dpi" not in opened.info
    else:
        assert opened.info["dpi"] == pytest.approx((300, 300), abs=0.1)


def test_an_answer_s_answer_says_it_once() -> None:
    first = answer(source("PNG"), "png")
    texts = PngInfo()
    texts.add_itxt("XML:com.adobe.xmp", packet_of(first))
    second = answer(encode(SCENE, "PNG", pnginfo=texts), "png")
    assert packet_of(second) == packet_of(first)
    plain = answer(encode(SCENE, "PNG"), "png")
    assert not xmp_of(packet_of(plain).encode()), "the mark alone is nothing of a source's"


def test_a_picture_that_xmp_turned_is_not_turned_again() -> None:
    turned = encode(SCENE, "JPEG", xmp=SAYS.format(turned=6).encode())
    assert decode_image(turned, "IMAGE", NO_LIMITS).size == SIZE[::-1]
    assert b'Orientation="1"' in decode_image(turned, "IMAGE", NO_LIMITS).metadata.xmp


def test_pictures_that_say_something_else_are_templates_of_their_own() -> None:
    plain, captioned_file = encode(SCENE, "PNG"), source("PNG")
    ids = {decode_image(file, "IMAGE", NO_LIMITS).template_id for file in (plain, captioned_file)}
    assert len(ids) == 2


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"<rdf:RDF",
        b"\xff\xfe" + SAYS.encode("utf-16-le"),
        SAYS.replace("(c) Jane", "&bomb;").encode(),
        ('<!DOCTYPE x [<!ENTITY bomb "bomb">]>' + SAYS).encode(),
        SAYS.replace("(c) Jane", "J" * MOST_XMP_BYTES).encode(),
        SAYS.replace("</rdf:Alt>", "").encode(),
        b"<a>" * 9000 + b"</rdf:RDF>" + b"</a>" * 9000,
    ],
)
def test_a_packet_that_cannot_be_read_is_left_out(packet: bytes) -> None:
    assert xmp_of(packet) == b""
    mark = edit_xmp("inpaint")
    assert Metadata(xmp=xmp_of(packet)).marked(mark) == mark


def test_texts_beyond_their_bounds_are_left_out() -> None:
    def file(*texts: bytes) -> bytes:
        plain, chunks = encode(SCENE, "PNG"), []
        for text in texts:
            body = b"zTXtComment\0\0" + zlib.compress(text)
            chunks.append(struct.pack(">I", len(body) - 4) + body)
            chunks.append(struct.pack(">I", zlib.crc32(body)))
        return plain[:33] + b"".join(chunks) + plain[33:]

    def texts(image: bytes) -> int:
        return len(decode_image(image, "IMAGE", NO_LIMITS).metadata.texts)

    assert texts(file(b"a", b"b")) == 2
    assert texts(file(bytes(2**26) + b"bomb")) == 1, "a text that is too long is empty"
    assert texts(file(b"a" * 40_000, b"b" * 40_000)) == 0
    assert texts(file(*[b"a"] * 65)) == 0


@given(st.binary(max_size=80) | st.binary(max_size=40).map(lambda tail: b"8BIM\4\4" + tail))
def test_resources_of_any_bytes_are_read_or_left_out(data: bytes) -> None:
    assert isinstance(iptc_of(b"Photoshop 3.0\0" + data), bytes)
