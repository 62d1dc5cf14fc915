"""The base model that Inpaint semantics on a UNet are measured with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel

from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.quality.unet_base import write_base

UNET = DEMO_MODEL.with_name("demo-unet")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_base_models_first_layer_is_the_inpainting_ones_with_all_masked(tmp_path: Path) -> None:
    write_base(UNET, tmp_path / "base")
    inpainting = UNet2DConditionModel.from_pretrained(UNET / "unet")
    base = UNet2DConditionModel.from_pretrained(tmp_path / "base" / "unet")
    assert base.config["in_channels"] == base.config["out_channels"] == 4
    names = {name for name, _ in base.named_parameters()}
    assert names == {name for name, _ in inpainting.named_parameters()}
    own, other = base.state_dict(), inpainting.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in names if "conv_in" not in name)
    with torch.inference_mode():
        latents, condition = torch.randn(1, 4, 32, 32), torch.zeros(1, 5, 32, 32)
        condition[:, 0] = 1.0
        blank = base.conv_in(latents) - inpainting.conv_in(torch.cat((latents, condition), 1))
    inner = blank[..., 1:-1, 1:-1]  # the same everywhere: what the blank picture adds
    assert float((inner - inner[..., :1, :1]).abs().max()) < 1e-4
