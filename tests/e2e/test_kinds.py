"""Edits without a mask and pictures without a source are the pipelines', through a real Triton."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import requests
from PIL import Image

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_EDIT
from maskserve_benchmarks.router_site import RouterSite
from maskserve_client import (
    Cancelled,
    Client,
    DeadlineExceeded,
    Final,
    InvalidRequest,
    Preview,
    Progress,
)
from maskserve_client.cli import main
from maskserve_common.contracts.request import EDIT_KINDS
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.worker import WorkerProcess
from maskserve_studies.demo_model.reference_edits import named_edits
from maskserve_workflows.definition import Workflow, each
from maskserve_workflows.folder import read_plans
from maskserve_workflows.nodes import edit, generate
from maskserve_workflows.passes import PASSES, compiled
from maskserve_workflows.plan import NodeCall, WorkflowPlan, dump_plan
from maskserve_workflows.ports import Picture
from maskserve_workflows.run import seed_of
from tests.fakes.pictures import encode, scene
from tests.support.calls import Grpc, Http, InferenceServerException, Pixels, edit_inputs, pixels
from tests.support.draws import fresh_rng, fresh_seed
from tests.support.eventually import eventually
from tests.support.litellm import litellm_proxy, needs_litellm
from tests.support.node_pack import load_node_pack
from tests.support.one_worker import one_worker
from tests.support.workflows import interpret

WORKFLOWS = CHECKOUT / "assets" / "workflows"
PROMPT = "a red star"
STEPS, LENGTH = 4, 32
SOURCE_SIZE = (100, 72)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """The demo edit model, which has every kind."""
    folder = tmp_path_factory.mktemp("kinds")
    options = ServeOptions(model=str(DEMO_EDIT), base_port=free_base_port(), log_dir=folder)
    with one_worker(options) as worker:
        yield worker


@pytest.fixture(scope="module")
def client(served: WorkerProcess) -> Iterator[Client]:
    with Client(served.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def plans() -> list[WorkflowPlan]:
    """The workflow `scene` of the assets, and random ones of edits of all kinds."""
    [scene_plan] = [plan for plan in read_plans(WORKFLOWS) if plan.name == "scene"]
    return [scene_plan, *(drawn_plan(f"drawn-{number}") for number in range(3))]


def drawn_plan(name: str) -> WorkflowPlan:
    """Edits of all kinds in a random order, some in a loop. All pictures have one size."""
    rng = fresh_rng()
    with Workflow(name) as flow:
        pictures, mask = [flow.picture("image")], flow.mask("mask")
        texts = [flow.text("prompt"), "a blue circle"]

        def picked(values: list[Any]) -> Any:
            return values[rng.integers(len(values))]

        def call(picture: Picture) -> Picture:
            prompt, kind = picked(texts), picked([*EDIT_KINDS])
            if kind == "generate":
                return generate(prompt)
            return edit(picture, mask if kind == "inpaint" else None, prompt)

        for _ in range(3):
            pictures.append(call(picked(pictures)))
        with each(2, carry=picked(pictures)) as one:
            one.carried = call(one.picture)
        pictures.append(call(one.carried))
        flow.gives(image=pictures[-1], other=picked(pictures))
    return compiled(flow.plan, set(PASSES) - {"prime"})


@pytest.fixture(scope="module")
def site(
    served: WorkerProcess, plans: list[WorkflowPlan], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterSite]:
    """A router with workflows."""
    folder = tmp_path_factory.mktemp("router")
    for plan in plans:
        (folder / f"{plan.name}.json").write_bytes(dump_plan(plan))
    tables: dict[str, dict[str, object]] = {
        "openai": {"aliases": {"gpt-image-1": "demo-edit"}},
        "workflows": {"folder": str(folder)},
    }
    with RouterSite([served.grpc_url], folder, tables) as site:
        yield site


@pytest.fixture(scope="module")
def sdk(site: RouterSite) -> Iterator[openai.OpenAI]:
    """OpenAI's SDK before a router."""
    url = f"http://{site.http_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def pipeline() -> Any:
    from diffusers import Flux2KleinPipeline

    pipeline = Flux2KleinPipeline.from_pretrained(DEMO_EDIT)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def expected(pipeline: Any, seed: int, **options: Any) -> Pixels:
    import torch

    [image] = pipeline(
        prompt=PROMPT,
        num_inference_steps=STEPS,
        max_sequence_length=LENGTH,
        generator=torch.Generator("cpu").manual_seed(seed),
        **options,
    ).images
    return np.asarray(image)


def check_same(actual: Image.Image, expected_pixels: Pixels) -> None:
    assert actual.mode == "RGB"
    difference = np.abs(np.asarray(actual).astype(int) - expected_pixels)
    assert difference.max() <= 1


def test_a_picture_without_a_source_is_the_pipelines(client: Client, pipeline: Any) -> None:
    for size, (height, width) in (("auto", (128, 128)), ("96x64", (64, 96))):
        seed = fresh_seed()
        result = client.generate(PROMPT, size, seed=seed, num_inference_steps=STEPS)
        check_same(result.image, expected(pipeline, seed, height=height, width=width))
        assert (result.meta["kind"], result.meta["template_id"]) == ("generate", None)
        assert result.meta["steps"] == STEPS


def test_an_edit_without_a_mask_is_the_pipelines(client: Client, pipeline: Any) -> None:
    source, seed = Image.fromarray(scene(*SOURCE_SIZE)), fresh_seed()
    expected_pixels = expected(pipeline, seed, image=source)
    for _ in range(2):  # the second time from kept moments
        result = client.edit(source, prompt=PROMPT, seed=seed, num_inference_steps=STEPS)
        check_same(result.image, expected_pixels)
        assert result.meta["kind"] == "edit"
    assert result.meta["encoded"]["template"] == "kept"


def test_an_edit_finds_its_region_and_is_near_the_dense_one(client: Client) -> None:
    """The prompt names one object of the picture."""
    [named] = named_edits(1)
    settings = {"seed": fresh_seed(), "num_inference_steps": 20}
    dense, narrowed = (
        client.edit(named.source, prompt=named.prompt, region=region, **settings)
        for region in ("off", "auto")
    )
    difference = np.asarray(narrowed.image, float) - np.asarray(dense.image, float)
    assert 10 * np.log10(255**2 / np.mean(difference**2)) > 30
    assert 0 < narrowed.meta["region"]["share"] < 0.5
    assert narrowed.meta["computed_tokens"] < dense.meta["computed_tokens"]
    assert "region" not in dense.meta


def test_both_run_beside_masked_edits_and_give_the_same_pictures(client: Client) -> None:
    source, seed = scene(128, 128), fresh_seed()
    mask = np.zeros((128, 128), np.uint8)
    mask[32:64, 32:64] = 255
    settings = {"seed": seed, "num_inference_steps": 20, "cache": "off", "reproducible": True}
    edits: list[tuple[Any, ...]] = [(source, mask), (source, None), (None, None)]
    alone = [client.edit(*edit, PROMPT, **settings).encoded for edit in edits]
    together: dict[int, bytes] = {}

    def run(number: int) -> None:
        together[number] = client.edit(*edits[number], PROMPT, **settings).encoded

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(edits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(len(edits))] == alone


@pytest.mark.parametrize("image", [None, scene(*SOURCE_SIZE)], ids=["generate", "edit"])
def test_a_stream_has_progress_and_previews_of_the_answers_size(
    client: Client, image: Pixels | None
) -> None:
    settings = {"num_inference_steps": 8, "preview_every": 2, "size": "96x64"}
    events = list(client.edit_stream(image, prompt=PROMPT, **settings))
    assert isinstance(events[-1], Final)
    assert events[-1].result.image.size == (96, 64)
    assert any(isinstance(event, Progress) for event in events)
    for event in events:
        if isinstance(event, Preview):
            assert event.image.size == (96, 64)


def test_a_kept_picture_is_the_next_edits_source(client: Client) -> None:
    picture = client.generate(PROMPT, "96x64", num_inference_steps=STEPS, keep_result=True)
    name = picture.result_template_id
    assert name is not None
    edited = client.edit(None, prompt="a blue circle", num_inference_steps=STEPS, template_id=name)
    assert (edited.meta["kind"], edited.meta["template_id"]) == ("edit", name)
    assert edited.image.size == (96, 64)


def test_a_picture_is_cancelled_and_has_a_deadline(client: Client) -> None:
    long = {"num_inference_steps": 200}
    events = client.edit_stream(None, prompt=PROMPT, request_id="mine", **long)
    next(events)
    assert client.cancel("mine")
    with pytest.raises(Cancelled):
        list(events)
    with pytest.raises(DeadlineExceeded):
        client.generate(PROMPT, deadline_ms=1, **long)


def test_the_command_makes_a_picture(served: WorkerProcess, tmp_path: Any) -> None:
    out = tmp_path / "made.png"
    words = ["--prompt", PROMPT, "--size", "96x64", "--steps", "4", "--out", str(out)]
    assert main(["generate", "--url", served.grpc_url, *words]) == 0
    assert Image.open(out).size == (96, 64)


def test_a_job_makes_a_picture(client: Client, site: RouterSite, tmp_path: Path) -> None:
    words = ["--prompt", PROMPT, "--size", "96x64", "--steps", str(STEPS), "--seed", "5"]
    out, url = tmp_path / "made.png", ["--url", site.http_url]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["jobs", "add", *url, *words]) == 0
        name = printed.getvalue().strip()
        assert main(["jobs", "get", name, *url, "--wait", "--out", str(out)]) == 0
    expected_result = client.generate(PROMPT, "96x64", seed=5, num_inference_steps=STEPS)
    assert np.array_equal(Image.open(out), expected_result.image)


def test_comfyuis_nodes_give_the_same_pictures(served: WorkerProcess, client: Client) -> None:
    import torch

    pack = load_node_pack(CHECKOUT / "clients" / "comfyui")
    settings = {"num_inference_steps": STEPS, "seed": 5, "reproducible": True}
    shared = {"prompt": PROMPT, "url": served.grpc_url, "settings": json.dumps(settings), "key": ""}
    source = scene(*SOURCE_SIZE)
    further = [scene(*SOURCE_SIZE, seed) for seed in (1, 2)]
    image, one, two = (
        torch.from_numpy(np.stack(batch).astype(np.float32) / 255)
        for batch in ([source], further[:1], further)
    )
    several = client.edit(source, None, PROMPT, images=[further[0], *further], **settings)
    calls: list[tuple[str, dict[str, Any], list[Any]]] = [
        ("MaskserveEdit", {"image": image}, [client.edit(source, None, PROMPT, **settings)]),
        ("MaskserveEdit", {"image": image, "references": one, "references_2": two}, [several]),
        (
            "MaskserveGenerate",
            {"size": "96x64", "pictures": 2},
            [client.generate(PROMPT, "96x64", **{**settings, "seed": 5 + n}) for n in range(2)],
        ),
    ]
    for name, inputs, expected_results in calls:
        node = pack.NODE_CLASS_MAPPINGS[name]
        input_types = {**node.INPUT_TYPES()["required"], **node.INPUT_TYPES()["optional"]}
        node_inputs = {**shared, **inputs, "seed": 5}
        left_out = {"mask", "loras", "references", "references_2", "references_3"}
        assert node_inputs.keys() | left_out == input_types.keys() | left_out
        (images,) = getattr(node(), node.FUNCTION)(**node_inputs)
        assert node.RETURN_TYPES == ("IMAGE",)
        levels = (images * 255).round().to(torch.uint8).numpy()
        assert np.array_equal(levels, np.stack([result.image for result in expected_results]))
    node_names = {"MaskserveLora", *(name for name, _, _ in calls)}
    assert pack.NODE_DISPLAY_NAME_MAPPINGS.keys() == pack.NODE_CLASS_MAPPINGS.keys() == node_names


def test_pictures_may_be_left_out_of_a_request(served: WorkerProcess) -> None:
    """Plain clients need not send empty tensors."""
    settings = json.dumps({"size": "96x64", "num_inference_steps": 2})
    with closing(Http(served.http_url)) as http:
        image, meta = http.edit({"PROMPT": PROMPT.encode(), "SETTINGS": settings.encode()})
    assert pixels(image).shape == (64, 96, 3)
    assert meta["kind"] == "generate"


def picture_of(encoded: str | None) -> Pixels:
    assert encoded is not None
    return pixels(base64.b64decode(encoded))


def test_openais_sdk_gets_the_same_pictures(client: Client, sdk: openai.OpenAI) -> None:
    settings = {"seed": fresh_seed(), "num_inference_steps": STEPS, "reproducible": True}
    answer = sdk.images.generate(
        prompt=PROMPT, model="gpt-image-1", size="96x64", n=2, extra_body=settings
    )
    assert answer.data is not None
    for number, image in enumerate(answer.data):
        alone = client.generate(PROMPT, "96x64", **{**settings, "seed": settings["seed"] + number})
        assert np.array_equal(picture_of(image.b64_json), np.asarray(alone.image))
    source = encode(scene(*SOURCE_SIZE))
    edited = sdk.images.edit(image=("a.png", source), prompt=PROMPT, n=2, extra_body=settings)
    assert edited.data is not None
    for number, image in enumerate(edited.data):
        alone = client.edit(
            source, prompt=PROMPT, **{**settings, "seed": settings["seed"] + number}
        )
        off = picture_of(image.b64_json).astype(int) - np.asarray(alone.image)
        assert np.abs(off).max() <= 1  # both run in one batch


def test_openais_sdk_gets_a_url_and_events(sdk: openai.OpenAI) -> None:
    settings = {"seed": 5, "num_inference_steps": 8}
    named = sdk.images.generate(prompt=PROMPT, response_format="url", extra_body=settings)
    assert named.data is not None
    assert named.data[0].url is not None
    fetched = requests.get(named.data[0].url, timeout=30)  # without a key
    assert (fetched.status_code, fetched.headers["content-type"]) == (200, "image/png")
    events = list(
        sdk.images.generate(prompt=PROMPT, stream=True, partial_images=2, extra_body=settings)
    )
    kinds = [event.type for event in events]
    assert kinds[-1] == "image_generation.completed"
    assert set(kinds[:-1]) <= {"image_generation.partial_image"}
    assert np.array_equal(picture_of(events[-1].b64_json), pixels(fetched.content))


_MORE = {"seed": "5", "num_inference_steps": str(STEPS)}
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI makes a picture": (
        "generations?api-version=2026-01-01",
        {"json": {"model": "demo-edit", "prompt": PROMPT, "n": 1, "size": "96x64",
                  "response_format": "b64_json", "seed": 5, "num_inference_steps": STEPS}},
    ),
    "Open WebUI makes one of a built-in model": (
        "generations",
        {"json": {"model": "gpt-image-1", "prompt": PROMPT, "n": 1, "size": "96x64",
                  "seed": 5, "num_inference_steps": STEPS}},
    ),
    "Open WebUI edits one": (
        "edits",
        {"data": {"model": "demo-edit", "prompt": PROMPT, "n": "1",
                  "response_format": "b64_json", **_MORE}, "field": "image"},
    ),
    "LiteLLM makes one": (
        "generations",
        {"json": {"model": "demo-edit", "prompt": PROMPT, "n": 1, "size": "96x64",
                  "seed": 5, "num_inference_steps": STEPS}},
    ),
    "LiteLLM edits one": (
        "edits",
        {"data": {"model": "demo-edit", **_MORE, "prompt": PROMPT}, "field": "image[]"},
    ),
}  # fmt: skip
"""Path and body of requests as these programs send them, with settings as they take them:
IMAGES_OPENAI_API_PARAMS, `extra_body`."""


@pytest.mark.parametrize("name", SENT)
def test_what_other_programs_send_gives_the_clients_picture(
    client: Client, site: RouterSite, name: str
) -> None:
    path, body = SENT[name]
    settings = {"seed": 5, "num_inference_steps": STEPS}
    source = encode(scene(*SOURCE_SIZE))
    if "data" in body:
        body = {"data": body["data"], "files": {body["field"]: ("image.png", source, "image/png")}}
        expected_result = client.edit(source, prompt=PROMPT, **settings)
    else:
        expected_result = client.generate(PROMPT, "96x64", **settings)
    answer = requests.post(f"http://{site.http_url}/v1/images/{path}", **body, timeout=60)
    answer.raise_for_status()
    [image] = answer.json()["data"]
    assert not image.get("url")
    assert np.array_equal(picture_of(image["b64_json"]), np.asarray(expected_result.image))


@pytest.mark.slow
@needs_litellm
def test_pictures_go_through_litellms_proxy(
    sdk: openai.OpenAI, site: RouterSite, tmp_path: Path
) -> None:
    settings = {"seed": 5, "num_inference_steps": STEPS, "reproducible": True}
    more: dict[str, Any] = {"extra_body": settings}
    source = ("a.png", encode(scene(*SOURCE_SIZE)))

    def pictures(through: openai.OpenAI, model: str) -> list[Pixels]:
        generated = through.images.generate(prompt=PROMPT, model=model, size="96x64", n=2, **more)
        edited = through.images.edit(image=source, prompt=PROMPT, model=model, **more)
        return [
            picture_of(image.b64_json) for image in (*(generated.data or ()), *(edited.data or ()))
        ]

    with litellm_proxy(site.http_url, "demo-edit", "none", tmp_path) as through:
        gained, straight = pictures(through, "edits"), pictures(sdk, "demo-edit")
    for picture, expected_picture in zip(gained, straight, strict=True):
        assert np.array_equal(picture, expected_picture)


def test_workflows_of_all_kinds_give_the_pictures_of_an_interpreter(
    client: Client, site: RouterSite, plans: list[WorkflowPlan]
) -> None:
    mask = np.zeros((128, 128), np.uint8)
    mask[32:64, 32:64] = 255
    texts = {"prompt": PROMPT, "change": "a blue circle"}
    values = {"image": encode(scene(128, 128)), "mask": encode(mask), **texts}
    settings = {"num_inference_steps": 2, "reproducible": True}
    with Client(site.grpc_url) as router:
        for plan in plans:
            seed = fresh_seed()

            def node(key: str, call: NodeCall, inputs: Mapping[str, Any]) -> dict[str, Any]:
                seeds = {"seed": seed_of(seed, key)}  # noqa: B023  it is called before the next
                pictures = [inputs.get(name) for name in ("image", "mask")]
                return {
                    "picture": client.edit(*pictures, inputs["prompt"], **settings, **seeds).encoded
                }

            inputs = {plan_input.name: values[plan_input.name] for plan_input in plan.inputs}
            outputs, meta = router.run_workflow(plan.name, inputs, **settings, seed=seed)
            assert outputs == interpret(plan, inputs, node)
            assert all(report["seconds"] > 0 for report in meta["nodes"])


def test_a_workflow_may_begin_with_a_generation(sdk: openai.OpenAI) -> None:
    """Through OpenAI's endpoint for these: it takes a size, and gives all pictures."""
    answer = sdk.images.generate(
        prompt=PROMPT, model="scene", size="96x64",
        extra_body={"change": "a blue circle", "num_inference_steps": 2},
    )  # fmt: skip
    assert answer.data is not None
    assert picture_of(answer.data[0].b64_json).shape == (64, 96, 3)
    assert answer.model_extra is not None
    (meta,) = answer.model_extra["maskserve"]
    assert picture_of(meta["outputs"]["made"]).shape == (64, 96, 3)
    assert [report["node"] for report in meta["nodes"]] == ["generate", "edit"]


REFUSED: dict[str, tuple[dict[str, bytes | None], dict[str, Any], str]] = {
    "no mask": ({"MASK": None}, {}, "MASK: is missing: this model repaints masks only"),
    "empty mask": ({"MASK": b""}, {}, "MASK: is missing: this model repaints masks only"),
    "no picture": ({"IMAGE": None, "MASK": None}, {}, "IMAGE: is missing: this model repaints"),
    "no source": ({"IMAGE": b""}, {}, "IMAGE: is missing, and MASK needs a source"),
    "a size": ({}, {"size": "64x64"}, "SETTINGS.size: has no effect with MASK"),
    "no size": ({}, {"size": "64 by 64"}, "SETTINGS.size: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_repaints_masks_says_so(grpc: Grpc, name: str) -> None:
    changed, settings, message = REFUSED[name]
    plain = edit_inputs(scene(64, 64), np.full((64, 64), 255, np.uint8), **settings)
    inputs = {tensor: raw for tensor, raw in {**plain, **changed}.items() if raw is not None}
    with pytest.raises(InferenceServerException) as error:
        grpc.edit(inputs)
    assert f"[INVALID_REQUEST] {message}" in error.value.message()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "100x64"}, "SETTINGS.size: is 100x64, off the model's grid"),
        ({"size": "256x256"}, "SETTINGS.size: is 256x256 = 65536 pixels; accepted: up to 16384"),
        ({"strength": 0.5}, "SETTINGS.strength: has no effect without IMAGE"),
        ({"region": "auto"}, "SETTINGS.region: has an effect only with IMAGE"),
        ({"mask_feather": 3}, "SETTINGS.mask_feather: has no effect without MASK"),
        ({"expand": [8, 0, 0, 0]}, "IMAGE: is missing, and SETTINGS.expand needs a source"),
    ],
)
def test_what_a_picture_without_a_source_cannot_have_is_refused(
    client: Client, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        client.edit(None, prompt=PROMPT, **settings)
    assert message in str(error.value)


def posted(site: RouterSite, path: str, **fields: Any) -> dict[str, Any]:
    """OpenAI's error for a request, or the end of a job."""
    url = f"http://{site.http_url}/v1/{path}"
    body = requests.post(url, json={"prompt": PROMPT, **fields}, timeout=60).json()
    if "id" in body:
        ended = ("failed", "succeeded")
        eventually("it ends", lambda: requests.get(f"{url}/{body['id']}").json()["status"] in ended)
        body = requests.get(f"{url}/{body['id']}", timeout=60).json()
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("100x64", "size: is 100x64, off the model's grid; accepted: multiples of 8 pixels; the "
         "nearest size is 96x64"),
        ("256x256", "size: is 256x256 = 65536 pixels; accepted: up to 16384 pixels"),
    ],
)  # fmt: skip
def test_a_size_is_refused_by_its_name_at_every_door(
    site: RouterSite, size: str, message: str
) -> None:
    texts = {"prompt": PROMPT, "change": "a blue circle"}
    with Client(site.grpc_url) as router:
        with pytest.raises(InvalidRequest) as error:
            router.generate(PROMPT, size)
        assert f"SETTINGS.{message}" in str(error.value)
        with pytest.raises(InvalidRequest) as error:
            router.run_workflow("scene", texts, size=size)
        assert f"generate-1: SETTINGS.{message}" in str(error.value)
    for path in ("images/generations", "jobs"):
        refused = posted(site, path, size=size)
        assert refused["message"].startswith(message)
        assert refused["param"] == "size"


def test_a_mask_without_a_source_is_refused_at_every_door(site: RouterSite) -> None:
    mask = encode(np.full((64, 64), 255, np.uint8))
    with Client(site.grpc_url) as router, pytest.raises(InvalidRequest) as error:
        router.edit(None, mask, PROMPT)
    assert "IMAGE: is missing, and MASK needs a source" in str(error.value)
    url = f"data:image/png;base64,{base64.b64encode(mask).decode()}"
    for path in ("images/edits", "jobs"):
        refused = posted(site, path, mask={"image_url": url})
        assert (refused["param"], "image: is missing" in refused["message"]) == ("image", True)


def test_an_empty_prompt_is_a_prompt_and_none_is_named(client: Client, site: RouterSite) -> None:
    """No served pipeline needs words."""
    url = f"http://{site.http_url}/v1/images/generations"
    settings = {"seed": 5, "num_inference_steps": 2}
    answer = requests.post(url, json={"prompt": "", "size": "96x64", **settings}, timeout=60).json()
    [image] = answer["data"]
    alone = client.generate("", "96x64", **settings)
    assert np.array_equal(picture_of(image["b64_json"]), np.asarray(alone.image))
    refused = requests.post(url, json=settings, timeout=60).json()["error"]
    assert (refused["param"], refused["message"].partition(";")[0]) == (
        "prompt",
        "prompt: is missing",
    )
