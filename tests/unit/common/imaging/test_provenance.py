"""Answers say that a model has painted in them; C2PA's own reader checks what is signed."""

from __future__ import annotations

import io
import json
import socket
import zlib
from pathlib import Path
from typing import Any

import c2pa
import numpy as np
import pytest
from PIL import Image

from maskserve_common.config import Config, ConfigError, ModelConfig, ProvenanceConfig
from maskserve_common.contracts.settings import EditSettings, OutputFormat
from maskserve_common.imaging.images import decode_image
from maskserve_common.imaging.provenance import SOURCE_TYPE, Mark, make_mark
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import finish_edit
from maskserve_triton.preprocess import prepare_edit
from tests.fakes.facts import FILL_FACTS
from tests.fakes.pictures import encode, scene
from tests.support.certificates import write_signer

FORMATS: list[OutputFormat] = ["png", "jpeg", "webp"]
MASK = np.zeros((40, 56), np.uint8)
MASK[10:20, 30:41] = 255


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_signer(tmp_path_factory.mktemp("signer"))


def config_of(**provenance: Any) -> Config:
    return Config(model=ModelConfig(path="models/demo"), provenance=ProvenanceConfig(**provenance))


def answer(
    mark: Mark,
    output_format: OutputFormat,
    source: bytes | None = None,
    config: Config | None = None,
) -> bytes:
    config = config or config_of()
    accepted = accept_edit(EditSettings(output_format=output_format), b"x", FILL_FACTS, config)
    done = prepare_edit(source or encode(scene(40, 56)), encode(MASK), accepted, FILL_FACTS, config)
    return finish_edit(255 - done.pixels, done.context, mark)


@pytest.mark.parametrize("output_format", FORMATS)
def test_every_answer_says_by_xmp_that_a_model_painted_in_it(output_format: OutputFormat) -> None:
    marked = answer(make_mark(config_of()), output_format)
    with Image.open(io.BytesIO(marked)) as opened:
        said = opened.info["xmp"]
    assert SOURCE_TYPE.encode() in said
    plain = answer(make_mark(config_of(mark=False)), output_format)
    assert SOURCE_TYPE.encode() not in plain
    for picture in (marked, plain):
        pixels = decode_image(picture, "IMAGE", config_of().limits).pixels
        if output_format != "jpeg":
            np.testing.assert_array_equal(pixels[MASK == 0], scene(40, 56)[MASK == 0])


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_signed_answer_is_valid_until_someone_changes_it(
    signer: tuple[Path, Path], output_format: OutputFormat
) -> None:
    mark = make_mark(config_of(certificate=str(signer[0]), private_key=str(signer[1])))
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    signed = answer(mark, output_format, encode(scene(40, 56), exif=exif))
    with Image.open(io.BytesIO(signed)) as opened:
        assert opened.getexif()[0x010F] == "a camera"
    told = _read(signed, output_format)
    # The authority is one that nobody trusts; all else holds.
    assert told["validation_state"] == "Valid"
    assert [each["code"] for each in told["validation_status"]] == ["signingCredential.untrusted"]
    (manifest,) = told["manifests"].values()
    actions = manifest["assertions"][0]["data"]["actions"]
    assert {action["digitalSourceType"] for action in actions} == {SOURCE_TYPE}
    edited = actions[1]
    assert edited["softwareAgent"] == {"name": "demo"}
    shape = edited["changes"][0]["region"][0]["shape"]
    assert (shape["origin"], shape["width"], shape["height"]) == ({"x": 30, "y": 10}, 11, 10)
    forged = bytearray(signed)
    begin = {"png": b"IDAT", "jpeg": b"\xff\xda", "webp": b"VP8L"}[output_format]
    forged[signed.rindex(begin) + 60] ^= 1  # of the pixels
    assert _read(bytes(forged), output_format)["validation_state"] == "Invalid"


def test_a_picture_that_came_signed_is_signed_anew(signer: tuple[Path, Path]) -> None:
    mark = make_mark(config_of(certificate=str(signer[0]), private_key=str(signer[1])))
    again = answer(mark, "png", source=answer(mark, "png"))
    told = _read(again, "png")
    assert told["validation_state"] == "Valid"
    assert len(told["manifests"]) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"certificate": "x"}, "provenance.private_key is missing"),
        ({"private_key": "x"}, "provenance.certificate is missing"),
        ({"certificate": "/no/such", "private_key": "/no/such"}, "cannot sign: .*No such file"),
    ],
)
def test_what_cannot_sign_is_told_at_start(given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_mark(config_of(**given))


def test_another_key_than_the_certificates_is_told_at_start(
    signer: tuple[Path, Path], tmp_path: Path
) -> None:
    _, other = write_signer(tmp_path)
    with pytest.raises(ConfigError, match=r"provenance\.certificate cannot sign"):
        make_mark(config_of(certificate=str(signer[0]), private_key=str(other)))


def test_a_time_stamp_that_does_not_come_is_waited_for_so_long(signer: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and no more
        given = {
            "certificate": str(signer[0]),
            "private_key": str(signer[1]),
            "timestamp_url": f"http://127.0.0.1:{silent.getsockname()[1]}/",
            "timestamp_s": 0.2,
        }
        with pytest.raises(ConfigError, match=r"cannot sign: .*no time stamp came within 0\.2 s"):
            make_mark(config_of(**given))


def _read(picture: bytes, output_format: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(
        c2pa.Reader(f"image/{output_format}", io.BytesIO(picture)).json()
    )
    return told


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_sources_own_manifest_goes_on_as_its_ingredients(
    signer: tuple[Path, Path], output_format: OutputFormat
) -> None:
    config = config_of(certificate=str(signer[0]), private_key=str(signer[1]))
    mark = make_mark(config)
    first = answer(mark, output_format, config=config)
    second = answer(mark, "png", first, config)
    told, before = _read(second, "png"), _read(first, output_format)
    assert told["validation_state"] == "Valid"
    assert told["manifests"].keys() == {told["active_manifest"], before["active_manifest"]}
    own = told["manifests"][told["active_manifest"]]
    [ingredient] = own["ingredients"]
    assert ingredient["active_manifest"] == before["active_manifest"]
    assert ingredient["relationship"] == "parentOf"
    actions = [each["action"] for each in own["assertions"][0]["data"]["actions"]]
    assert actions == ["c2pa.opened", "c2pa.edited"]


def test_a_source_whose_manifest_is_broken_is_edited_and_told_so(
    signer: tuple[Path, Path],
) -> None:
    config = config_of(certificate=str(signer[0]), private_key=str(signer[1]))
    mark = make_mark(config)
    first = answer(mark, "png", config=config)
    at = first.index(b"c2pa")
    for cut in (slice(at + 300, at + 340), slice(at - 8, at - 4)):
        broken = bytearray(first)
        broken[cut] = bytes(cut.stop - cut.start)
        told = _read(answer(mark, "png", bytes(broken), config), "png")
        assert told["validation_state"] == "Valid"
        left_out = len(told["manifests"]) == 1
        failed = json.dumps(told["manifests"][told["active_manifest"]].get("ingredients", []))
        assert left_out or '"failure"' in failed


def _png_chunks(picture: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at < len(picture):
        size = int.from_bytes(picture[at : at + 4], "big")
        found.append((picture[at + 4 : at + 8], picture[at + 8 : at + 8 + size]))
        at += 12 + size
    return found


def _with_manifest(picture: bytes, manifest: bytes) -> bytes:
    """A PNG with another manifest in place of its own."""
    made = picture[:8]
    for kind, content in _png_chunks(picture):
        content = manifest if kind == b"caBX" else content
        made += len(content).to_bytes(4, "big") + kind + content
        made += zlib.crc32(kind + content).to_bytes(4, "big")
    return made


Boxes = list[tuple[bytes, Any]]


def _boxes(raw: bytes) -> Boxes:
    found: Boxes = []
    at = 0
    while at < len(raw):
        size, kind = int.from_bytes(raw[at : at + 4], "big"), raw[at + 4 : at + 8]
        body = raw[at + 8 : at + size]
        found.append((kind, _boxes(body) if kind == b"jumb" else body))
        at += size
    return found


def _raw(boxes: Boxes, bomb: bytes, which: list[int]) -> bytes:
    """The boxes as bytes; the CBOR box that the counter `which` comes to is another."""
    made = b""
    for kind, body in boxes:
        raw = _raw(body, bomb, which) if isinstance(body, list) else body
        if kind == b"cbor":
            which[0] -= 1
            raw = bomb if which[0] == -1 else raw
        made += (8 + len(raw)).to_bytes(4, "big") + kind + raw
    return made


BOMBS = {
    "arrays": b"\x81" * 200_000 + b"\0",
    "maps": b"\xa1\x61a" * 100_000 + b"\0",
    "endless": b"\x9f" * 200_000,
    "tags": b"\xc1" * 200_000 + b"\0",
    "large": b"\x9b\x7f" + b"\xff" * 7,
    "text": b"\x7b\x7f" + b"\xff" * 7,
    "nothing": b"",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_manifest_costs_itself_alone(signer: tuple[Path, Path], bomb: str) -> None:
    """Wherever it lies: in a claim, a signature, or an assertion that is read as an edit is signed.

    Each edit is answered, and its own manifest holds.
    """
    config = config_of(certificate=str(signer[0]), private_key=str(signer[1]))
    mark = make_mark(config)
    source = answer(mark, "png", answer(mark, "png", config=config), config)
    boxes = _boxes(dict(_png_chunks(source))[b"caBX"])
    for which in range(_raw(boxes, b"", [10**6]).count(b"cbor")):
        hostile = _with_manifest(source, _raw(boxes, BOMBS[bomb], [which]))
        told = _read(answer(mark, "png", hostile, config), "png")
        assert told["validation_state"] == "Valid", which


@pytest.mark.parametrize(
    ("name", "value"), [("_MOST_BOXES", {b"c2cs": 2, b"jumb": 999}), ("_MOST_HISTORY", 12_000)]
)
def test_a_history_that_is_too_long_begins_anew(
    signer: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    """An edit of an edit of an edit: each is checked again, and carried on."""
    monkeypatch.setattr(f"maskserve_common.imaging.provenance.{name}", value)
    config = config_of(certificate=str(signer[0]), private_key=str(signer[1]))
    mark, picture, lengths = make_mark(config), b"", []
    for _ in range(5):
        picture = answer(mark, "png", picture or None, config)
        told = _read(picture, "png")
        assert told["validation_state"] == "Valid"
        lengths.append(len(told["manifests"]))
    assert lengths == [1, 2, 3, 1, 2]
