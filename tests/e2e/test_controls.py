"""Edits with ControlNets through a router and a real Triton, against diffusers' own pipeline."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from openai import BadRequestError, NotFoundError, OpenAI
from PIL import Image

from maskserve_benchmarks.router_site import RouterSite
from maskserve_client.client import Client
from maskserve_common.config_file import config_of
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import AdapterNotFound, InvalidRequest, MaskserveError
from tests.fakes.control_nets import made_nets
from tests.fakes.pictures import blob_mask, encode, scene
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_model import VAE_FACTOR
from tests.support.calls import InferenceServerException, Pixels, pixels, tensors
from tests.support.eventually import eventually
from tests.support.plain_triton import PlainWorker

SIDE, STEPS = 64, 4
SOURCE = scene(SIDE, SIDE)
# Of whole latents: others are grown to them, where the pipeline takes the nearest pixel.
MASK = np.kron(
    blob_mask(SIDE // VAE_FACTOR, SIDE // VAE_FACTOR), np.ones((VAE_FACTOR,) * 2, np.uint8)
)
Asked = tuple[dict[str, Any], ...]
MIX: tuple[Asked, ...] = (
    (),
    ({"name": "plain", "scale": 0.8},),
    ({"name": "union", "mode": 1, "start": 0.2, "end": 0.8},),
    ({"name": "plain", "scale": 0.5}, {"name": "union", "mode": 2, "scale": 0.7}),
    ({"name": "plain", "scale": 0.0},),
)
"""Controls of the edits of one batch."""


class Site:
    def __init__(self, worker: PlainWorker, router: RouterSite) -> None:
        self.worker, self.model = worker, worker.model
        self.http, self.url = router.http_url, router.grpc_url

    def status(self) -> dict[str, Any]:
        with Client(self.worker.grpc_url) as client:
            return client.control("status")

    def edit(self, controls: Asked, pictures: list[Pixels], **more: Any) -> tuple[Pixels, Any]:
        settings = {"num_inference_steps": STEPS, "cache": "off", "seed": 1, **more}
        with Client(self.url) as client:
            result = client.edit(
                encode(SOURCE),
                encode(MASK),
                "a red star",
                control=[encode(picture) for picture in pictures],
                controls=list(controls),
                timeout=120,
                **settings,
            )
        return pixels(result.encoded), result.meta


def picture(seed: int, side: int = SIDE) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def site(plain_worker: PlainWorker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with RouterSite([plain_worker.grpc_url], tmp_path_factory.mktemp("router")) as router:
        yield Site(plain_worker, router)


def expected(site: Site, seed: int, controls: Asked, pictures: list[Pixels]) -> Pixels:
    from diffusers import FluxControlNetInpaintPipeline, FluxMultiControlNetModel

    nets = [made_nets()[item["name"]] for item in controls]
    is_single = len(nets) == 1
    pipeline = FluxControlNetInpaintPipeline.from_pretrained(
        site.model, controlnet=nets[0] if is_single else FluxMultiControlNetModel(nets)
    )
    pipeline.set_progress_bar_config(disable=True)
    model = config_of({"model": {"path": str(site.model)}}).model

    def item(key: str, default: Any) -> Any:
        values = [control.get(key, default) for control in controls]
        return values[0] if is_single else values

    control_images = [Image.fromarray(item) for item in pictures]
    images = diffusers_edit(
        pipeline,
        SOURCE,
        MASK,
        "a red star",
        EditSettings(num_inference_steps=STEPS, guidance_scale=model.guidance_scale),
        seed,
        max_sequence_length=model.max_sequence_length,
        control_image=control_images[0] if is_single else control_images,
        control_mode=item("mode", -1),
        controlnet_conditioning_scale=item("scale", 1.0),
        control_guidance_start=item("start", 0.0),
        control_guidance_end=item("end", 1.0),
    )
    return np.asarray(images[0])


def test_a_mix_of_controls_in_one_batch_is_what_diffusers_makes_of_each_edit(site: Site) -> None:
    jobs = [
        (seed, MIX[seed], [picture(seed + i) for i in range(len(MIX[seed]))]) for seed in range(5)
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: site.edit(job[1], job[2], seed=job[0]), jobs))
    edit = MASK > 0
    plain, _ = site.edit((), [], seed=4)
    for (seed, controls, pictures), (edited, meta) in zip(jobs, answers, strict=True):
        assert np.array_equal(edited[~edit], SOURCE[~edit])
        if not controls:
            assert "controls" not in meta
            continue
        reported_controls = meta["controls"]
        assert [control["name"] for control in reported_controls] == [
            control["name"] for control in controls
        ]
        assert [control["image"] for control in reported_controls] == list(range(len(controls)))
        if controls[0].get("scale") == 0.0:
            assert np.array_equal(edited, plain)  # as if nobody had asked for it
            continue
        assert all(len(control["digest"]) == 64 for control in reported_controls)
        reference = expected(site, seed, controls, pictures)
        difference = np.abs(edited[edit].astype(int) - reference[edit])
        assert difference.max() <= 2, controls  # levels: rounding at another batch shape
        without, _ = site.edit((), [], seed=seed)
        assert np.abs(edited[edit].astype(int) - without[edit]).max() > 8, "no visible control"


class Refused(NamedTuple):
    controls: Asked
    pictures: tuple[bytes, ...]
    message: str
    code: str = InvalidRequest.code


GOOD = encode(picture(0))
HALF = len(GOOD) // 2
DAMAGED = GOOD[:HALF] + bytes(255 - byte for byte in GOOD[HALF : HALF + 64]) + GOOD[HALF + 64 :]
REFUSED = {
    "unknown net": Refused(
        ({"name": "absent"},), (GOOD,), "there is no ControlNet absent", AdapterNotFound.code
    ),
    "net of another base": Refused(({"name": "other"},), (GOOD,), "is for another model: its"),
    "net cut off": Refused(({"name": "cut"},), (GOOD,), "is cut short"),
    "no mode": Refused(({"name": "union"},), (GOOD,), "SETTINGS.controls[0].mode"),
    "mode too many": Refused(({"name": "plain", "mode": 1},), (GOOD,), "SETTINGS.controls[0].mode"),
    "ends before it starts": Refused(
        ({"name": "plain", "start": 0.5, "end": 0.2},), (GOOD,), "SETTINGS.controls[0].end"
    ),
    "no picture": Refused(({"name": "plain"},), (), "SETTINGS.controls[0].image: is 0"),
    "picture too few": Refused(
        ({"name": "plain"}, {"name": "plain"}), (GOOD,), "SETTINGS.controls[1].image: is 1"
    ),
    "empty picture": Refused(({"name": "plain"},), (b"",), "CONTROL[0]: is empty"),
    "no picture at all": Refused(
        ({"name": "plain"},), (b"an outline",), "CONTROL[0]: is not an image"
    ),
    "picture cut off": Refused(
        ({"name": "plain"},), (GOOD[:HALF],), "CONTROL[0]: is a truncated PNG"
    ),
    "picture that cannot be decoded": Refused(
        ({"name": "plain"},), (DAMAGED,), "CONTROL[0]: is a truncated or damaged PNG"
    ),
    "second picture cut off": Refused(
        ({"name": "plain"}, {"name": "plain"}), (GOOD, GOOD[:-40]), "CONTROL[1]: is a truncated PNG"
    ),
    "picture of another size": Refused(
        ({"name": "plain"},), (encode(picture(0, 32)),), "CONTROL[0]: is 32x32 pixels"
    ),
    "picture that nobody names": Refused((), (GOOD,), "CONTROL[0]: is named by no control"),
}


def settings_of(case: Refused) -> dict[str, Any]:
    return {"num_inference_steps": STEPS, "cache": "off", "controls": list(case.controls)}


def by_client(site: Site, case: Refused, folder: Path) -> str:
    with Client(site.url) as client, pytest.raises(MaskserveError) as caught:
        client.edit(
            encode(SOURCE),
            encode(MASK),
            "a red star",
            control=list(case.pictures),
            timeout=60,
            **settings_of(case),
        )
    return str(caught.value)


def kserve_inputs(module: Any, case: Refused) -> list[Any]:
    values = {"IMAGE": encode(SOURCE), "MASK": encode(MASK), "PROMPT": b"a red star"}
    inputs = tensors(module, {**values, "SETTINGS": json.dumps(settings_of(case)).encode()})
    if case.pictures:
        control = module.InferInput("CONTROL", [len(case.pictures)], "BYTES")
        control.set_data_from_numpy(np.array(case.pictures, np.object_))
        inputs.append(control)
    return inputs


def by_kserve_grpc(url: str, case: Refused) -> str:
    with (
        triton_grpc.InferenceServerClient(url) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer("edit", kserve_inputs(triton_grpc, case), client_timeout=60)
    return str(caught.value.message())


def by_kserve_http(url: str, case: Refused) -> str:
    with (
        triton_http.InferenceServerClient(url, network_timeout=60.0) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer("edit", kserve_inputs(triton_http, case))
    return str(caught.value.message())


def by_stream(site: Site, case: Refused, folder: Path) -> str:
    events: SimpleQueue[Any] = SimpleQueue()
    with triton_grpc.InferenceServerClient(site.worker.grpc_url) as client:
        client.start_stream(lambda result, error: events.put(error))
        client.async_stream_infer("edit_stream", kserve_inputs(triton_grpc, case))
        error = events.get(timeout=60)
        client.stop_stream()
    assert error is not None
    return str(error.message())


def by_generate(site: Site, case: Refused, folder: Path) -> str:
    def text(data: bytes) -> str:
        return base64.b64encode(data).decode()

    body = {
        "IMAGE": text(encode(SOURCE)),
        "MASK": text(encode(MASK)),
        "PROMPT": "a red star",
        "SETTINGS": json.dumps(settings_of(case)),
        **({"CONTROL": [text(picture) for picture in case.pictures]} if case.pictures else {}),
    }
    answer = httpx.post(
        f"http://{site.http}/v2/models/edit/generate", json=body, timeout=60, trust_env=False
    )
    assert answer.status_code in (400, 404)
    return str(answer.json()["error"])


def by_openai(site: Site, case: Refused, folder: Path) -> str:
    client = OpenAI(base_url=f"http://{site.http}/v1", api_key="none", max_retries=0)
    more = {**settings_of(case), "controls": json.dumps(case.controls), "mask_mode": "white"}
    with pytest.raises((BadRequestError, NotFoundError)) as caught:
        client.images.edit(
            image=[
                ("a.png", encode(SOURCE)),
                *((f"{i}.png", picture) for i, picture in enumerate(case.pictures)),
            ],
            mask=("m.png", encode(MASK)),
            prompt="a red star",
            extra_body=more,
        )
    assert isinstance(caught.value.body, dict)
    return f"[{str(caught.value.body['code']).upper()}] {caught.value.body['message']}"


def by_command(site: Site, case: Refused, folder: Path) -> str:
    """The error that the command prints. It names a file with each control and has no `mode`."""
    for name, data in (("a", encode(SOURCE)), ("m", encode(MASK)), ("c", case.pictures[0])):
        (folder / f"{name}.png").write_bytes(data)
    command = [
        sys.executable, "-m", "maskserve_client.cli", "edit", "--url", site.url, "--prompt", "a",
        "--image", "a.png", "--mask", "m.png", "--out", "o.png", "--no-stream",
        "--control", f"{case.controls[0]['name']}=c.png",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 2
    assert not (folder / "o.png").exists()
    return ended.stderr.removesuffix("\n")


FRONTS: dict[str, Callable[[Site, Refused, Path], str]] = {
    "client": by_client,
    "KServe gRPC of the router": lambda site, case, _: by_kserve_grpc(site.url, case),
    "KServe HTTP of the router": lambda site, case, _: by_kserve_http(site.http, case),
    "KServe gRPC of the worker": lambda s, case, _: by_kserve_grpc(s.worker.grpc_url, case),
    "KServe HTTP of the worker": lambda s, case, _: by_kserve_http(
        s.worker.http_url.removeprefix("http://"), case
    ),
    "stream": by_stream,
    "generate": by_generate,
    "openai": by_openai,
}
BY_COMMAND = (
    "unknown net",
    "net of another base",
    "picture that cannot be decoded",
    "picture of another size",
)


@pytest.mark.parametrize("front", FRONTS)
def test_what_cannot_be_controlled_is_refused_in_one_sentence_and_nothing_begins(
    site: Site, front: str, tmp_path: Path
) -> None:
    status_before = site.status()
    for name, case in REFUSED.items():
        if front == "openai" and not case.controls:
            continue  # a second image without controls is refused as such
        message = FRONTS[front](site, case, tmp_path)
        if front == "openai":  # whose errors name its own fields, and whose first image is IMAGE
            words = case.message.replace("SETTINGS.", "")
            for number in (0, 1):
                words = words.replace(f"CONTROL[{number}]", f"image[{number + 1}]")
            case = case._replace(message=words)
        check_refusal(message, case, name)
    check_idle(status_before, site)


@pytest.mark.parametrize("name", BY_COMMAND)
def test_the_command_refuses_what_cannot_be_controlled(
    site: Site, name: str, tmp_path: Path
) -> None:
    status_before = site.status()
    check_refusal(by_command(site, REFUSED[name], tmp_path), REFUSED[name], name)
    check_idle(status_before, site)


def check_refusal(message: str, case: Refused, name: str) -> None:
    assert case.message in message, (name, message)
    assert f"[{case.code}]" in message, (name, message)
    assert "\n" not in message, (name, message)
    assert "Traceback" not in message, (name, message)


def test_the_record_and_the_metrics_say_which_nets_are_on_the_device(site: Site) -> None:
    site.edit(({"name": "plain"},), [picture(0)])
    nets_by_name = {net["name"]: net for net in site.status()["controlnets"]}
    assert nets_by_name["plain"]["tier"] == "device"
    numbers = sum(weight.numel() for weight in made_nets()["plain"].parameters())
    assert nets_by_name["plain"]["nbytes"] == numbers * 4  # float32
    with Client(site.url) as client:
        listed = client.control("adapters")["controlnets"]
    assert next(net for net in listed if net["name"] == "plain")["tiers"] == {
        site.worker.grpc_url: ["device"]
    }

    def published() -> bool:
        page = httpx.get(site.worker.metrics_url, trust_env=False).text
        match = re.search(r"^maskserve_controlnet_bytes\{.*\} (\S+)$", page, re.MULTILINE)
        return match is not None and float(match[1]) == sum(
            n["nbytes"] for n in nets_by_name.values()
        )

    eventually("published", published)


def check_idle(before: dict[str, Any], site: Site) -> None:
    """No step was taken, no row is left and no ControlNet was brought."""

    def idle() -> bool:  # an edit is in flight until its answer has gone
        status = site.status()
        return not (status["running"] or status["waiting"] or status["in_flight"])

    eventually("nothing is under way", idle)
    status_after = site.status()
    assert status_after["counters"] == before["counters"]
    assert status_after["controlnets"] == before["controlnets"]


def test_an_edit_of_a_cached_template_has_controls_too(site: Site) -> None:
    """Its entries know nothing of the control: they are the same as those without."""
    for _ in range(2):
        site.edit((), [], cache="require")
    control = ({"name": "plain"},)
    cached, meta = site.edit(control, [picture(3)], cache="require")
    assert meta["cache"] == "hit"
    without, plain_meta = site.edit((), [], cache="require")
    assert plain_meta["cache"] == "hit"
    assert np.abs(cached.astype(int) - without).max() > 8


def test_the_command_sends_controls_and_lists_them(site: Site, tmp_path: Path) -> None:
    for name, data in (("a", encode(SOURCE)), ("m", encode(MASK)), ("c", encode(picture(7)))):
        (tmp_path / f"{name}.png").write_bytes(data)
    base = [sys.executable, "-m", "maskserve_client.cli"]
    command = [
        *base, "edit", "--url", site.url, "--image", "a.png", "--mask", "m.png", "--out", "o.png",
        "--prompt", "a red star", "--control", "plain:0.8=c.png", "--seed", "1",
        "--steps", str(STEPS), "--cache", "off",
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    edited, _ = site.edit(({"name": "plain", "scale": 0.8},), [picture(7)])
    assert np.array_equal(pixels((tmp_path / "o.png").read_bytes()), edited)
    listed = subprocess.run(
        [*base, "adapters", "ls", "--url", site.url], check=True, capture_output=True, text=True
    )
    assert "plain" in listed.stdout
    assert "not served: it is for another model" in listed.stdout


def test_openai_s_clients_send_control_pictures_behind_the_image(site: Site) -> None:
    client = OpenAI(base_url=f"http://{site.http}/v1", api_key="none", max_retries=0)
    more = {"controls": '[{"name": "plain", "scale": 0.8}]', "cache": "off", "mask_mode": "white"}
    answer = client.images.edit(
        image=[("a.png", encode(SOURCE)), ("c.png", encode(picture(7)))],
        mask=("m.png", encode(MASK)),
        prompt="a red star",
        extra_body={**more, "seed": 1, "num_inference_steps": STEPS},
    )
    assert answer.data
    assert answer.data[0].b64_json
    edited, _ = site.edit(({"name": "plain", "scale": 0.8},), [picture(7)])
    assert np.array_equal(pixels(base64.b64decode(answer.data[0].b64_json)), edited)
