"""OpenAI's own SDK, unmodified, before a router and a real worker."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import requests
from PIL import Image

from maskserve_benchmarks.router_site import RouterSite
from maskserve_client import Client, Templates
from maskserve_client.cli import main
from maskserve_common.errors import InvalidRequest, TemplateNotFound
from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.calls import Grpc, edit_inputs, eventually, pixels
from tests.support.draws import fresh_rng, fresh_seed
from tests.support.litellm import litellm_proxy, needs_litellm

KEYS = {"one": "key-of-one", "two": "key-of-two"}
SIDE = 64
STEPS = {"num_inference_steps": 3, "cache": "off"}


@pytest.fixture(scope="module")
def router(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterSite]:
    folder = tmp_path_factory.mktemp("openai")
    keys: Any = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for name, key in KEYS.items()
    ]
    with RouterSite([worker.grpc_url], folder, {"keys": keys}) as site:
        yield site


@pytest.fixture
def client(router: RouterSite) -> Iterator[openai.OpenAI]:
    with client_of(router, "one") as openai_client:
        yield openai_client


def client_of(router: RouterSite, name: str) -> openai.OpenAI:
    url = f"http://{router.http_url}/v1"
    return openai.OpenAI(base_url=url, api_key=KEYS[name], max_retries=0)


def alpha_mask(selected: Any) -> bytes:
    """A mask as OpenAI's API wants it: transparent where to edit."""
    alpha = np.where(selected, 0, 255).astype(np.uint8)
    grey = np.zeros_like(alpha)
    return encode(Image.fromarray(np.dstack([grey, grey, grey, alpha]), "RGBA"))


def pixels_of(answer: Any, number: int = 0) -> Any:
    raw = base64.b64decode(answer.data[number].b64_json)
    return np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"))


def cut_out() -> bytes:
    """The picture, transparent where its mask edits."""
    alpha = np.where(blob_mask(SIDE, SIDE) > 0, 0, 255).astype(np.uint8)
    return encode(np.dstack([scene(SIDE, SIDE), alpha]))


@pytest.fixture
def files() -> dict[str, Any]:
    """An image and its mask, as the SDK takes them."""
    selected = blob_mask(SIDE, SIDE) > 0
    return {
        "image": ("a.png", encode(scene(SIDE, SIDE))),
        "mask": ("m.png", alpha_mask(selected)),
        "prompt": "a red star",
    }


def test_an_edit_is_what_a_worker_itself_answers(
    client: openai.OpenAI, files: dict[str, Any], grpc: Grpc
):
    answer = client.images.edit(**files, size="64x64", extra_body={"seed": 5, **STEPS})
    inputs = edit_inputs(
        files["image"][1], files["mask"][1], prompt="a red star", seed=5, mask_mode="alpha", **STEPS
    )
    expected = pixels(grpc.edit(inputs)[0])
    assert np.array_equal(pixels_of(answer), expected)
    outside = blob_mask(SIDE, SIDE) == 0
    assert np.array_equal(expected[outside], scene(SIDE, SIDE)[outside])
    assert not np.array_equal(expected, scene(SIDE, SIDE))
    assert (answer.size, answer.output_format) == ("64x64", "png")
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens < answer.usage.input_tokens
    assert answer.model_extra is not None
    assert answer.model_extra["maskserve"][0]["seed"] == 5


@pytest.mark.parametrize("kind", ["AVIF", "GIF", "TIFF"])
def test_a_picture_of_any_format_is_edited_as_its_pixels_are(
    client: openai.OpenAI, files: dict[str, Any], kind: str
):
    source = encode(scene(SIDE, SIDE), kind)
    plain = encode(Image.open(io.BytesIO(source)).convert("RGB"))
    more = {"extra_body": {"seed": 5, **STEPS}}
    result, expected = (
        client.images.edit(**{**files, "image": (name, file)}, **more)
        for name, file in ((f"a.{kind.lower()}", source), ("a.png", plain))
    )
    assert np.array_equal(pixels_of(result), pixels_of(expected))


@pytest.mark.parametrize(("cache", "outcome"), [("off", "off"), ("own", "own"), ("require", "hit")])
def test_n_pictures_are_those_of_requests_with_seeds_one_after_the_other(
    client: openai.OpenAI, files: dict[str, Any], cache: str, outcome: str
):
    same = {"num_inference_steps": 8, "cache": cache}
    answer = client.images.edit(**files, n=3, output_format="webp", extra_body={"seed": 5, **same})
    metas = answer.model_extra["maskserve"]
    assert [(meta["seed"], meta["cache"]) for meta in metas] == [
        (5, outcome), (6, outcome), (7, outcome)
    ]  # fmt: skip
    for number in range(3):
        alone = client.images.edit(**files, extra_body={"seed": 5 + number, **same})
        off = pixels_of(answer, number).astype(int) - pixels_of(alone)
        assert np.abs(off).max() <= 1  # rows of one batch run other shapes
    assert not np.array_equal(pixels_of(answer, 0), pixels_of(answer, 1))


def test_a_compressed_picture_is_smaller(client: openai.OpenAI, files: dict[str, Any]):
    more = {"seed": 5, **STEPS}
    sizes = [
        len(
            client.images.edit(**files, output_format="jpeg", extra_body=more, **compression)
            .data[0]
            .b64_json
        )
        for compression in ({"output_compression": 5}, {"output_compression": 60}, {})
    ]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("anchor", "left", "top"), [("top-right", 32, 0), ("center", 16, 8), ("bottom", 16, 16)]
)
def test_a_larger_size_grows_the_canvas_round_its_anchor(
    client: openai.OpenAI, anchor: str, left: int, top: int
) -> None:
    picture = scene(SIDE, SIDE)
    settings = {"anchor": anchor, "seed": 5, **STEPS}
    answer = client.images.edit(
        image=("a.png", encode(picture)), prompt="a star", size="96x80", extra_body=settings
    )
    edited = pixels_of(answer)
    assert (answer.size, edited.shape) == ("96x80", (80, 96, 3))
    assert np.array_equal(edited[top : top + SIDE, left : left + SIDE], picture)
    margins = ((top, 80 - top - SIDE), (left, 96 - left - SIDE), (0, 0))
    assert not np.array_equal(edited, np.pad(picture, margins, "edge"))


@pytest.mark.parametrize("background", ["transparent", "opaque"])
def test_a_background_is_as_transparent_as_it_was_or_opaque(
    client: openai.OpenAI, background: str
) -> None:
    """Outside the mask the alpha comes back bit for bit."""
    alpha = fresh_rng().integers(0, 256, (SIDE, SIDE), np.uint8)
    outside = blob_mask(SIDE, SIDE) == 0
    answer = client.images.edit(
        image=("a.png", encode(np.dstack([scene(SIDE, SIDE), alpha]))),
        mask=("m.png", alpha_mask(~outside)),
        prompt="a star",
        background=background,
        extra_body=STEPS,
    )
    with Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))) as opened:
        if background == "opaque":
            assert opened.mode == "RGB"
        else:
            edited_alpha = np.asarray(opened)[..., 3]
            assert np.array_equal(edited_alpha, np.where(outside, alpha, 255))


def test_without_a_mask_the_images_own_alpha_is_it(client: openai.OpenAI, files: dict[str, Any]):
    cut = cut_out()
    more = {"seed": 5, **STEPS}
    answer = client.images.edit(image=("a.png", cut), prompt="a red star", extra_body=more)
    masked = client.images.edit(**{**files, "image": ("a.png", cut)}, extra_body=more)
    assert np.array_equal(pixels_of(answer), pixels_of(masked))
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.edit(image=files["image"], prompt="x")
    assert refused.value.param == "mask"
    assert "is missing" in refused.value.message


def test_a_stream_has_partial_images_and_the_picture(client: openai.OpenAI, files: dict[str, Any]):
    more = {"seed": 5, "num_inference_steps": 100, "cache": "off"}  # time for a preview to be made
    with client.images.edit(**files, stream=True, partial_images=2, extra_body=more) as events:
        received_events = list(events)
    *partial, last = received_events
    assert 1 <= len(partial) <= 2  # one that the next overtakes is dropped
    assert [event.type for event in partial] == ["image_edit.partial_image"] * len(partial)
    assert [event.partial_image_index for event in partial] == list(range(len(partial)))
    assert last.type == "image_edit.completed"
    plain = client.images.edit(**files, extra_body=more)
    assert last.b64_json == plain.data[0].b64_json
    assert last.usage.output_tokens == plain.usage.output_tokens
    with client.images.edit(**files, stream=True, extra_body=more) as events:
        assert [event.type for event in events] == ["image_edit.completed"]


async def test_the_asynchronous_sdk_gets_the_same(router: RouterSite, files: dict[str, Any]):
    url, more = f"http://{router.http_url}/v1", {"seed": 5, **STEPS}
    async with openai.AsyncOpenAI(base_url=url, api_key=KEYS["one"], max_retries=0) as client:
        answers = await asyncio.gather(
            *(client.images.edit(**files, extra_body=more) for _ in range(3))
        )
        events = await client.images.edit(**files, stream=True, extra_body=more)
        last = [event async for event in events][-1]
        named = {**files, "image": [files["image"]]}  # a list goes as image[]
        listed = await client.images.edit(**named, extra_body=more)
    assert {answer.data[0].b64_json for answer in (*answers, listed)} == {last.b64_json}


def test_what_cannot_be_done_is_refused_in_openais_form(
    client: openai.OpenAI, files: dict[str, Any]
):
    small_mask = ("m.png", alpha_mask(blob_mask(32, 32) > 0))
    opaque = ("m.png", encode(blob_mask(SIDE, SIDE)))
    rgba = np.dstack([scene(SIDE, SIDE), np.full((SIDE, SIDE), 255, np.uint8)])
    painted = ("m.png", encode(rgba))
    for changed, param, error_pattern in (
        ({"mask": small_mask}, "mask", "is 32x32"),
        ({"mask": opaque}, "mask", "has no alpha channel"),
        ({"mask": painted}, "mask", "has no transparent pixels; accepted: .*mask_mode: white"),
        ({"mask": ("m.png", b"no picture")}, "mask", ""),
        ({"n": 11}, "n", "11 is out of range; accepted: 1 to 10"),
        ({"extra_body": {"sed": 1}}, "sed", "did you mean seed"),
        ({"extra_body": {"loras": [{"name": "any"}]}}, "loras[0].name", "not served here"),
        ({"size": "64x63"}, "size", "auto, 64x64, or larger"),
        ({"quality": "best"}, "quality", "accepted: auto"),
        ({"output_compression": 50}, "output_compression", "jpeg or webp"),
        ({"extra_body": {"num_inference_steps": 0}}, "num_inference_steps", "1 to 1000"),
        ({"extra_body": {"negative_prompt": "x"}}, "negative_prompt", ""),
        ({"extra_body": {"strenght": 0.5}}, "strenght", "did you mean strength"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.images.edit(**{**files, **changed})
        assert refused.value.param == param
        assert refused.value.type == "invalid_request_error"
        assert re.search(error_pattern, refused.value.message)
        assert refused.value.request_id
    white = client.images.edit(**{**files, "mask": opaque}, extra_body={"mask_mode": "white"})
    assert white.data
    with pytest.raises(openai.NotFoundError) as unknown:
        client.images.edit(**files, model="gpt-image-2")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="negative_prompt"):
        client.images.edit(**files, stream=True, extra_body={"negative_prompt": "x"})


def test_models_are_those_that_workers_serve(client: openai.OpenAI, files: dict[str, Any]):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    assert client.images.edit(**files, model=model.id, extra_body=STEPS).data
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


def test_what_is_not_there_is_refused_in_openais_form(router: RouterSite) -> None:
    for method, path, code in (
        ("GET", "/v1/nothing", "not_found"),
        ("GET", "/v1/models/a%0Ab", "not_found"),
        ("PUT", "/v1/models", "method_not_allowed"),
    ):
        answer = requests.request(method, f"http://{router.http_url}{path}", timeout=10)
        assert answer.json()["error"]["code"] == code
        assert answer.json()["error"]["param"] is None


def test_a_wrong_key_is_told_before_the_body_is_read(router: RouterSite, files: dict[str, Any]):
    url = f"http://{router.http_url}/v1"
    with openai.OpenAI(base_url=url, api_key="no", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.images.edit(**files)
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_a_template_is_registered_edited_without_its_image_and_deleted(
    router: RouterSite, client: openai.OpenAI, files: dict[str, Any]
):
    url = f"http://{router.http_url}/v1/templates"
    owner_headers = {"authorization": f"Bearer {KEYS['one']}"}
    other_headers = {"authorization": f"Bearer {KEYS['two']}"}

    files["image"] = ("a.png", encode(scene(SIDE, SIDE, seed=9)))  # no other test's

    def call(method: str, path: str = "", headers: Any = owner_headers, **more: Any) -> Any:
        return requests.request(method, url + path, headers=headers, timeout=60, **more)

    response = call("POST", files={"image": files["image"]}, data={"prime": "false"})
    assert response.status_code == 200, response.text
    name = response.json()["id"]
    assert response.json()["state"] == "absent"
    (listed,) = call("GET").json()["data"]
    assert (listed["id"], listed["tier_bytes"]) == (name, {})
    assert call("GET", headers=other_headers).json()["data"] == []
    assert call("GET", f"/{name}", headers=other_headers).status_code == 404

    more = {"seed": 5, **STEPS}
    with_image = client.images.edit(**files, extra_body=more)
    # The SDK insists on an image; the API does not.
    form = {
        "prompt": "a red star",
        "template_id": name,
        "seed": "5",
        "num_inference_steps": "3",
        "cache": "off",
    }
    answer = call("POST", "/../images/edits", files={"mask": files["mask"]}, data=form)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["b64_json"] == with_image.data[0].b64_json
    refused = call(
        "POST", "/../images/edits", other_headers, files={"mask": files["mask"]}, data=form
    )
    assert refused.status_code == 404

    assert call("POST", f"/{name}/prime").status_code == 200
    primed = "the template's entries are there"
    eventually(primed, lambda: call("GET", f"/{name}").json()["tier_bytes"])
    assert call("POST", f"/{name}/pin").json()["pinned"] is True
    assert call("POST", f"/{name}/unpin").json()["pinned"] is False
    assert call("POST", f"/{name}/sell").status_code == 404
    assert call("DELETE", "/no-template").status_code == 400
    assert call("DELETE", f"/{name}", headers=other_headers).status_code == 404
    assert call("DELETE", f"/{name}").json()["deleted"] is True
    assert call("GET").json()["data"] == []


def test_an_edit_goes_on_with_the_result_of_another(
    router: RouterSite, client: openai.OpenAI, files: dict[str, Any]
):
    url = f"http://{router.http_url}/v1"
    owner_headers, other_headers = (
        {"authorization": f"Bearer {KEYS[name]}"} for name in ("one", "two")
    )
    files["image"] = ("a.png", encode(scene(SIDE, SIDE, seed=10)))  # no other test's

    def primed(name: str) -> bool:
        template = requests.get(f"{url}/templates/{name}", headers=owner_headers, timeout=60).json()
        return template["registered"] and sum(template["tier_bytes"].values()) > 0

    def edited(name: str, headers: Any = owner_headers) -> Any:
        """The next edit: a mask and a prompt, no picture."""
        form = {"prompt": "a blue circle", "template_id": name, "seed": "6"}
        form |= {"num_inference_steps": "3", "reproducible": "true"}
        upload = {"mask": files["mask"]}
        return requests.post(f"{url}/images/edits", headers=headers, files=upload, data=form)

    more = {"seed": 5, "num_inference_steps": 3, "keep_result": True}
    first = client.images.edit(**files, extra_body=more)
    name = first.data[0].template_id
    assert name == first.model_extra["maskserve"][0]["result_template_id"]
    eventually("the result is primed in the background", lambda: primed(name))
    answer = edited(name)
    assert answer.status_code == 200, answer.text
    meta = answer.json()["maskserve"][0]
    assert (meta["template_id"], meta["cache"]) == (name, "hit")
    assert edited(name, other_headers).status_code == 404
    assert requests.get(f"{url}/templates", headers=other_headers, timeout=60).json()["data"] == []
    listed = requests.get(f"{url}/templates/{name}", headers=owner_headers, timeout=60).json()
    assert 0 < listed["expires_s"] <= 3600

    # It is what an edit of the downloaded file is.
    assert (
        requests.delete(f"{url}/templates/{name}", headers=owner_headers, timeout=60).status_code
        == 200
    )
    assert edited(name).status_code == 404
    downloaded = {"image": ("b.png", base64.b64decode(first.data[0].b64_json))}
    second_template = requests.post(
        f"{url}/templates", headers=owner_headers, files=downloaded, timeout=60
    ).json()
    assert second_template["id"] == name
    eventually("the file is primed", lambda: primed(name))
    expected = edited(name).json()
    assert answer.json()["data"][0]["b64_json"] == expected["data"][0]["b64_json"]
    assert expected["maskserve"][0]["cache"] == "hit"
    assert (
        requests.delete(f"{url}/templates/{name}", headers=owner_headers, timeout=60).status_code
        == 200
    )

    # A stream's last event names it, too; in another format it is that file's pixels.
    with client.images.edit(
        **files, stream=True, output_format="jpeg", extra_body={**more, "cache": "off"}
    ) as events:
        last = list(events)[-1]
    upload = {"image": ("c.jpg", base64.b64decode(last.b64_json))}
    response = requests.post(
        f"{url}/templates", headers=owner_headers, files=upload, data={"prime": "false"}
    )
    assert response.json()["id"] == last.template_id
    requests.delete(f"{url}/templates/{last.template_id}", headers=owner_headers, timeout=60)


def test_the_client_and_the_command_line_use_the_templates_api(
    router: RouterSite, files: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    url, mask = f"http://{router.http_url}", files["mask"][1]
    owner_templates, other_templates = (Templates(url, key=KEYS[name]) for name in ("one", "two"))
    picture = encode(scene(SIDE, SIDE, seed=12))  # no other test's
    name = owner_templates.register(picture, prime=False)["id"]
    assert name in {template["id"] for template in owner_templates.list()}
    assert owner_templates.get(name)["registered"]
    for forbidden in (other_templates.get, other_templates.pin, other_templates.delete):
        with pytest.raises(TemplateNotFound):
            forbidden(name)
    settings = {"seed": 5, "mask_mode": "alpha", **STEPS}
    with Client(router.grpc_url, headers={"x-api-key": KEYS["one"]}) as client:
        by_name = client.edit(None, mask, "a star", template_id=name, **settings)
        assert by_name.encoded == client.edit(picture, mask, "a star", **settings).encoded
    assert owner_templates.pin(name)["pinned"]
    assert not owner_templates.unpin(name)["pinned"]
    assert owner_templates.delete(name)["deleted"]
    with pytest.raises(InvalidRequest, match="image"):
        owner_templates.register(b"no picture")
    with pytest.raises(InvalidRequest, match="key"):
        Templates(url, key="no").list()

    (tmp_path / "a.png").write_bytes(picture)
    for words in (("add", str(tmp_path / "a.png")), ("ls",), ("pin", name), ("rm", name)):
        assert main(["templates", *words, "--url", url, "--key", KEYS["one"]]) == 0
        assert name in capsys.readouterr().out
    assert main(["templates", "rm", name, "--url", url, "--key", KEYS["one"]]) == 2
    assert "TEMPLATE_NOT_FOUND" not in capsys.readouterr().out


@pytest.mark.parametrize("field", ["image", "image[]"])
def test_what_open_webui_sends_is_an_edit(
    router: RouterSite, client: openai.OpenAI, field: str
) -> None:
    """Open WebUI (IMAGE_EDIT_ENGINE=openai) posts a form by aiohttp: no mask, so the picture's
    own transparency is it; several pictures are `image[]`.
    """
    [model] = [model_entry.id for model_entry in client.models.list()]

    async def ask() -> dict[str, Any]:
        form = aiohttp.FormData()
        form_fields = {
            "model": model,
            "prompt": "a red star",
            "n": "1",
            "response_format": "b64_json",
        }
        for name, value in form_fields.items():
            form.add_field(name, value)
        name = f"{fresh_seed()}.png"
        form.add_field(field, io.BytesIO(cut_out()), filename=name, content_type="image/png")
        url = f"http://{router.http_url}/v1/images/edits?api-version=2026-01-01"
        headers = {"Authorization": f"Bearer {KEYS['one']}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, headers=headers, data=form) as answer,
        ):
            answer.raise_for_status()
            return dict(await answer.json(content_type=None))

    [image_data] = asyncio.run(ask())["data"]
    assert not image_data.get("url")
    with Image.open(io.BytesIO(base64.b64decode(image_data["b64_json"]))) as opened:
        edited = np.asarray(opened.convert("RGB"))
    outside = blob_mask(SIDE, SIDE) == 0
    assert np.array_equal(edited[outside], scene(SIDE, SIDE)[outside])
    assert not np.array_equal(edited, scene(SIDE, SIDE))


@pytest.mark.slow
@needs_litellm
def test_edits_go_through_litellms_proxy(
    router: RouterSite, client: openai.OpenAI, files: dict[str, Any], tmp_path: Path
) -> None:
    [model] = [model_entry.id for model_entry in client.models.list()]
    more = {"seed": 5, **STEPS, "reproducible": True}
    more.pop("cache")  # LiteLLM has a setting of that name
    with litellm_proxy(router.http_url, model, KEYS["one"], tmp_path) as through:
        answer = through.images.edit(**files, model="edits", extra_body=more)
        with pytest.raises(openai.APIStatusError, match="mask"):
            through.images.edit(image=files["image"], prompt="x", model="edits")
    straight = client.images.edit(**files, extra_body=more)
    assert np.array_equal(pixels_of(answer), pixels_of(straight))
