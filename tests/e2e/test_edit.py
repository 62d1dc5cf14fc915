"""Edits through a real Triton."""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from safetensors.numpy import load
from tritonclient.utils import np_to_triton_dtype

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.contracts.meta import STAGES, TIMINGS
from maskserve_common.contracts.settings import EditSettings
from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import blob_mask, scene
from tests.support.calls import (
    Grpc,
    Http,
    InferenceServerException,
    edit_inputs,
    pixels,
    plain_edit,
    stream,
    tensors,
)
from tests.support.draws import fresh_rng
from tests.support.node_pack import load_node_pack

FINAL_KEYS = {
    "event", "step", "steps", "request_id", "seed", "worker", "model", "template_id",
    "mask_ratio", "mask_ring", "active_tokens", "total_tokens", "computed_tokens", "cache",
    "timings_ms", "batch_mean", "steps_skipped",
}  # fmt: skip


def test_http_and_grpc_give_the_same_picture(http: Http, grpc: Grpc) -> None:
    inputs = plain_edit(seed=7, request_id="same")
    over_http, meta = http.edit(inputs)
    over_grpc, _ = grpc.edit(inputs)
    assert over_http == over_grpc
    source, mask = scene(64, 64), blob_mask(64, 64)
    edited = pixels(over_http)
    assert np.array_equal(edited[mask == 0], source[mask == 0])
    assert not np.array_equal(edited[mask > 0], source[mask > 0])
    assert set(meta) >= FINAL_KEYS
    assert (meta["event"], meta["seed"], meta["request_id"]) == ("final", 7, "same")
    assert (meta["step"], meta["steps"]) == (2, 2)
    assert set(meta["timings_ms"]) == set(TIMINGS)
    for stage in STAGES:
        assert meta["timings_ms"][stage] > 0, stage


def test_the_seed_that_was_drawn_gives_the_picture_again(grpc: Grpc) -> None:
    first, meta = grpc.edit(plain_edit(seed=None))
    repeat_image, _ = grpc.edit(plain_edit(seed=meta["seed"]))
    other_image, _ = grpc.edit(plain_edit(seed=None))
    assert first == repeat_image
    assert first != other_image


def test_the_prompt_reaches_the_model(grpc: Grpc) -> None:
    red, _ = grpc.edit(plain_edit())
    inputs = {**plain_edit(), "PROMPT": b"a blue square"}
    assert grpc.edit(inputs)[0] != red


def test_steps_are_predicted_where_that_is_asked_for(grpc: Grpc) -> None:
    steps = 4
    every_step, meta = grpc.edit(plain_edit(num_inference_steps=steps))
    assert (meta["steps"], meta["steps_skipped"]) == (steps, 0)
    picture, meta = grpc.edit(plain_edit(num_inference_steps=steps, step_interval=2))
    assert (meta["steps"], meta["steps_skipped"]) == (3, 1)
    assert picture != every_step


def test_a_stream_sends_progress_previews_and_the_answer(worker: WorkerProcess, grpc: Grpc) -> None:
    """If events come faster than the client takes them, it gets the newest."""
    steps, preview_interval = 200, 50
    inputs = plain_edit(num_inference_steps=steps, progress=True, preview_every=preview_interval)
    with stream(worker.grpc_url) as opened:
        opened.send(inputs)
        responses = []
        while not responses or responses[-1][1]["event"] != "final":
            responses.append(opened.next())
    events = [(meta["event"], meta["step"]) for _, meta in responses]
    assert events[-1] == ("final", steps)
    previews = [step for event, step in events if event == "preview"]
    progress = [step for event, step in events if event == "progress"]
    assert previews
    assert progress
    for event_steps, of in (
        (previews, range(preview_interval, steps, preview_interval)),
        (progress, range(1, steps)),
    ):
        assert event_steps == sorted(set(event_steps))
        assert set(event_steps) <= set(of)
    assert not set(progress) & set(previews)
    source, mask = scene(64, 64), blob_mask(64, 64)
    for image, meta in responses:
        if meta["event"] == "progress":
            assert image == b""
        else:
            assert np.array_equal(pixels(image)[mask == 0], source[mask == 0])
    assert responses[-1][0] == grpc.edit(plain_edit(num_inference_steps=steps))[0]


def test_a_stream_carries_several_edits(worker: WorkerProcess) -> None:
    """Answers come as they are done, each with its request's id."""
    names = {f"stream-{steps}": steps for steps in (1000, 1, 10)}
    with stream(worker.grpc_url) as opened:
        for name, steps in names.items():
            opened.send(plain_edit(num_inference_steps=steps, request_id=name))
        metas = [opened.next()[1] for _ in names]
    assert {meta["request_id"]: meta["steps"] for meta in metas} == names
    assert metas[-1]["request_id"] == "stream-1000"


def test_edits_run_in_one_batch(http: Http, grpc: Grpc) -> None:
    """Eight edits at once give the pictures they give alone, and share steps."""
    cases = [
        plain_edit(48 + 8 * i, 64, seed=i, num_inference_steps=20 + i, request_id=f"batch-{i}")
        for i in range(8)
    ]
    single_images = [grpc.edit(case)[0] for case in cases]
    started = threading.Barrier(len(cases))

    def run(i: int) -> tuple[bytes, dict[str, object]]:
        started.wait()
        return (http if i % 2 else grpc).edit(cases[i])

    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(run, range(len(cases))))
    for i, (image, meta) in enumerate(together):
        # Kernels at another batch shape round differently: at most a level of 255.
        difference = np.abs(pixels(image).astype(int) - pixels(single_images[i]).astype(int))
        assert difference.max() <= 1
        assert meta["steps"] == 20 + i
    assert max(meta["batch_mean"] for _, meta in together) > 2


@pytest.mark.parametrize("form", ["png", "webp", "jpeg"])
def test_output_formats(grpc: Grpc, form: str) -> None:
    image, _ = grpc.edit(plain_edit(output_format=form))
    magic = {"png": b"\x89PNG", "webp": b"RIFF", "jpeg": b"\xff\xd8"}[form]
    assert image.startswith(magic)
    if form == "webp":
        assert np.array_equal(pixels(image), pixels(grpc.edit(plain_edit())[0]))


def test_plain_json_over_http(worker: WorkerProcess, grpc: Grpc) -> None:
    """As with curl: base64 text in and, without a word about it, out; no binary extension."""
    inputs = plain_edit()
    text = {
        "IMAGE": base64.b64encode(inputs["IMAGE"]).decode(),
        "MASK": "data:image/png;base64," + base64.b64encode(inputs["MASK"]).decode(),
        "PROMPT": inputs["PROMPT"].decode(),
        "SETTINGS": inputs["SETTINGS"].decode(),
    }
    body = {
        "inputs": [
            {"name": name, "shape": [1], "datatype": "BYTES", "data": [value]}
            for name, value in text.items()
        ]
    }
    request = urllib.request.Request(
        f"{worker.http_url}/v2/models/edit/infer", data=json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        outputs = {o["name"]: o["data"][0] for o in json.load(answer)["outputs"]}
    assert base64.b64decode(outputs["IMAGE"]) == grpc.edit(plain_edit())[0]
    assert json.loads(outputs["META"])["event"] == "final"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_timeout_of_a_request_is_its_deadline(worker: WorkerProcess, protocol: str) -> None:
    module = {"grpc": triton_grpc, "http": triton_http}[protocol]
    url = {"grpc": worker.grpc_url, "http": worker.http_url.removeprefix("http://")}[protocol]
    with module.InferenceServerClient(url) as client:
        inputs = tensors(module, plain_edit(num_inference_steps=1000))
        # Said by the front or by the engine, whoever looks first.
        with pytest.raises(InferenceServerException, match=r"\[DEADLINE_EXCEEDED\]"):
            client.infer("edit", inputs, timeout=300_000)


def test_generate_stream_over_http(worker: WorkerProcess, grpc: Grpc) -> None:
    inputs = plain_edit(progress=True)
    body = {
        "IMAGE": base64.b64encode(inputs["IMAGE"]).decode(),
        "MASK": base64.b64encode(inputs["MASK"]).decode(),
        "PROMPT": inputs["PROMPT"].decode(),
        "SETTINGS": inputs["SETTINGS"].decode(),
    }
    request = urllib.request.Request(
        f"{worker.http_url}/v2/models/edit_stream/generate_stream",
        data=json.dumps(body).encode(),
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [json.loads(event["META"])["event"] for event in events] == ["progress", "final"]
    assert base64.b64decode(events[-1]["IMAGE"]) == grpc.edit(plain_edit())[0]


def test_a_registered_template_is_edited_by_its_id(grpc: Grpc) -> None:
    inputs = plain_edit()
    template = grpc.control(op="register", image=base64.b64encode(inputs["IMAGE"]).decode())
    settings = {**json.loads(inputs["SETTINGS"]), "template_id": template["template_id"]}
    by_id = {**inputs, "IMAGE": b"", "SETTINGS": json.dumps(settings).encode()}
    image, meta = grpc.edit(by_id)
    assert meta["template_id"] == template["template_id"]
    mask = blob_mask(64, 64)
    assert np.array_equal(pixels(image)[mask == 0], scene(64, 64)[mask == 0])
    listed = grpc.control(op="templates")["templates"]
    assert template["template_id"] in [t["template_id"] for t in listed if t["registered"]]
    grpc.control(op="evict", template_id=template["template_id"])


def test_control_says_how_the_worker_is(grpc: Grpc) -> None:
    status = grpc.control(op="status")
    assert status["state"] == "ready"
    assert status["alive"]
    assert status["in_flight"] == 0
    assert grpc.control(op="heartbeat")["state"] == "ready"


def test_the_encoder_takes_what_waits_together(worker: WorkerProcess) -> None:
    """Triton gives it all that came while it was busy; each still gets what it gets alone."""
    from maskserve_benchmarks.edits.direct import request_of

    rng = fresh_rng()

    def inputs(side: int, prompt: str) -> list[triton_grpc.InferInput]:
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        mask = np.full((side, side), 255, np.uint8)
        request = request_of(pixels, prompt, EditSettings(cache="off"), 1, "direct")
        return [
            _input("PIXELS", pixels[None]),
            _input("EDIT_MASK", mask[None]),
            _input("REFERENCES", np.zeros((1, 0), np.uint8)),
            _input("CONTROLS", np.zeros((1, 0, 0, 0, 3), np.uint8)),
            _input("REQUEST", np.array([[request.to_json()]], np.object_)),
        ]

    def arrays(result: triton_grpc.InferResult) -> dict[str, np.ndarray]:
        return dict(load(result.as_numpy("CONDITIONING")[0].tobytes()))

    answers: dict[int, Any] = {}
    completions = threading.Semaphore(0)

    def keep(number: int, result: triton_grpc.InferResult | None, error: Exception | None) -> None:
        answers[number] = error or result
        completions.release()

    tensor_sets = [inputs(320, "a large one")] + [inputs(64, f"{n} red stars") for n in range(5)]
    with closing(triton_grpc.InferenceServerClient(worker.grpc_url)) as client:
        for number, tensors in enumerate(tensor_sets):
            client.async_infer("encoder", tensors, partial(keep, number))
        for _ in tensor_sets:
            assert completions.acquire(timeout=60)
        reports = [json.loads(answers[n].as_numpy("ENCODED")[0, 0]) for n in range(1, 6)]
        assert max(report["batch"] for report in reports) > 1
        for number, tensors in list(enumerate(tensor_sets))[1:]:
            single_response = client.infer("encoder", tensors)
            np.testing.assert_array_equal(
                single_response.as_numpy("MOMENTS"), answers[number].as_numpy("MOMENTS")
            )
            single_arrays, batched_arrays = arrays(single_response), arrays(answers[number])
            for name, array in single_arrays.items():
                np.testing.assert_allclose(batched_arrays[name], array, atol=2e-5)


def _input(name: str, value: np.ndarray) -> triton_grpc.InferInput:
    infer_input = triton_grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
    infer_input.set_data_from_numpy(value)
    return infer_input


def test_a_worker_serves_no_shared_memory_repository_or_log(worker: WorkerProcess) -> None:
    """The first steps of published chains of attacks on Triton."""
    http = triton_http.InferenceServerClient(worker.http_url.removeprefix("http://"))
    grpc = triton_grpc.InferenceServerClient(worker.grpc_url)
    for client, error_text in ((http, "403"), (grpc, "UNAVAILABLE")):
        for call in (
            lambda c: c.register_system_shared_memory("x", "/x", 10),
            lambda c: c.get_system_shared_memory_status(),
            lambda c: c.get_cuda_shared_memory_status(),
            lambda c: c.unload_model("edit"),
            lambda c: c.get_model_repository_index(),
            lambda c: c.update_log_settings({"log_file": "/tmp/x"}),
        ):
            with pytest.raises(InferenceServerException) as refused:
                call(client)
            assert error_text in str(refused.value.status())
        client.close()


def test_comfyui_s_node_gives_each_picture_s_edit(worker: WorkerProcess, grpc: Grpc) -> None:
    import torch

    pack = load_node_pack(CHECKOUT / "clients" / "comfyui")
    node = pack.NODE_CLASS_MAPPINGS["MaskserveEdit"]
    input_types = {**node.INPUT_TYPES()["required"], **node.INPUT_TYPES()["optional"]}
    sources = [scene(64, 64, seed) for seed in (1, 2)]
    mask = blob_mask(64, 64)
    node_inputs = {
        "image": torch.from_numpy(np.stack(sources).astype(np.float32) / 255),
        "mask": torch.from_numpy(mask.astype(np.float32) / 255)[None],
        "prompt": "a red star",
        "seed": 5,
        "url": worker.grpc_url,
        "settings": json.dumps({"num_inference_steps": 2, "cache": "off"}),
        "key": "",
    }
    further = {name for name in input_types if name.startswith("references")} | {"loras"}
    assert node_inputs.keys() == input_types.keys() - further
    (images,) = getattr(node(), node.FUNCTION)(**node_inputs)
    assert node.RETURN_TYPES == ("IMAGE",)
    assert (images.dtype, images.shape) == (torch.float32, (2, 64, 64, 3))
    for number, source in enumerate(sources):
        expected = pixels(grpc.edit(edit_inputs(source, mask, seed=5 + number))[0])
        assert np.array_equal((images[number] * 255).round().to(torch.uint8).numpy(), expected)
