"""Forms of image edits: what is taken, what is refused and by which name."""

from __future__ import annotations

import base64
import json
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import parse_settings
from maskserve_common.errors import InvalidRequest
from maskserve_common.servers.failure import Failure
from maskserve_router.api.openai.answers import error_body
from maskserve_router.api.openai.form import EditForm, read_form
from maskserve_router.api.openai.form_reader import _margins
from maskserve_router.api.openai.image_urls import ImageUrls
from maskserve_router.config import AdmissionBounds, ImageHosts
from maskserve_router.fair_share import FairShare
from maskserve_router.keys import KeyRing
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import Admission
from tests.support.examples import examples

BOUNDARY = "frontier"
Part = tuple[str, bytes | str]
PICTURE: Part = ("image", b"\x89PNG picture")


async def now(work: Any, *args: Any) -> Any:
    return work(*args)


async def picture(field: str, url: str) -> bytes:
    """As a router reads URLs that is allowed to ask no host."""
    urls = ImageUrls(
        ImageHosts(), LimitsConfig(), Admission(AdmissionBounds(), Metrics()), FairShare(1)
    )
    with ExitStack() as stack:
        return await urls.read(field, url, KeyRing((), 99).client({}), stack)


def body_of(parts: list[Part]) -> bytes:
    """A multipart form; bytes are files, text is text."""
    lines = []
    for name, value in parts:
        file = '; filename="a.png"' if isinstance(value, bytes) else ""
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        raw = value if isinstance(value, bytes) else value.encode()
        lines.append(head.encode() + raw + b"\r\n")
    return b"".join(lines) + f"--{BOUNDARY}--\r\n".encode()


async def form_of(*parts: Part) -> EditForm:
    headers = Headers({"content-type": f"multipart/form-data; boundary={BOUNDARY}"})
    return await read_form(headers, body_of([*parts]), picture, now)


async def json_form(**values: Any) -> EditForm:
    body = json.dumps(values).encode()
    return await read_form(Headers({"content-type": "application/json"}), body, picture, now)


async def test_openais_fields_and_ours_are_read():
    form = await form_of(
        PICTURE,
        ("mask", b"mask"),
        ("prompt", "a star"),
        ("n", "2"),
        ("seed", "7"),
        ("num_inference_steps", "4"),
        ("guidance_scale", "2.5"),
        ("negative_prompt", "7"),
        ("reproducible", "true"),
        ("output_format", "webp"),
        ("user", "somebody"),
    )
    assert (form.image, form.mask) == (PICTURE[1], b"mask")
    assert (form.fields.prompt, form.fields.n, form.fields.output_format) == ("a star", 2, "webp")
    edit_settings = parse_settings(json.dumps(form.settings).encode())
    assert (
        edit_settings.seed,
        edit_settings.num_inference_steps,
        edit_settings.guidance_scale,
    ) == (7, 4, 2.5)
    assert (edit_settings.negative_prompt, edit_settings.reproducible) == ("7", True)


async def test_brackets_behind_image_are_the_list_of_images():
    form = await form_of(("image[]", b"one"), ("prompt", ""))
    assert form.image == b"one"
    form = await form_of(("image[]", b"one"), ("image[]", b"two"), ("prompt", ""))
    assert (form.image, form.references, form.control) == (b"one", (b"two",), ())


async def test_further_pictures_are_references_or_those_of_controls():
    pictures = [("image[]", name) for name in (b"one", b"two", b"three")]
    for fields, expected in (
        ([], (b"one", (b"two", b"three"), ())),
        ([("template_id", "0" * 32)], (b"", (b"one", b"two", b"three"), ())),
        ([("controls[][name]", "a")], (b"one", (), (b"two", b"three"))),
        ([("ip_adapter[name]", "a")], (b"one", (b"two", b"three"), ())),
        (
            [("ip_adapter[name]", "a"), ("controls[][name]", "a")],
            (b"one", (b"three",), (b"two",)),
        ),
    ):
        form = await form_of(*pictures, ("prompt", ""), *fields)
        assert (form.image, form.references, form.control) == expected


async def test_a_generation_has_the_picture_of_its_ip_adapter_and_no_other():
    headers = Headers({"content-type": f"multipart/form-data; boundary={BOUNDARY}"})
    parts: list[Part] = [("prompt", "x"), ("ip_adapter[name]", "a"), ("image", b"one")]
    form = await read_form(headers, body_of(parts), picture, now, source="none")
    assert (form.image, form.references, form.kind) == (b"", (b"one",), "generate")
    more = body_of([("image", b"two"), *parts])
    with pytest.raises(InvalidRequest, match="image: is not a field of a generation"):
        await read_form(headers, more, picture, now, source="none")


async def test_json_carries_data_urls_and_nothing_is_fetched():
    url = "data:image/png;base64," + base64.b64encode(b"one").decode()
    form = await json_form(prompt="x", images=[{"image_url": url}], mask=None, n=1, seed=5)
    assert (form.image, form.mask, form.settings) == (b"one", None, {"seed": 5})
    for refused in ("http://169.254.169.254/", "https://x/y.png", "file:///etc/passwd"):
        with pytest.raises(InvalidRequest, match=r"images\[0\].image_url: is not a data URL"):
            await json_form(prompt="x", images=[{"image_url": refused}])
    with pytest.raises(InvalidRequest, match=r"images\[0\].image_url: is a data URL of another"):
        await json_form(prompt="x", images=[{"image_url": "data:,x"}])
    for wrong in ({"file_id": "file-1"}, {"image_url": 1}, {"image_url": url, "more": 1}, url, 1):
        with pytest.raises(InvalidRequest, match=r"images\[0\]: is not an object with image_url"):
            await json_form(prompt="x", images=[wrong])
    with pytest.raises(InvalidRequest, match="images: are 18"):
        await json_form(prompt="x", images=[{"image_url": url}] * 18)


async def test_a_list_of_numbers_comes_as_sdks_send_it_or_as_json():
    for parts in (
        [("expand[]", "0"), ("expand[]", "0"), ("expand[]", "64"), ("expand[]", "8")],
        [("expand", "[0, 0, 64, 8]")],
    ):
        form = await form_of(PICTURE, ("prompt", "x"), *parts)
        assert form.settings == {"expand": [0, 0, 64, 8]}


@pytest.mark.parametrize(
    ("size", "anchor", "margins"),
    [
        ("64x48", "center", [0, 0, 0, 0]),
        ("100x49", "center", [18, 0, 18, 1]),
        ("100x60", "top-left", [0, 0, 36, 12]),
        ("100x60", "bottom", [18, 12, 18, 0]),
        ("100x60", "right", [36, 6, 0, 6]),
    ],
)
def test_a_larger_size_is_what_the_picture_grows_by(size: str, anchor: str, margins: list[int]):
    assert _margins(size, (48, 64), anchor) == margins


@pytest.mark.parametrize("size", ["63x48", "64x47", "0x0", "64", "64x48x3", "-64x48", "9" * 400])
def test_a_smaller_size_or_none_is_refused(size: str):
    with pytest.raises(InvalidRequest, match=r"size: is .*accepted: auto, 64x48, or larger"):
        _margins(size, (48, 64), "center")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([("prompt", "x")], "image: is missing"),
        ([PICTURE], "prompt: is missing"),
        ([PICTURE, ("prompt", "x"), ("n", "11")], "n: 11 is out of range; accepted: 1 to 10"),
        ([PICTURE, ("prompt", "x"), ("n", "many")], "n: 'many' is not an integer"),
        ([PICTURE, ("prompt", "x"), ("n", "1.5")], "n: 1.5 is not an integer"),
        ([PICTURE, ("prompt", "x"), ("partial_images", "4")], "partial_images: 4 is out of range"),
        ([PICTURE, ("prompt", "x"), ("output_compression", "-1")], ": -1 is out of range"),
        ([PICTURE, ("prompt", "x"), ("sed", "5")], r"sed: .* \(did you mean seed\?\); .*seed"),
        ([PICTURE, ("prompt", "x"), ("steps", "5")], "did you mean num_inference_steps"),
        ([PICTURE, ("promt", "x")], "did you mean prompt"),
        ([PICTURE, ("prompt", "x"), ("Size", "auto")], "did you mean size"),
        ([PICTURE, ("prompt", "x"), ("quality", "best")], "quality: .*accepted: auto"),
        ([PICTURE, ("prompt", "x"), ("background", "white")], "background: .*opaque"),
        ([PICTURE, ("prompt", "x"), ("anchor", "middle")], "anchor: .*bottom-left"),
        ([PICTURE, ("prompt", "x"), ("response_format", "x")], "response_format: .*b64_json"),
        ([PICTURE, ("prompt", "x"), ("markup", "x")], "markup: is not a known field"),
        ([PICTURE, ("prompt", "x"), ("partial_images", "2")], "partial_images: .*without stream"),
        ([PICTURE, ("prompt", "x"), ("stream", "true"), ("n", "2")], "n: is 2 in a stream"),
        ([PICTURE, ("prompt", "x"), ("prompt", "y")], "prompt: is given twice"),
        ([("image", "text"), ("prompt", "x")], "image: is text"),
        ([PICTURE, ("prompt", "x"), ("more", b"file")], "more: is not a picture"),
        ([PICTURE, ("prompt", "x" * 32_001)], "prompt: is 32001 characters long"),
        ([("mask", b"mask"), ("prompt", "x")], "image: is missing"),
        ([PICTURE, ("prompt", "x"), *([("field", "x")] * 100)], "body: Too many fields"),
        ([PICTURE, ("prompt", "x" * 300_000)], "body: .*maximum size"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_field(parts: list[Part], message: str):
    with pytest.raises(InvalidRequest, match=message):
        await form_of(*parts)


@examples(200)
@given(
    st.binary(max_size=400),
    st.sampled_from(
        [f"multipart/form-data; boundary={BOUNDARY}", "multipart/form-data", "application/json"]
    ),
    st.booleans(),
)
async def test_any_body_is_a_form_or_is_refused(raw: bytes, kind: str, framed: bool):
    body = body_of([PICTURE, ("prompt", "x")]) if framed else b""
    with pytest.raises(InvalidRequest):
        await read_form(Headers({"content-type": kind}), raw + body[: len(raw)], picture, now)


async def test_lists_are_taken_as_sdks_send_them():
    """The values of each key together, without an index; others number them."""
    form = await form_of(
        ("image[]", b"source"),
        ("image[]", b"control"),
        ("prompt", "x"),
        ("loras[][name]", "7"),
        ("loras[][name]", "b"),
        ("loras[][scale]", "0.8"),
        ("loras[][scale]", "-1"),
        ("controls[][name]", "outline"),
        ("controls[][start]", "0.0"),
    )
    assert form.settings["loras"] == [{"name": "7", "scale": 0.8}, {"name": "b", "scale": -1}]
    assert form.settings["controls"] == [{"name": "outline", "start": 0.0}]
    assert (form.image, form.control) == (b"source", (b"control",))
    parse_settings(json.dumps(form.settings).encode())
    row_by_row = await form_of(
        PICTURE,
        ("prompt", "x"),
        ("loras[0][name]", "a"),
        ("loras[1][name]", "b"),
        ("loras[1][scale]", "0.5"),
    )
    assert row_by_row.settings["loras"] == [{"name": "a"}, {"name": "b", "scale": 0.5}]
    for wrong, error_pattern in (
        (
            [("loras[][name]", "a"), ("loras[][name]", "b"), ("loras[][scale]", "1")],
            "different keys",
        ),
        ([("loras[0][name]", "a"), ("loras[0][name]", "b")], r"loras\[0\].name: is given twice"),
        ([("loras[][name]", "a"), ("loras", "[]")], "loras: is given twice"),
        ([("lora[][name]", "a")], "lora: .*did you mean loras"),
    ):
        with pytest.raises(InvalidRequest, match=error_pattern):
            await form_of(PICTURE, ("prompt", "x"), *wrong)


def test_errors_have_the_names_of_this_api():
    for worker_text, api_text in (
        (
            "SETTINGS.output_quality: is not a setting of PNG",
            "output_compression: is not a setting of PNG",
        ),
        ("IMAGE: is 3x3 pixels, and MASK", "image: is 3x3 pixels, and mask"),
        ("CONTROL[1]: is 2x2; accepted: as IMAGE", "image[2]: is 2x2; accepted: as image"),
        ("IMAGE[1]: is empty; accepted: a picture", "image[1]: is empty; accepted: a picture"),
        ("SETTINGS.controls[0].image: but CONTROL has", "controls[0].image: but image has"),
        ("PROMPT: holds a NUL", "prompt: holds a NUL"),
        ("OP.template_id: has another form", "template_id: has another form"),
    ):
        body = error_body(
            Failure(grpc.StatusCode.INVALID_ARGUMENT, f"[INVALID_REQUEST] {worker_text}")
        )
        assert body["error"]["message"] == api_text
        assert body["error"]["param"] == api_text.partition(":")[0]


@pytest.mark.parametrize("name", ["mask", "image", "other"])
async def test_a_browsers_input_that_was_left_empty_is_none(name: str):
    """It sends a part with an empty file name and no bytes."""
    parts = body_of([PICTURE, ("prompt", "x")])
    empty = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename=""\r\n'
    body = empty.encode() + b"Content-Type: application/octet-stream\r\n\r\n\r\n" + parts
    headers = Headers({"content-type": f"multipart/form-data; boundary={BOUNDARY}"})
    form = await read_form(headers, body, picture, now)
    assert (form.image, form.mask) == (PICTURE[1], None)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("keep_result", "True", True),
        ("reproducible", "False", False),
        ("private_prompt", "TRUE", True),
        ("strength", ".5", 0.5),
        ("guidance_scale", "5.", 5.0),
        ("guidance_scale", "+3", 3.0),
        ("strength", "5e-1", 0.5),
        ("strength", " .5 ", 0.5),
        ("num_inference_steps", "20.0", 20),
        ("seed", "1e3", 1000),
        ("keep_result", "on", True),
        ("reproducible", "1", True),
        ("reproducible", "no", False),
        ("negative_prompt", "True", "True"),
        ("negative_prompt", "", ""),
    ],
)
async def test_what_python_writes_of_booleans_and_numbers_is_read(name: str, text: str, value: Any):
    form = await form_of(PICTURE, ("prompt", "x"), (name, text))
    assert form.settings == {name: value}
    parse_settings(json.dumps(form.settings).encode())


@pytest.mark.parametrize(
    ("name", "text"), [("keep_result", "maybe"), ("strength", "."), ("strength", "1.5.5")]
)
async def test_other_texts_are_refused_by_the_settings_name(name: str, text: str):
    form = await form_of(PICTURE, ("prompt", "x"), (name, text))
    with pytest.raises(InvalidRequest, match=f"SETTINGS.{name}"):
        parse_settings(json.dumps(form.settings).encode())


@pytest.mark.parametrize("blank", ["", " ", "None", "null", "undefined"])
async def test_a_field_that_was_left_blank_is_not_given(blank: str):
    """Browsers and httpx send every field of a form."""
    names = ("seed", "loras", "mask_mode", "cache", "reproducible", "model", "size", "n", "stream")
    form = await form_of(PICTURE, ("prompt", "x"), *((name, blank) for name in names))
    assert form == await form_of(PICTURE, ("prompt", "x"))
    assert (await form_of(PICTURE, ("prompt", blank))).fields.prompt == blank


@pytest.mark.parametrize("text", ["on", "True", "1", "yes"])
async def test_openais_flags_are_read_as_settings_are(text: str):
    form = await form_of(PICTURE, ("prompt", "x"), ("stream", text))
    assert form.fields.stream


CLICKS = {"points": [[10, 20, 1], [30.5, 40, 0]], "box": [1, 2, 30, 40]}


def as_sdks_send(name: str, value: Any) -> list[Part]:
    """A field of a form, as OpenAI's SDKs write one, of nested lists and objects."""
    if isinstance(value, dict):
        return [part for key, of in value.items() for part in as_sdks_send(f"{name}[{key}]", of)]
    if isinstance(value, list):
        return [part for item in value for part in as_sdks_send(f"{name}[]", item)]
    return [(name, json.dumps(value) if not isinstance(value, str) else value)]


@pytest.mark.parametrize("mask_source", [CLICKS, {"text": "a red car"}, {"box": [1, 2, 3, 4]}])
async def test_an_object_of_a_form_is_one(mask_source: dict[str, Any]):
    parts = as_sdks_send("mask_from", mask_source)
    form = await form_of(PICTURE, ("prompt", "x"), *parts)
    assert form.settings == {"mask_from": mask_source}
    written = await form_of(PICTURE, ("prompt", "x"), ("mask_from", json.dumps(mask_source)))
    assert written.settings == form.settings


async def test_lists_of_an_object_may_say_their_places():
    parts: list[Part] = [
        ("mask_from[points][1][]", "30.5"),
        ("mask_from[points][0][0]", "10"),
        ("mask_from[points][1][]", "40"),
        ("mask_from[points][0][2]", "1"),
        ("mask_from[points][0][1]", "20"),
        ("mask_from[points][1][]", "0"),
        *((f"mask_from[box][{place}]", str(value)) for place, value in enumerate(CLICKS["box"])),
    ]
    form = await form_of(PICTURE, ("prompt", "x"), *parts)
    assert form.settings == {"mask_from": CLICKS}


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([("mask_from[points][][]", "1"), ("mask_from[points][][]", "2")], "mask_from.points"),
        ([("mask_from[text]", "a"), ("mask_from[text]", "b")], "mask_from.text"),
        ([("mask_from[text]", "a"), ("mask_from", '{"text": "b"}')], "mask_from"),
        ([("mask_from[box][]", "1"), ("mask_from[box]", "[1]")], "mask_from.box"),
        ([("mask_from[box][]", "1"), ("mask_from[]", "2")], "mask_from"),
        ([("expand[]", "0"), ("expand", "0")], "expand"),
        ([("expand", "0"), ("expand[]", "0")], "expand"),
    ],
)
async def test_objects_that_contradict_themselves_are_refused(parts: list[Part], named: str):
    with pytest.raises(InvalidRequest, match=rf"\] {named}: "):
        await form_of(PICTURE, ("prompt", "x"), *parts)


def test_the_sdk_writes_objects_as_these_tests_do():
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(api_key="none")
    written = client._serialize_multipartform({"mask_from": CLICKS})
    texts_by_name: dict[str, list[str]] = {}
    for name, text in as_sdks_send("mask_from", CLICKS):
        texts_by_name.setdefault(name, []).append(str(text))
    assert written == texts_by_name
