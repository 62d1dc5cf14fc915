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
from tests.fakes.model_specs import FILL_SPEC
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
    accepted = accept_edit(EditSettings(output_format=output_format), b"x", FILL_SPEC, config)
    prepared_edit = prepare_edit(
        source or encode(scene(40, 56)), encode(MASK), accepted, FILL_SPEC, config
    )
    return finish_edit(255 - prepared_edit.pixels, prepared_edit.context, mark)


@pytest.mark.parametrize("output_format", FORMATS)
def test_every_answer_says_by_xmp_that_a_model_painted_in_it(output_format: OutputFormat) -> None:
    marked = answer(make_mark(config_of()), output_format)
    with Image.open(io.BytesIO(marked)) as opened:
        xmp = opened.info["xmp"]
    assert SOURCE_TYPE.encode() in xmp
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
    manifest_store = _read(signed, output_format)
    # The authority is one that nobody trusts; all else holds.
    assert manifest_store["validation_state"] == "Valid"
    assert [status["code"] for status in manifest_store["validation_status"]] == [
        "signingCredential.untrusted"
    ]
    (manifest,) = manifest_store["manifests"].values()
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
    second_answer = answer(mark, "png", source=answer(mark, "png"))
    manifest_store = _read(second_answer, "png")
    assert manifest_store["validation_state"] == "Valid"
    assert len(manifest_store["manifests"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"certificate": "x"}, "provenance.private_key is missing"),
        ({"private_key": "x"}, "provenance.certificate is missing"),
        ({"certificate": "/no/such", "private_key": "/no/such"}, "cannot sign: .*No such file"),
    ],
)
def test_what_cannot_sign_is_told_at_start(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_mark(config_of(**options))


def test_another_key_than_the_certificates_is_told_at_start(
    signer: tuple[Path, Path], tmp_path: Path
) -> None:
    _, other_key = write_signer(tmp_path)
    with pytest.raises(ConfigError, match=r"provenance\.certificate cannot sign"):
        make_mark(config_of(certificate=str(signer[0]), private_key=str(other_key)))


def test_a_time_stamp_that_does_not_come_is_waited_for_so_long(signer: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and no more
        provenance_settings = {
            "certificate": str(signer[0]),
            "private_key": str(signer[1]),
            "timestamp_url": f"http://127.0.0.1:{silent.getsockname()[1]}/",
            "timestamp_s": 0.2,
        }
        with pytest.raises(
            ConfigError,
            match=r"cannot sign: .*the time-stamp authority did not answer within 0\.2 s",
        ):
            make_mark(config_of(**provenance_settings))


def _read(picture: bytes, output_format: str) -> dict[str, Any]:
    manifest_store: dict[str, Any] = json.loads(
        c2pa.Reader(f"image/{output_format}", io.BytesIO(picture)).json()
    )
    return manifest_store


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_sources_own_manifest_goes_on_as_its_ingredients(
    signer: tuple[Path, Path], output_format: OutputFormat
) -> None:
    config = config_of(certificate=str(signer[0]), private_key=str(signer[1]))
    mark = make_mark(config)
    first = answer(mark, output_format, config=config)
    second = answer(mark, "png", first, config)
    manifest_store, first_store = _read(second, "png"), _read(first, output_format)
    assert manifest_store["validation_state"] == "Valid"
    assert manifest_store["manifests"].keys() == {
        manifest_store["active_manifest"],
        first_store["active_manifest"],
    }
    active_manifest = manifest_store["manifests"][manifest_store["active_manifest"]]
    [ingredient] = active_manifest["ingredients"]
    assert ingredient["active_manifest"] == first_store["active_manifest"]
    assert ingredient["relationship"] == "parentOf"
    actions = [action["action"] for action in active_manifest["assertions"][0]["data"]["actions"]]
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
        manifest_store = _read(answer(mark, "png", bytes(broken), config), "png")
        assert manifest_store["validation_state"] == "Valid"
        left_out = len(manifest_store["manifests"]) == 1
        failed = json.dumps(
            manifest_store["manifests"][manifest_store["active_manifest"]].get("ingredients", [])
        )
        assert left_out or '"failure"' in failed


def _png_chunks(picture: bytes) -> list[tuple[bytes, bytes]]:
    chunks, at = [], 8
    while at < len(picture):
        size = int.from_bytes(picture[at : at + 4], "big")
        chunks.append((picture[at + 4 : at + 8], picture[at + 8 : at + 8 + size]))
        at += 12 + size
    return chunks


def _with_manifest(picture: bytes, manifest: bytes) -> bytes:
    """A PNG with another manifest in place of its own."""
    png_bytes = picture[:8]
    for kind, content in _png_chunks(picture):
        content = manifest if kind == b"caBX" else content
        png_bytes += len(content).to_bytes(4, "big") + kind + content
        png_bytes += zlib.crc32(kind + content).to_bytes(4, "big")
    return png_bytes


Boxes = list[tuple[bytes, Any]]


def _boxes(raw: bytes) -> Boxes:
    boxes: Boxes = []
    at = 0
    while at < len(raw):
        size, kind = int.from_bytes(raw[at : at + 4], "big"), raw[at + 4 : at + 8]
        body = raw[at + 8 : at + size]
        boxes.append((kind, _boxes(body) if kind == b"jumb" else body))
        at += size
    return boxes


def _raw(boxes: Boxes, bomb: bytes, which: list[int]) -> bytes:
    """The boxes as bytes; the CBOR box that the counter `which` comes to is another."""
    raw_boxes = b""
    for kind, body in boxes:
        raw = _raw(body, bomb, which) if isinstance(body, list) else body
        if kind == b"cbor":
            which[0] -= 1
            raw = bomb if which[0] == -1 else raw
        raw_boxes += (8 + len(raw)).to_bytes(4, "big") + kind + raw
    return raw_boxes


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
    for box_index in range(_raw(boxes, b"", [10**6]).count(b"cbor")):
        hostile = _with_manifest(source, _raw(boxes, BOMBS[bomb], [box_index]))
        manifest_store = _read(answer(mark, "png", hostile, config), "png")
        assert manifest_store["validation_state"] == "Valid", box_index


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
        manifest_store = _read(picture, "png")
        assert manifest_store["validation_state"] == "Valid"
        lengths.append(len(manifest_store["manifests"]))
    assert lengths == [1, 2, 3, 1, 2]
