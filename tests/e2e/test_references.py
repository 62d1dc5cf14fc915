"""Edits with several pictures are the pipelines', through a real Triton, by unmodified clients."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import requests
from PIL import Image
from tritonclient import grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from maskserve_benchmarks.router_site import RouterSite
from maskserve_client import Client, InvalidRequest, TemplateNotFound
from maskserve_client.cli import main
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.worker import WorkerProcess
from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit
from maskserve_workflows.passes import compiled
from maskserve_workflows.plan import dump_plan
from maskserve_workflows.run import seed_of
from tests.fakes.pictures import encode, scene
from tests.support.calls import Pixels, pixels
from tests.support.draws import fresh_rng, fresh_seed
from tests.support.one_worker import one_worker

PROMPT, STEPS, LENGTH = "a red star", 3, 48
PICTURES = [scene(64, 48), scene(48, 64), scene(64, 72)]
MASK = np.zeros((64, 48), np.uint8)
MASK[16:48, 8:32] = 255


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.fakes.tiny_families import FAMILIES

    return FAMILIES["klein"](tmp_path_factory.mktemp("references") / "klein")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[WorkerProcess]:
    """A klein of random weights."""
    config = folder.parent / "worker.toml"
    config.write_text(f"[model]\nmax_sequence_length = {LENGTH}\n")
    options = ServeOptions(
        model=str(folder), base_port=free_base_port(), log_dir=folder.parent, config=config
    )
    with one_worker(options) as worker:
        yield worker


@pytest.fixture(scope="module")
def client(served: WorkerProcess) -> Iterator[Client]:
    with Client(served.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """Pixels of diffusers' pipeline, which refuses pictures as small as these."""
    import torch
    from diffusers import Flux2KleinInpaintPipeline, Flux2KleinPipeline

    pipelines = {}
    for cls in (Flux2KleinPipeline, Flux2KleinInpaintPipeline):
        pipelines[cls] = pipeline = cls.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        if hasattr(pipeline.image_processor, "check_image_input"):
            pipeline.image_processor.check_image_input = lambda image: None

    def run(seed: int, *, masked: bool = False, **inputs: Any) -> Pixels:
        pipeline = pipelines[Flux2KleinInpaintPipeline if masked else Flux2KleinPipeline]
        [image] = pipeline(
            prompt=PROMPT,
            num_inference_steps=STEPS,
            max_sequence_length=LENGTH,
            generator=torch.Generator("cpu").manual_seed(seed),
            **inputs,
        ).images
        return np.asarray(image)

    return run


def images(count: int) -> list[Image.Image]:
    return [Image.fromarray(picture) for picture in PICTURES[:count]]


def check_same(actual: Any, expected_pixels: Pixels) -> None:
    difference = np.abs(np.asarray(actual).astype(int) - expected_pixels)
    assert difference.max() <= 1


def test_tritonclient_sends_several_pictures(served: WorkerProcess, expected: Any) -> None:
    seed = fresh_seed()
    settings = json.dumps({"seed": seed, "num_inference_steps": STEPS}).encode()
    tensors = {
        "IMAGE": list(map(encode, PICTURES)),
        "PROMPT": [PROMPT.encode()],
        "SETTINGS": [settings],
    }
    inputs = []
    for name, elements in tensors.items():
        inputs.append(triton_grpc.InferInput(name, [len(elements)], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array(elements, np.object_))
    with triton_grpc.InferenceServerClient(served.grpc_url) as triton:
        result = triton.infer("edit", inputs)
        check_same(pixels(result.as_numpy("IMAGE")[0]), expected(seed, image=images(3)))
        assert json.loads(result.as_numpy("META")[0])["kind"] == "edit"
        inputs[0] = triton_grpc.InferInput("IMAGE", [11], "BYTES")
        inputs[0].set_data_from_numpy(np.array([encode(PICTURES[0])] * 11, np.object_))
        with pytest.raises(InferenceServerException, match="IMAGE: has 11 pictures; accepted: up"):
            triton.infer("edit", inputs)


def test_openais_sdk_sends_several_pictures(
    served: WorkerProcess, expected: Any, tmp_path: Path
) -> None:
    seed = fresh_seed()
    files = [(f"{number}.png", encode(picture)) for number, picture in enumerate(PICTURES)]
    with (
        RouterSite([served.grpc_url], tmp_path) as site,
        openai.OpenAI(base_url=f"http://{site.http_url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        settings = {"seed": seed, "num_inference_steps": STEPS}
        answer = sdk.images.edit(image=files, prompt=PROMPT, extra_body=settings)
        assert answer.data is not None
        assert answer.data[0].b64_json is not None
        picture = pixels(base64.b64decode(answer.data[0].b64_json))
        check_same(picture, expected(seed, image=images(3)))
        files[2] = ("no picture", b"no picture")
        with pytest.raises(openai.BadRequestError, match=r"image\[2\]: "):
            sdk.images.edit(image=files, prompt=PROMPT, extra_body=settings)


def test_a_mask_is_of_the_first_and_the_other_is_context(client: Client, expected: Any) -> None:
    seed = fresh_seed()
    settings = {"seed": seed, "num_inference_steps": STEPS, "cache": "off", "strength": 1.0}
    source, other = images(2)
    result = client.edit(source, MASK, PROMPT, images=[other], **settings)
    picture = np.asarray(result.image)
    inputs = {"mask_image": Image.fromarray(MASK), "image_reference": other, "strength": 1.0}
    whole = expected(seed, masked=True, image=source, **inputs)
    check_same(picture[MASK > 0], whole[MASK > 0])
    np.testing.assert_array_equal(picture[MASK == 0], PICTURES[0][MASK == 0])
    alone = client.edit(source, MASK, PROMPT, **settings)
    assert not np.array_equal(np.asarray(alone.image), picture)


def test_edits_of_one_and_several_pictures_change_nothing_of_one_another(client: Client) -> None:
    seed = fresh_seed()
    settings = {"seed": seed, "num_inference_steps": 12, "reproducible": True}
    edits: list[tuple[list[Image.Image], Any]] = [
        (images(1), None),
        (images(2), None),
        (images(3), MASK),
        (images(1), MASK),
    ]

    def run(pictures: list[Image.Image], mask: Any) -> bytes:
        return client.edit(None, mask, PROMPT, images=pictures, **settings).encoded

    alone = [run(*edit) for edit in edits]
    together: dict[int, bytes] = {}
    threads = [
        threading.Thread(
            target=lambda number=number: together.update({number: run(*edits[number])})
        )
        for number in range(len(edits))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(len(edits))] == alone


def test_a_template_has_references_by_command_and_client(
    client: Client, served: WorkerProcess, tmp_path: Path
) -> None:
    template, other = client.register(PICTURES[0]), tmp_path / "other.png"
    other.write_bytes(encode(PICTURES[1]))
    settings = {"seed": 5, "num_inference_steps": STEPS}
    named = client.edit(images=[other], prompt=PROMPT, template_id=template, **settings)
    sent = client.edit(PICTURES[0], prompt=PROMPT, images=[other], **settings)
    assert named.encoded == sent.encoded
    assert sent.meta["encoded"]["template"] == "kept"
    out = tmp_path / "out.png"
    words = ["--template-id", template, "--reference", str(other), "--prompt", PROMPT]
    command = ["edit", "--url", served.grpc_url, "--out", str(out), "--seed", "5"]
    assert main([*command, *words, "--steps", str(STEPS)]) == 0
    np.testing.assert_array_equal(Image.open(out), named.image)
    with pytest.raises(InvalidRequest, match=r"IMAGE\[1\]: "):
        client.edit(PICTURES[0], prompt=PROMPT, images=[b"no picture"])


def test_references_are_named_as_a_template_is(
    client: Client, served: WorkerProcess, tmp_path: Path
) -> None:
    settings = {"seed": 5, "num_inference_steps": STEPS, "prompt": PROMPT}
    sent = client.edit(PICTURES[0], images=PICTURES[1:], **settings)
    named = [client.register(picture) for picture in PICTURES[1:]]
    for images, ids in ((PICTURES[1:2], named[1:]), ((), named)):
        result = client.edit(PICTURES[0], images=images, reference_ids=ids, **settings)
        assert result.encoded == sent.encoded
        assert result.meta["encoded"]["references"] == "kept"
    out = tmp_path / "out.png"
    with RouterSite([served.grpc_url], tmp_path) as site:
        words = ["--template-id", client.register(PICTURES[0]), "--prompt", PROMPT]
        words += [word for name in named for word in ("--reference-id", name)]
        command = ["edit", "--url", site.grpc_url, "--out", str(out), "--seed", "5"]
        assert main([*command, *words, "--steps", str(STEPS)]) == 0
        np.testing.assert_array_equal(Image.open(out), sent.image)
        url = f"http://{site.http_url}/v1/images/edits"
        files = [("image", ("a.png", encode(PICTURES[0])))]
        form = {"prompt": PROMPT, "seed": 5, "num_inference_steps": STEPS}
        answer = requests.post(
            url, data={**form, "reference_ids[]": named}, files=files, timeout=60
        )
        assert answer.status_code == 200, answer.text
        picture = pixels(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        np.testing.assert_array_equal(picture, sent.image)
    with pytest.raises(TemplateNotFound, match=r"SETTINGS\.reference_ids\[1\]: 0{16} is not regis"):
        client.edit(PICTURES[0], reference_ids=[named[0], "0" * 16], **settings)
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.reference_ids: make 11 pictures with"):
        client.edit(PICTURES[0], reference_ids=named[:1] * 10, **settings)
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.reference_ids: needs a source"):
        client.generate(PROMPT, reference_ids=named, seed=5)


def test_requests_at_once_have_a_reference_that_they_share_encoded_once(client: Client) -> None:
    rng = fresh_rng()
    style, *sources = (scene(64, 48, int(rng.integers(2**31))) for _ in range(6))

    def edit_of(source: Pixels) -> dict[str, Any]:
        result = client.edit(
            source, prompt=PROMPT, images=[style], seed=1, num_inference_steps=STEPS
        )
        return dict(result.meta["encoded"])

    with ThreadPoolExecutor(len(sources)) as pool:
        encoded = list(pool.map(edit_of, sources))
    assert [report["template"] for report in encoded] == ["made"] * len(sources)
    assert sorted(report["references"] for report in encoded) == ["kept"] * 4 + ["made"]


def test_a_workflow_has_references_and_encodes_a_shared_one_once(
    client: Client, served: WorkerProcess, tmp_path: Path
) -> None:
    with Workflow("styled") as flow:
        image, style, prompt = flow.picture("image"), flow.picture("style"), flow.text("prompt")
        first = edit(image, None, prompt, references=[style], num_inference_steps=STEPS)
        second = edit(first, None, prompt, references=[image, style], num_inference_steps=STEPS)
        flow.gives(first=first, image=second)
    (tmp_path / "styled.json").write_bytes(dump_plan(compiled(flow.plan)))
    tables: dict[str, dict[str, object]] = {"workflows": {"folder": str(tmp_path)}}
    inputs = {"image": encode(PICTURES[0]), "style": encode(PICTURES[1]), "prompt": PROMPT}
    with (
        RouterSite([served.grpc_url], tmp_path, tables) as site,
        Client(site.grpc_url) as routed,
    ):
        outputs, meta = routed.run_workflow("styled", inputs, seed=3, reproducible=True)
    reports = {report["key"]: report for report in meta["nodes"]}
    assert "encode-1" in reports
    source, images = inputs["image"], [inputs["style"]]
    for name, output in (("edit-1", "first"), ("edit-2", "image")):
        settings = {"seed": seed_of(3, name), "num_inference_steps": STEPS, "reproducible": True}
        expected_result = client.edit(source, prompt=PROMPT, images=images, **settings)
        assert outputs[output] == expected_result.encoded
        source, images = outputs["first"], [inputs["image"], inputs["style"]]
