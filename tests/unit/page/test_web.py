"""The page's treatment of masks and requests, without a browser."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.soak.pictures import png_file
from maskserve_client.events import EditResult, Event, Progress
from maskserve_common.contracts.edit_kinds import check_settings_of
from maskserve_common.contracts.request import EDIT_KINDS, EditKind
from maskserve_common.contracts.settings import EditSettings, parse_settings
from maskserve_common.contracts.status_record import Served
from maskserve_common.errors import InvalidRequest, Overloaded, TemplateNotFound
from maskserve_page.edit_inputs import (
    InputMissing,
    Painted,
    painted_of,
    references_of,
    settings_of,
    sizes_of,
)
from maskserve_page.page import WORDS
from maskserve_page.pictures import PagePictures, pictures_in
from maskserve_page.same_origin import SameOrigin
from maskserve_page.session import ServedModel, Session
from maskserve_page.texts import error_note, note, plain_warning, summary
from tests.fakes.pictures import encode

MASK = Image.new("L", (8, 8), 255)
PLAIN: tuple[Any, ...] = ("inpaint", 7, False, 0, 0, "auto", None, 0, 0, "auto", "")


@pytest.fixture
def pictures(tmp_path: Path) -> PagePictures:
    return PagePictures(tmp_path)


def painted(name: str, mask: Any) -> str:
    """The canvas's message about a mask."""
    bits = base64.b64encode(np.packbits(mask).tobytes()).decode()
    return json.dumps({"name": name, "width": 0, "height": 0, "mask": bits})


@pytest.mark.parametrize(("width", "height"), [(20, 10), (7, 3), (1, 1), (33, 65)])
def test_the_mask_is_what_was_painted_pixel_for_pixel(
    pictures: PagePictures, width: int, height: int
) -> None:
    random = np.random.default_rng(width)
    pixels = random.integers(0, 256, (height, width, 3), np.uint8)
    mask = random.random((height, width)) < 0.5
    mask[0, 0] = True
    picture = pictures.take(encode(Image.fromarray(pixels)))
    source, mask_image, expand = painted_of(painted(picture.name, mask), pictures)
    assert source is not None
    assert expand == ()
    assert np.array_equal(np.asarray(mask_image), np.where(mask, 255, 0))
    assert source.size == (height, width)
    assert np.array_equal(np.asarray(Image.open(picture.file)), pixels)


def test_what_is_missing_or_broken_is_said(pictures: PagePictures) -> None:
    name = pictures.take(encode(Image.new("RGB", (20, 10)))).name
    none = np.zeros((10, 20), bool)
    for text, error_pattern in [
        (None, "There is no picture yet"),
        ("", "There is no picture yet"),
        ("[]", "There is no picture yet"),
        ('{"name": 1}', "picture: is not here any more"),
        ('{"name": "../../etc/passwd"}', "picture: is not here any more"),
        (json.dumps({"name": name, "mask": "é"}), "There is no picture yet"),
        (json.dumps({"name": name}), "Nothing is masked yet"),
        (painted(name, none), "Nothing is masked yet"),
        (painted(name, np.ones((3, 3), bool)), "mask: is of another picture"),
        (painted(name, np.ones((30, 30), bool)), "mask: is of another picture"),
    ]:
        with pytest.raises(InvalidRequest, match=error_pattern):
            painted_of(text, pictures)


def test_an_edit_has_the_pictures_of_its_kind(pictures: PagePictures) -> None:
    picture = pictures.take(encode(Image.new("RGB", (20, 10))))
    unpainted = painted(picture.name, np.zeros((10, 20), bool))
    assert painted_of(unpainted, pictures, "edit") == Painted(picture)
    for text in (unpainted, None, ""):
        assert painted_of(text, pictures, "generate") == Painted()
    with pytest.raises(InputMissing, match="There is no picture yet"):
        painted_of(None, pictures, "edit")


def test_a_picture_that_grows_needs_no_mask(pictures: PagePictures) -> None:
    picture = pictures.take(encode(Image.new("RGB", (20, 10))))

    def grown(mask: Any, expand: Any) -> str:
        return json.dumps(json.loads(painted(picture.name, mask)) | {"expand": expand})

    none, some = np.zeros((10, 20), bool), np.ones((10, 20), bool)
    assert painted_of(grown(none, [0, 8, 0, 16]), pictures) == Painted(picture, None, (0, 8, 0, 16))
    source, mask, expand = painted_of(grown(some, [0, 8, 0, 16]), pictures)
    assert (source, expand) == (picture, (0, 8, 0, 16))
    assert mask is not None
    with pytest.raises(InputMissing, match="Nothing is masked yet"):
        painted_of(grown(none, [0, 0, 0, 0]), pictures)
    for nonsense in ("wide", [float("inf"), 0, 0, 0]):
        with pytest.raises(InputMissing, match="There is no picture yet"):
            painted_of(grown(none, nonsense), pictures)
    assert painted_of(grown(none, [0, 8, 0, 16]), pictures, "edit") == Painted(picture)


def test_results_are_listed_while_they_are_here(tmp_path: Path) -> None:
    pictures = PagePictures(tmp_path, most=2)
    names = [pictures.take(encode(Image.new("RGB", (8, side)))).name for side in (4, 5, 6)]
    assert [picture.name for picture in pictures.available(names)] == names[1:]


def test_only_an_instruction_has_further_pictures(pictures: PagePictures) -> None:
    reference = pictures.take(encode(Image.new("RGB", (20, 10))))
    names = json.dumps([reference.name])
    assert references_of(names, pictures, "edit") == [reference]
    for text in (None, "", "[]"):
        assert references_of(text, pictures, "edit") == []
    for kind in ("inpaint", "generate"):
        assert references_of(names, pictures, kind) == []
    with pytest.raises(InvalidRequest, match="picture: is not here any more"):
        references_of('["../../etc/passwd"]', pictures, "edit")
    for text in ("7", "[", "null"):
        with pytest.raises(InvalidRequest, match="further pictures: is no list of names"):
            references_of(text, pictures, "edit")


def test_a_further_picture_goes_by_the_name_of_its_template(pictures: PagePictures) -> None:
    sent: list[dict[str, Any]] = []

    class Client(ForgetfulClient):
        def edit_stream(self, image: None, mask: None, prompt: str, **settings: Any) -> Any:
            sent.append(settings)
            yield Progress(1, 2)

    client: Any = Client()
    source, *further = (pictures.take(encode(Image.new("RGB", (n, n)))) for n in (1, 2, 3))
    session = Session(client)
    list(session.events(source, None, "x", {}, further))
    templates = [session._template(picture).result() for picture in further]
    assert sent[0]["reference_ids"] == templates
    assert sent[0]["template_id"] not in templates


def test_a_photograph_is_turned_as_its_camera_says(pictures: PagePictures) -> None:
    photo = Image.new("RGB", (8, 4), (200, 30, 30))
    turned = photo.getexif()
    turned[0x0112] = 6
    file = io.BytesIO()
    photo.save(file, "JPEG", exif=turned.tobytes())
    picture = pictures.take(file.getvalue())
    assert picture.size == (8, 4), "as browsers show it and the server edits it"
    assert picture.file.read_bytes() == file.getvalue()


@pytest.mark.parametrize("raw", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + b"0" * 40])
def test_what_is_no_picture_is_refused(pictures: PagePictures, raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"picture: is .*; accepted: PNG, JPEG, WebP"):
        pictures.take(raw)


@pytest.mark.parametrize("kind", ["AVIF", "GIF", "TIFF"])
def test_what_browsers_show_is_taken(pictures: PagePictures, kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 4)).save(file, kind)
    if kind == "TIFF":
        with pytest.raises(InvalidRequest, match="is of TIFF, which browsers do not show"):
            pictures.take(file.getvalue())
    else:
        assert pictures.take(file.getvalue()).file.suffix == f".{kind.lower()}"


def test_twenty_large_pictures_take_no_memory(pictures: PagePictures) -> None:
    """Each has 49 megapixels in a file of 155 KiB: decoded they were 4.3 GB."""
    row = b"\0" + bytes(3 * 7000)
    file = png_file(7000, 7000, 8, 2, b"")
    header, end = file[:33], file[-12:]
    data = zlib.compress(row * 7000, 1)
    tracemalloc.start()
    for number in range(20):
        text = b"tEXt" + b"n\0%d" % number
        text_chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
        idat = b"IDAT" + data
        whole = struct.pack(">I", len(data)) + idat + struct.pack(">I", zlib.crc32(idat))
        assert pictures.take(header + text_chunk + whole + end).size == (7000, 7000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000
    with pytest.raises(InvalidRequest, match="picture: is 8000x8000"):
        pictures.take(png_file(8000, 8000, 8, 2, b""))


def test_pictures_go_by_their_bytes_and_their_age(tmp_path: Path) -> None:
    clock, evicted = [0.0], list[str]()
    first_file, second_file, three = (encode(Image.effect_noise((64, 64), 99)) for _ in range(3))
    most = len(second_file) + len(three)
    pictures = PagePictures(
        tmp_path, most_bytes=most, expires_s=9, on_evict=evicted.append, now=lambda: clock[0]
    )
    first, second, third = (pictures.take(file) for file in (first_file, second_file, three))
    assert first.name in evicted
    assert len(list(tmp_path.iterdir())) == 3 - len(evicted)
    clock[0] = 8.0
    pictures.get(third.name)
    clock[0] = 10.0
    pictures.tidy()
    assert second.name in evicted
    assert [path.name for path in tmp_path.iterdir()] == [third.file.name]
    clock[0] = 18.0
    with pytest.raises(InvalidRequest, match="is not here any more"):
        pictures.get(third.name)
    assert not list(tmp_path.iterdir())


def test_the_picture_that_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    pictures = PagePictures(tmp_path, most=2)
    first_picture, second_picture = (
        pictures.take(encode(Image.new("RGB", (n, n)))) for n in (1, 2)
    )
    pictures.get(first_picture.name)
    three = pictures.take(encode(Image.new("RGB", (3, 3))))
    assert [picture.file.exists() for picture in (first_picture, second_picture, three)] == [
        True,
        False,
        True,
    ]
    with pytest.raises(InvalidRequest, match="is not here any more"):
        pictures.get(second_picture.name)


def test_settings_are_those_that_the_server_takes() -> None:
    page_settings = settings_of(
        "inpaint", 7, False, 12, 3.5, "64x64", 0.5, 2, 1, "require", "hollow:0.8, other"
    )
    assert page_settings["loras"] == [{"name": "hollow", "scale": 0.8}, {"name": "other"}]
    for settings in (
        page_settings,
        settings_of(*PLAIN),
        settings_of("inpaint", None, True, None, None, None, None, 0, 0, "off", None),
    ):
        parse_settings(json.dumps(settings).encode())
    for kind in EDIT_KINDS:
        more = 12, 3.5, "96 × 64", 0.5, 2, 1, "require", ""
        settings = settings_of(kind, 7, False, *more)
        check_settings_of(parse_settings(json.dumps(settings).encode()), kind)
    assert "num_inference_steps" not in settings_of(*PLAIN)
    with pytest.raises(InvalidRequest, match="LoRAs: 'x' is not a number"):
        settings_of(*PLAIN[:-1], "hollow:x")


def test_sizes_are_of_the_models_area_and_on_its_grid() -> None:
    for native in (128, 512, 768, 1024, 1328):
        sizes = [EditSettings(size=size).answer_size for _, size in sizes_of(native)]
        assert sizes[0] is None
        for height, width in filter(None, sizes):
            assert 0.7 * native**2 < height * width <= native**2
            assert height % 16 == width % 16 == 0


def test_a_folder_of_pictures_that_is_not_there_is_told(tmp_path: Any) -> None:
    assert pictures_in(None) == []
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.png").touch()
    (tmp_path / "elsewhere.png").symlink_to("/etc/passwd")
    (tmp_path / "folder.png").mkdir()
    assert [path.name for path in pictures_in(str(tmp_path))] == ["b.png"]
    with pytest.raises(InvalidRequest, match="--images"):
        pictures_in(str(tmp_path / "none"))


class ForgetfulClient:
    """A client that has lost its templates once."""

    def __init__(self, *template_ids: str) -> None:
        self.registered, self.cancelled, self.sent = 0, list[str](), list[str]()
        self.template_ids, self.evicted = list(template_ids), list[str]()
        self.silent = False

    def control(self, op: str, **fields: Any) -> dict[str, Any]:
        if op == "evict":
            self.evicted.append(fields["template_id"])
            return {}
        if op == "status" and self.silent:
            raise Overloaded("not now")
        if op == "status":
            return {"model": "demo", "workers": {"127.0.0.1:9001": {}}}
        listed = [{"template_id": name, "registered": True} for name in self.template_ids]
        return {"templates": listed}

    def register(self, _: Path) -> str:
        self.registered += 1
        return f"{self.registered:016x}"

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        raise Overloaded("not now")

    def edit_stream(self, image: None, mask: Any, prompt: str, **settings: Any) -> Iterator[Event]:
        assert image is None
        self.sent.append(settings["template_id"])
        if settings["template_id"] == f"{1:016x}" and len(self.sent) > 1:
            raise TemplateNotFound("gone")
        yield Progress(1, 2)


def test_a_picture_is_sent_once_and_again_when_the_server_has_lost_it(
    pictures: PagePictures,
) -> None:
    client: Any = ForgetfulClient()
    session, picture = Session(client), pictures.take(encode(Image.new("RGB", (8, 8))))
    session.prepare(picture)
    for _ in range(3):
        assert list(session.events(picture, MASK, "x", {})) == [Progress(1, 2)]
    assert client.registered == 2
    assert client.sent == [f"{n:016x}" for n in (1, 1, 2, 2)]
    session.stop("an-edit")  # and says nothing, as it may be done already
    assert client.cancelled == ["an-edit"]


def test_a_picture_that_could_not_be_registered_is_tried_again(pictures: PagePictures) -> None:
    client: Any = ForgetfulClient()
    register, refused = client.register, threading.Event()

    def refuse(file: Path) -> str:
        refused.set()
        raise Overloaded("not now")

    client.register = refuse
    session, picture = Session(client), pictures.take(encode(Image.new("RGB", (8, 8))))
    session.prepare(picture)
    assert refused.wait(10)
    with pytest.raises(Overloaded):
        list(session.events(picture, MASK, "x", {}))
    client.register = register
    assert list(session.events(picture, MASK, "x", {})) == [Progress(1, 2)]


def test_to_go_on_with_a_result_sends_no_picture(pictures: PagePictures) -> None:
    client: Any = ForgetfulClient()
    session = Session(client)
    result = EditResult(
        Image.new("RGB", (8, 8), (1, 2, 3)), b"", {"result_template_id": f"{1:016x}"}
    )
    picture = pictures.take(encode(result.image))
    session.remember(picture, result)
    session.remember(
        pictures.take(encode(Image.new("RGB", (9, 9)))), EditResult(result.image, b"", {})
    )
    assert list(session.events(picture, MASK, "x", {})) == [Progress(1, 2)]
    assert client.registered == 0
    assert client.sent == [f"{1:016x}"]


def test_what_the_cache_saved_is_said() -> None:
    meta = {
        "steps": 10, "seed": 3, "worker": "w", "cache": "hit", "computed_tokens": 100,
        "total_tokens": 100, "timings_ms": {"denoise": 900.0, "decode": 100.0},
    }  # fmt: skip
    summary_html = summary(meta)
    assert "<strong>1.00 s</strong>, 10 steps, seed 3" in summary_html
    assert "<details><summary>Times</summary>" in summary_html
    assert "<script>" not in summary({**meta, "worker": "<script>"})
    assert "The edit took 10% of the work of a whole picture" in summary_html
    assert "<td>denoise</td><td>900 ms</td>" in summary_html


def test_the_demo_model_knows_the_words_that_are_shown() -> None:
    for words in WORDS["demo"]:
        _, colour, shape = words.split()
        assert colour in COLOURS
        assert shape in SHAPES


def test_the_model_is_known_or_not() -> None:
    client: Any = ForgetfulClient()
    assert Session(client).model() == ServedModel("demo")
    assert Session(client).ready()
    client.silent = True
    assert Session(client).model() == ServedModel()
    assert not Session(client).ready()


def test_the_kinds_are_those_of_all_workers() -> None:
    def record(references: bool, *kinds: EditKind) -> dict[str, Any]:
        return msgspec.to_builtins(
            {"served": Served(512, 16, 28, edit_kinds=kinds, references=references)}
        )

    fill, base = record(False, "inpaint"), record(False, "edit", "inpaint")
    kontext = record(True, "edit")

    class Asked:
        def __init__(self, status: dict[str, Any]) -> None:
            self.control = lambda op: {"model": "a", **status}

    for status, kinds, references in (
        (fill, ("inpaint",), True),
        (base, ("inpaint", "edit"), False),
        ({"workers": {"1": fill, "2": kontext, "3": {}}}, ("inpaint", "edit"), True),
        ({"workers": {"1": base, "2": kontext}}, ("inpaint", "edit"), False),
    ):
        client: Any = Asked(status)
        assert Session(client).model() == ServedModel("a", kinds, 512, references)


def test_a_picture_without_a_source_is_requested_without_a_template() -> None:
    class Client:
        def edit_stream(self, image: None, mask: None, prompt: str, **settings: Any) -> Any:
            assert (image, mask, prompt) == (None, None, "x")
            assert settings == {"size": "auto", "keep_result": True}
            yield Progress(1, 2)

    client: Any = Client()
    assert list(Session(client).events(None, None, "x", {"size": "auto"})) == [Progress(1, 2)]


def test_what_is_yet_to_be_done_is_a_hint_and_no_failure() -> None:
    with pytest.raises(InputMissing) as hint:
        painted_of("", PagePictures(Path("nowhere")))
    assert error_note(hint.value) == (
        '<p role="status">There is no picture yet: choose, paste or drop one, or pick one.</p>'
    )
    assert "That did not work." in error_note(InvalidRequest("mask", "is of another picture"))


def test_what_the_page_registered_goes_with_its_picture(tmp_path: Path) -> None:
    client: Any = ForgetfulClient(f"{2:016x}")  # which another client has registered before
    session = Session(client)
    pictures = PagePictures(tmp_path, most=1, on_evict=session.forget)
    for n in (1, 2, 3):
        picture = pictures.take(encode(Image.new("RGB", (n, n))))
        session.prepare(picture)
        session._template(picture).result()
    session.close()
    assert client.registered == 3
    assert sorted(client.evicted) == [f"{1:016x}", f"{3:016x}"]


async def ask_app(app: Any, *chunks: bytes, path: str = "/", **headers: str) -> tuple[int, Any]:
    """An application's status and headers."""
    messages: list[Any] = []
    chunks_left = list(chunks) or [b""]

    async def receive() -> Any:
        body = chunks_left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(chunks_left)}

    async def send(message: Any) -> None:
        messages.append(message)

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": named}
    await app(scope, receive, send)
    return messages[0]["status"], dict(messages[0]["headers"])


async def test_other_origins_and_large_requests_are_refused() -> None:
    read: list[str] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        """As Gradio: every origin may read its answers."""
        while True:
            message = await receive()
            read.append(message["type"])
            if not message.get("more_body"):
                break
        headers = [
            (b"access-control-allow-origin", b"https://evil.example.com"),
            (b"access-control-allow-credentials", b"true"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    app = SameOrigin(page, 100, ["page.example.com"])
    rebound = {"host": "evil.example:7860", "origin": "http://evil.example:7860"}
    assert (await ask_app(app, **rebound))[0] == 403
    assert (await ask_app(app, host="evil.example:7860"))[0] == 403
    assert (await ask_app(app, host="127.0.0.1:7860"))[0] == 200
    page_headers = {"host": "page.example.com:7860", "origin": "http://page.example.com:7860"}
    assert await ask_app(app, **page_headers) == (200, {})
    assert await ask_app(app, host="page.example.com:7860") == (200, {})
    for foreign_origin in ("https://evil.example.com", "null", "http://page.example.com"):
        status, headers = await ask_app(app, host=page_headers["host"], origin=foreign_origin)
        assert status == 403
        assert not any(name.startswith(b"access-control") for name in headers)
    assert (await ask_app(app, path="/gradio_api/upload", **page_headers))[0] == 404
    assert (await ask_app(app, content_length="101", **page_headers))[0] == 413
    assert (await ask_app(app, content_length="-1", **page_headers))[0] == 413
    read.clear()
    await ask_app(app, b"x" * 60, b"x" * 60, b"x", **page_headers)
    assert read == ["http.request", "http.disconnect"]


@pytest.mark.parametrize(
    ("warning", "words"),
    [
        (
            "PROMPT: text_encoder_2 reads 16 tokens and not the last 5",
            "The prompt is too long: its end (5 tokens) was not read.",
        ),
        ("MASK: covers 95 % of the picture", "The mask covers 95 % of the picture."),
        ("something else", "something else"),
    ],
)
def test_warnings_are_told_without_names_of_the_server(warning: str, words: str) -> None:
    assert plain_warning(warning) == words
    assert words in note("done", [warning])


@pytest.mark.parametrize("cache", ["hit", "own", "miss", "off", "another"])
def test_the_cache_is_told_in_a_sentence(cache: str) -> None:
    meta = {"steps": 4, "seed": 1, "worker": "w", "cache": cache}
    assert "Cache:" not in summary(meta)
    assert f"{cache}." not in summary(meta)
