"""Edits with ControlNets through a router and a real Triton, against diffusers' own pipeline."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import FluxControlNetInpaintPipeline, FluxMultiControlNetModel
from openai import OpenAI
from PIL import Image

from maskserve_client.client import Client
from maskserve_core.contracts.settings import EditSettings
from maskserve_core.errors import AdapterNotFound, InvalidRequest
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of
from tests.fakes.pictures import blob_mask, encode, scene
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_model import VAE_FACTOR
from tests.support.calls import Pixels, pixels

SIDE, STEPS = 64, 4
SOURCE = scene(SIDE, SIDE)
# Of whole latents: others are grown to them, where the pipeline takes the nearest pixel.
MASK = np.kron(
    blob_mask(SIDE // VAE_FACTOR, SIDE // VAE_FACTOR), np.ones((VAE_FACTOR,) * 2, np.uint8)
)
# As deep as one another: of several, diffusers drops what only the deeper one has.
NETS = {
    "plain": random_net(11, 1, 1),
    "union": random_net(12, 1, 1, num_mode=3),
    "other": random_net(13, 1, 1, attention_head_dim=8, axes_dims_rope=(2, 2, 4)),
}
Asked = tuple[dict[str, Any], ...]
MIX: tuple[Asked, ...] = (
    (),
    ({"name": "plain", "scale": 0.8},),
    ({"name": "union", "mode": 1, "start": 0.2, "end": 0.8},),
    ({"name": "plain", "scale": 0.5}, {"name": "union", "mode": 2, "scale": 0.7}),
    ({"name": "plain", "scale": 0.0},),
)
"""What the edits of one batch carry."""


class Site:
    def __init__(self, url: str, http: str, model: Path) -> None:
        self.url, self.http, self.model = url, http, model

    def edit(self, controls: Asked, pictures: list[Pixels], **more: Any) -> tuple[Pixels, Any]:
        asked = {"num_inference_steps": STEPS, "cache": "off", "seed": 1, **more}
        with Client(self.url) as client:
            result = client.edit(
                encode(SOURCE),
                encode(MASK),
                "a red star",
                control=[encode(each) for each in pictures],
                controls=list(controls),
                timeout=120,
                **asked,
            )
        return pixels(result.encoded), result.meta


def picture(seed: int, side: int = SIDE) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def site(tiny_inpaint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    nets = tmp_path_factory.mktemp("nets")
    for name, net in NETS.items():
        net.save_pretrained(nets / name)
    NETS["plain"].save_pretrained(nets / "cut")
    [weights] = (nets / "cut").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-64])
    config = tmp_path_factory.mktemp("controls") / "worker.toml"
    config.write_text('[model]\noutside_noise = "edit"  # as the pipeline draws it\n')
    port = free_base_port(2)
    options = ServeOptions(
        config=config,
        model=str(tiny_inpaint),
        base_port=port,
        router=True,
        router_port=port + 10,
        controlnets=str(nets),
        log_dir=tmp_path_factory.mktemp("control-logs"),
    )
    with Supervisor(options):
        http = f"http://127.0.0.1:{options.router_port}/v1"
        yield Site(f"127.0.0.1:{options.router_port + 1}", http, tiny_inpaint)


def expected(site: Site, seed: int, controls: Asked, pictures: list[Pixels]) -> Pixels:
    nets = [NETS[each["name"]] for each in controls]
    one = len(nets) == 1
    pipeline = FluxControlNetInpaintPipeline.from_pretrained(
        site.model, controlnet=nets[0] if one else FluxMultiControlNetModel(nets)
    )
    pipeline.set_progress_bar_config(disable=True)
    model = config_of(site.model).model

    def each(key: str, default: Any) -> Any:
        found = [control.get(key, default) for control in controls]
        return found[0] if one else found

    given = [Image.fromarray(each) for each in pictures]
    images = diffusers_edit(
        pipeline,
        SOURCE,
        MASK,
        "a red star",
        EditSettings(num_inference_steps=STEPS, guidance_scale=model.guidance_scale),
        seed,
        max_sequence_length=model.max_sequence_length,
        control_image=given[0] if one else given,
        control_mode=each("mode", -1),
        controlnet_conditioning_scale=each("scale", 1.0),
        control_guidance_start=each("start", 0.0),
        control_guidance_end=each("end", 1.0),
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
        told = meta["controls"]
        assert [each["name"] for each in told] == [each["name"] for each in controls]
        assert [each["image"] for each in told] == list(range(len(controls)))
        if controls[0].get("scale") == 0.0:
            assert np.array_equal(edited, plain)  # as if nobody had asked for it
            continue
        assert all(len(each["digest"]) == 64 for each in told)
        reference = expected(site, seed, controls, pictures)
        difference = np.abs(edited[edit].astype(int) - reference[edit])
        assert difference.max() <= 2, controls  # levels: rounding at another batch shape
        without, _ = site.edit((), [], seed=seed)
        assert np.abs(edited[edit].astype(int) - without[edit]).max() > 8, "no visible control"


@pytest.mark.parametrize(
    ("controls", "pictures", "error", "says"),
    [
        (({"name": "absent"},), [picture(0)], AdapterNotFound, "there is no ControlNet absent"),
        (({"name": "other"},), [picture(0)], InvalidRequest, "is for another model: its"),
        (({"name": "cut"},), [picture(0)], InvalidRequest, "has a file that is cut off"),
        (({"name": "union"},), [picture(0)], InvalidRequest, "controls[0].mode"),
        (({"name": "plain", "mode": 1},), [picture(0)], InvalidRequest, "controls[0].mode"),
        (({"name": "plain"},), [], InvalidRequest, "controls[0].image: is 0"),
        (({"name": "plain"},), [picture(0, 32)], InvalidRequest, "CONTROL[0]: is 32x32 pixels"),
        ((), [picture(0)], InvalidRequest, "CONTROL[0]: is named by no control"),
        (({"name": "plain", "start": 0.5, "end": 0.2},), [picture(0)], InvalidRequest, "end"),
    ],
)
def test_what_cannot_be_controlled_is_refused_in_one_sentence(
    site: Site,
    controls: Asked,
    pictures: list[Pixels],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error) as caught:
        site.edit(controls, pictures)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


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
    client = OpenAI(base_url=site.http, api_key="none", max_retries=0)
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
