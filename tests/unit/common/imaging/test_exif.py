"""A camera's EXIF stays in the answers, but for tags that an edit makes untrue."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maskserve_common.config import Config
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.imaging.exif import MOST_BYTES, upright
from maskserve_common.imaging.images import NO_LIMITS, decode_image
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import finish_edit
from maskserve_triton.preprocess import prepare_edit
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.draws import fresh_rng

SIZE = (40, 56)
SCENE, MASK = scene(*SIZE), encode(blob_mask(*SIZE))
UPRIGHT_MASK = encode(blob_mask(*SIZE[::-1]))
ORIENTATION, MAKE, CAMERA, PLACE, NOTE = 0x0112, 0x010F, 0x8769, 0x8825, 0x927C
THUMBNAIL = np.random.default_rng(5).bytes(900)


def camera(orientation: int = 6, make: str = "A camera's") -> bytes:
    """A block as phones write one: place, maker's note and thumbnail; without its head."""
    exif = Image.Exif()
    exif[ORIENTATION], exif[MAKE] = orientation, make
    exif.get_ifd(CAMERA)[NOTE] = b"note" * 40
    exif.get_ifd(PLACE)[1] = "N"
    tiff = exif.tobytes().removeprefix(b"Exif\0\0")
    order = "<" if tiff[:2] == b"II" else ">"
    (at,) = struct.unpack_from(order + "I", tiff, 4)
    (count,) = struct.unpack_from(order + "H", tiff, at)
    end = at + 2 + 12 * count
    second = len(tiff)
    begin = second + 2 + 2 * 12 + 4
    more = struct.pack(order + "H", 2) + struct.pack(order + "HHII", 0x0201, 4, 1, begin)
    more += struct.pack(order + "HHII", 0x0202, 4, 1, len(THUMBNAIL)) + bytes(4)
    return tiff[:end] + struct.pack(order + "I", second) + tiff[end + 4 :] + more + THUMBNAIL


def answer(image: bytes, mask: bytes = UPRIGHT_MASK, **settings: Any) -> bytes:
    """The answer if the model returns its source."""
    accepted = accept_edit(EditSettings(**settings), b"x", FILL_SPEC, Config())
    prepared_edit = prepare_edit(image, mask, accepted, FILL_SPEC, Config())
    return finish_edit(prepared_edit.pixels, prepared_edit.context)


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_answer_has_the_sources_exif_turned_once(kind: str, output_format: str) -> None:
    source = encode(SCENE, kind, exif=b"Exif\0\0" + camera())
    assert THUMBNAIL in source
    edited_file = answer(source, output_format=output_format)
    with Image.open(io.BytesIO(edited_file)) as opened:
        assert opened.size == SIZE  # width and height of what stands upright
        exif = opened.getexif()
        assert (exif[ORIENTATION], exif[MAKE]) == (1, "A camera's")
        assert exif.get_ifd(CAMERA)[NOTE] == b"note" * 40
        assert exif.get_ifd(PLACE)[1] == "N"
    assert THUMBNAIL not in edited_file
    decoded_image = decode_image(edited_file, "IMAGE", NO_LIMITS)
    assert decoded_image.metadata.exif == upright(camera())


def test_without_exif_there_is_none() -> None:
    with Image.open(io.BytesIO(answer(encode(SCENE), MASK))) as opened:
        assert not opened.getexif()


def test_pictures_that_differ_in_it_alone_are_templates_of_their_own() -> None:
    """A client that names a template does not learn where another client's picture was taken."""
    files = [
        encode(SCENE, "PNG"),
        *(encode(SCENE, "PNG", exif=camera(1, make)) for make in ("one", "two")),
    ]
    names = [decode_image(file, "IMAGE", NO_LIMITS).template_id for file in files]
    assert len(set(names)) == 3
    assert {name[:32] for name in names} == {names[0]}


def test_a_block_too_long_for_a_jpeg_is_left_out() -> None:
    long = camera(1) + bytes(MOST_BYTES)
    edited_file = answer(encode(SCENE, "PNG", exif=long), MASK, output_format="jpeg")
    with Image.open(io.BytesIO(edited_file)) as opened:
        assert not opened.getexif()


def test_nonsense_is_left_out_or_stays_as_it_is() -> None:
    rng, whole = fresh_rng(), camera()
    for _ in range(2000):
        broken = bytearray(whole[: int(rng.integers(len(whole) + 1))])
        for _ in range(int(rng.integers(1, 9))):
            if broken:
                broken[int(rng.integers(min(len(broken), 200)))] = int(rng.integers(256))
        upright_block = upright(bytes(broken))
        assert len(upright_block) in (0, len(broken))
    for block in (b"", b"II", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff"):
        assert len(upright(block)) in (0, len(block))
        assert answer(encode(SCENE, "PNG", exif=block), MASK)
