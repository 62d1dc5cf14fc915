"""Adapters that are fused, beside PEFT, which writes their files and merges them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maskserve_engine.adapters.fuse import fuse_configured_loras
from maskserve_lora.lora_header import BadAdapter, header_of_file
from tests.fakes.jobs import config_of

LAYERS = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_out"]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def check_fused(
    model_folder: Path,
    adapter_folder: Path,
    peft_config: Any,
    draw: Callable[[str, Tensor], object],
    scale: float,
    kind: str,
    *,
    names_file: bool = True,
) -> None:
    """Check that an adapter of FLUX.1 changes the weights by its scale's share of PEFT's change,
    and that it is refused where it is not fused.

    Args:
        model_folder: folder of the model.
        adapter_folder: where PEFT writes the adapter.
        peft_config: PEFT's configuration, for `LAYERS`.
        draw: fills a parameter of this name in place.
        scale: scale of the adapter.
        kind: its kind in the refusal.
        names_file: whether the configuration names the file, or the folder.
    """
    import peft
    from diffusers import FluxTransformer2DModel

    def model() -> Any:
        return FluxTransformer2DModel.from_pretrained(model_folder / "transformer")

    plain = model()
    weights = {name: plain.get_submodule(name).weight.detach().clone() for name in LAYERS}
    tuned: Any = peft.get_peft_model(model(), peft_config)
    for name, parameter in tuned.named_parameters():
        draw(name, parameter)
    tuned.save_pretrained(str(adapter_folder))
    file = adapter_folder / "adapter_model.safetensors"
    merged = tuned.merge_and_unload()
    source = file if names_file else adapter_folder
    config = config_of(model_folder, model={"fuse_loras": [f"{source}:{scale}"]})
    changed = fuse_configured_loras(config, plain.requires_grad_(False), "denoiser")
    for name in LAYERS:
        expected = torch.lerp(weights[name], merged.get_submodule(name).weight.detach(), scale)
        assert_near(changed.get_submodule(name).weight.detach().double(), expected.double())
    with pytest.raises(BadAdapter, match=rf"is {kind} .* accepted: --fuse-lora"):
        header_of_file(file)
