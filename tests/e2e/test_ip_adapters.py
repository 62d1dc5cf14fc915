"""Edits with an IP-Adapter through a real Triton, against diffusers' own pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from maskserve_client.client import Client
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import AdapterNotFound, InvalidRequest
from maskserve_engine.families.specs import load_spec
from tests.fakes.ip_adapters import build_image_encoder, build_ip_adapter, load_into
from tests.fakes.pictures import encode, scene
from tests.fakes.pipelines import diffusers_edit
from tests.support.calls import Pixels, pixels
from tests.support.plain_triton import PlainWorker, plain_triton

SIDE, STEPS = 64, 4
SOURCE, PICTURES = scene(SIDE, SIDE), [scene(48, 40, seed) for seed in (3, 4)]
MASK = np.zeros((SIDE, SIDE), np.uint8)
MASK[16:48, 16:48] = 255  # whole tokens of both models
LENGTH = 16
"""`max_sequence_length` of FLUX.1."""


class Site:
    def __init__(self, worker: PlainWorker, folder: Path, is_flux: bool) -> None:
        self.worker, self.folder, self.is_flux = worker, folder, is_flux

    def edit(self, seed: int, picture: Pixels | None, scale: float = 1.0, **more: Any) -> Any:
        adapted: dict[str, Any] = {}
        if picture is not None:
            adapted = {"images": [encode(picture)], "ip_adapter": {"name": "style", "scale": scale}}
        settings = {"num_inference_steps": STEPS, "cache": "off", "guidance_scale": 5.0}
        with Client(self.worker.grpc_url) as client:
            return client.edit(
                encode(SOURCE), encode(MASK), "a red star",
                timeout=120, seed=seed, **settings, **adapted, **more,
            )  # fmt: skip

    def expected(self, seed: int, picture: Pixels, scale: float) -> Pixels:
        from diffusers import FluxInpaintPipeline

        from tests.support.family_cases import unet_pipeline

        settings = EditSettings(num_inference_steps=STEPS, guidance_scale=5.0, negative_prompt="")
        options: dict[str, Any] = {"ip_adapter_image": Image.fromarray(picture)}
        if self.is_flux:
            pipeline = FluxInpaintPipeline.from_pretrained(self.worker.model)
            settings = structs.replace(settings, strength=1.0, negative_prompt=None)
            options["max_sequence_length"] = LENGTH
        else:
            pipeline = unet_pipeline(self.worker.model)
        pipeline.set_progress_bar_config(disable=True)
        load_into(pipeline, self.folder / "style.safetensors", scale)
        args = SOURCE, MASK, "a red star", settings, seed
        return np.asarray(diffusers_edit(pipeline, *args, **options)[0])


@pytest.fixture(scope="module", params=["sdxl", "flux"])
def site(
    request: pytest.FixtureRequest,
    tiny_unets: dict[str, Path],
    tiny_flux: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    is_flux, folder = request.param == "flux", tmp_path_factory.mktemp("ip")
    model = tiny_flux["inpaint"] if is_flux else tiny_unets["sdxl-fill"]
    build_image_encoder(folder / "image_encoder")
    build_ip_adapter(folder / "style.safetensors", load_spec(str(model), 0), "plain")
    text = f"max_sequence_length = {LENGTH}\n" if is_flux else ""
    tables = f'{text}[ip_adapters]\nfolder = "{folder}"\n'
    with plain_triton(model, tables, tmp_path_factory.mktemp("worker")) as worker:
        yield Site(worker, folder, is_flux)


def test_edits_with_and_without_pictures_in_one_batch_are_what_diffusers_makes(site: Site) -> None:
    calls = [(1, PICTURES[0], 0.6), (2, PICTURES[1], 1.0), (3, None, 1.0), (3, PICTURES[0], 0.0)]
    with ThreadPoolExecutor(len(calls)) as pool:
        results = list(pool.map(lambda call: site.edit(*call), calls))
    edited, edit = [pixels(result.encoded) for result in results], MASK > 0
    for (seed, picture, scale), answer in zip(calls[:2], edited, strict=False):
        assert picture is not None
        expected = site.expected(seed, picture, scale)
        difference = np.abs(answer[edit].astype(int) - expected[edit])
        assert difference.max() <= 1
        without = pixels(site.edit(seed, None).encoded)
        assert np.abs(answer[edit].astype(int) - without[edit]).max() > 8, "no visible picture"
        assert np.array_equal(answer[~edit], SOURCE[~edit])
    assert np.abs(edited[2].astype(int) - edited[3]).max() <= 1  # a scale of 0 adds nothing
    assert results[0].meta["ip_adapter"] == {"name": "style", "scale": 0.6}


def test_what_is_missing_is_named(site: Site) -> None:
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.ip_adapter: is given"):
        site.edit(1, None, ip_adapter={"name": "style"})
    with pytest.raises(AdapterNotFound, match="there is no IP-Adapter other"):
        site.edit(1, None, images=[encode(PICTURES[0])], ip_adapter={"name": "other"})
    with pytest.raises(InvalidRequest, match="IMAGE: has 2 pictures; accepted: one with"):
        site.edit(1, None, images=[encode(PICTURES[0])])
    with pytest.raises(InvalidRequest, match=r"IMAGE\[1\]: "):
        site.edit(1, None, images=[b"no picture"], ip_adapter={"name": "style"})
