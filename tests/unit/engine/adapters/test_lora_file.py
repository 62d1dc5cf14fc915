"""LoRA files of every form are the same updates, and those that PEFT computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_engine.adapters.lora_file import read_lora
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter
from tests.fakes.loras import Arrays, lora, write
from tests.support.draws import fresh_rng
from tests.support.lora_oracle import assert_same, by_diffusers, deltas, read

FLUX = {
    "transformer_blocks.0.attn.to_q": (32, 32),
    "transformer_blocks.0.attn.to_k": (32, 32),
    "transformer_blocks.0.attn.to_v": (32, 32),
    "transformer_blocks.0.attn.to_out.0": (32, 32),
    "transformer_blocks.0.ff.net.2": (128, 32),
    "transformer_blocks.0.norm1.linear": (32, 192),
}
SINGLE = {"single_transformer_blocks.1.proj_out": (160, 32), "proj_out": (32, 16)}
UNET = {
    "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": (64, 64),
    "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_out.0": (64, 64),
    "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj": (64, 512),
}
TEXT = {"encoder.layers.0.self_attn.q_proj": (32, 32), "encoder.layers.0.mlp.fc1": (32, 32)}


def renamed(tensors: Arrays, change: Any) -> Arrays:
    return {change(name): value for name, value in tensors.items()}


def with_alphas(tensors: Arrays, alpha: float, suffix: str) -> Arrays:
    modules = {name.removesuffix(suffix) for name in tensors if name.endswith(suffix)}
    return {**tensors, **{f"{name}.alpha": np.array(alpha, np.float32) for name in modules}}


def kohya(tensors: Arrays) -> Arrays:
    """FLUX's layers under the names that Black Forest Labs gave them; q, k and v were one layer,
    so their matrices A are the same there.
    """
    block = "transformer_blocks.0.attn.to_{}.{}.weight"
    shared = tensors[block.format("q", "lora_A")]
    ups = np.concatenate([tensors[block.format(letter, "lora_B")] for letter in "qkv"])
    result = {
        "double_blocks_0_img_attn_qkv.lora_down.weight": shared,
        "double_blocks_0_img_attn_qkv.lora_up.weight": ups,
    }
    for diffusers_name, published in (
        ("attn.to_out.0", "img_attn_proj"),
        ("ff.net.2", "img_mlp_2"),
        ("norm1.linear", "img_mod_lin"),
    ):
        for form, role in (("lora_A", "lora_down"), ("lora_B", "lora_up")):
            result[f"double_blocks_0_{published}.{role}.weight"] = tensors[
                f"transformer_blocks.0.{diffusers_name}.{form}.weight"
            ]
    return {f"lora_unet_{name}": value for name, value in result.items()}


def test_peft_s_diffusers_and_kohya_s_files_of_one_adapter_agree(
    tmp_path: Path, tiny_inpaint: Path
) -> None:
    plain = lora(FLUX, rank=4, prefix="")
    for letter in "kv":
        plain[f"transformer_blocks.0.attn.to_{letter}.lora_A.weight"] = plain[
            "transformer_blocks.0.attn.to_q.lora_A.weight"
        ]
    alpha = 2.5
    about = {"transformer.r": 4, "transformer.lora_alpha": alpha, "transformer.use_rslora": False}
    about["transformer.target_modules"] = list(FLUX)  # type: ignore[assignment]
    peft = renamed(plain, lambda name: f"transformer.{name}")
    old = renamed(
        peft, lambda name: name.replace("lora_A", "lora.down").replace("lora_B", "lora.up")
    )
    write(tmp_path / "peft.safetensors", peft, lora_adapter_metadata=json.dumps(about))
    write(tmp_path / "old.safetensors", with_alphas(old, alpha, ".lora.down.weight"))
    write(tmp_path / "kohya.safetensors", with_alphas(kohya(plain), alpha, ".lora_down.weight"))
    dotted = renamed(kohya(plain), _dotted)
    write(tmp_path / "dotted.safetensors", with_alphas(dotted, alpha, ".lora_A.weight"))
    bare = renamed(plain, lambda name: f"base_model.model.{name}")
    write(tmp_path / "bare.safetensors", with_alphas(bare, alpha, ".lora_A.weight"))

    expected = {
        f"denoiser/{name}": (alpha / 4)
        * torch.from_numpy(plain[f"{name}.lora_B.weight"]).double()
        @ torch.from_numpy(plain[f"{name}.lora_A.weight"]).double()
        for name in FLUX
    }
    for form in ("peft", "old", "kohya", "dotted", "bare"):
        result = deltas(read(tmp_path / f"{form}.safetensors", tiny_inpaint))
        assert_same(result, expected)
    for form in ("peft", "kohya"):
        assert_same(by_diffusers(tmp_path / f"{form}.safetensors", tiny_inpaint), expected)


def _dotted(name: str) -> str:
    """As other trainers write the published names."""
    layer, role, _ = name.removeprefix("lora_unet_").split(".")
    layer = layer.replace("double_blocks_0_img_attn_", "double_blocks.0.img_attn.")
    layer = layer.replace("double_blocks_0_img_mlp_", "double_blocks.0.img_mlp.")
    layer = layer.replace("double_blocks_0_img_mod_", "double_blocks.0.img_mod.")
    form = "lora_A" if role == "lora_down" else "lora_B"
    return f"diffusion_model.{layer}.{form}.weight"


@pytest.mark.parametrize("rooted", [False, True])
def test_alphas_of_single_layers_and_rank_stabilised_ones_are_peft_s(
    tmp_path: Path, tiny_inpaint: Path, rooted: bool
) -> None:
    tensors = {**lora(FLUX, rank=3), **lora(SINGLE, rank=5)}
    about = {
        "transformer.r": 3,
        "transformer.lora_alpha": 7,
        "transformer.rank_pattern": dict.fromkeys(SINGLE, 5),
        "transformer.alpha_pattern": {"transformer_blocks.0.attn.to_k": 1.5},
        "transformer.use_rslora": rooted,
        "transformer.target_modules": [*FLUX, *SINGLE],
    }
    about["transformer.rank_pattern"] = {f"^{name}": 5 for name in SINGLE}
    path = tmp_path / "x.safetensors"
    write(path, tensors, lora_adapter_metadata=json.dumps(about))
    assert_same(deltas(read(path, tiny_inpaint)), by_diffusers(path, tiny_inpaint))


def _convolution(rank: int) -> Arrays:
    rng = fresh_rng()
    name = "unet.down_blocks.1.resnets.0.conv2"
    return {
        f"{name}.lora_A.weight": rng.standard_normal((rank, 64, 3, 3)).astype("f4"),
        f"{name}.lora_B.weight": rng.standard_normal((64, rank, 1, 1)).astype("f4"),
    }


def test_a_unet_s_files_are_what_peft_makes_of_them(
    tmp_path: Path, tiny_unets: dict[str, Path]
) -> None:
    """PEFT's form with a convolution and both text encoders; kohya's with either's names."""
    model = tiny_unets["sdxl-base"]
    denoiser = lora(UNET, rank=4, prefix="")
    text = lora({f"text_model.{name}": size for name, size in TEXT.items()}, rank=2, prefix="")
    peft = {
        **renamed(denoiser, lambda name: f"unet.{name}"),
        **renamed(text, lambda name: f"text_encoder.{name}"),
        **renamed(text, lambda name: f"text_encoder_2.{name}"),
        **_convolution(3),
    }
    write(tmp_path / "peft.safetensors", peft)

    def flat(name: str, prefix: str) -> str:
        module, _, role = name.removesuffix(".weight").rpartition(".")
        form = {"lora_A": "lora_down", "lora_B": "lora_up"}[role]
        return f"{prefix}{module.replace('.', '_')}.{form}.weight"

    shared = {
        **renamed(text, lambda name: flat(name, "lora_te1_")),
        **renamed(text, lambda name: flat(name, "lora_te2_")),
    }
    diffusers_names = {**renamed(denoiser, lambda name: flat(name, "lora_unet_")), **shared}
    write(tmp_path / "kohya.safetensors", with_alphas(diffusers_names, 1.0, ".lora_down.weight"))
    result = deltas(read(tmp_path / "peft.safetensors", model))
    assert len(result) == 3 + 4 + 1
    assert_same(result, by_diffusers(tmp_path / "peft.safetensors", model))
    del result["denoiser/down_blocks.1.resnets.0.conv2"]
    # Not PEFT's: with transformers 5 diffusers loses the text encoders' q, k and v of such files.
    expected = {
        name: delta / (4 if name.startswith("denoiser") else 2) for name, delta in result.items()
    }
    assert_same(deltas(read(tmp_path / "kohya.safetensors", model)), expected)


def test_names_of_stability_s_unet_are_converted_by_diffusers(
    tmp_path: Path, tiny_unets: dict[str, Path]
) -> None:
    model = tiny_unets["sdxl-base"]
    names = {
        "input_blocks_3_1_transformer_blocks_0_attn1_to_q": (64, 64),
        "middle_block_1_transformer_blocks_0_attn2_to_v": (64, 64),
    }
    tensors = lora(names, prefix="lora_unet_", forms=("lora_down", "lora_up"))
    path = tmp_path / "x.safetensors"
    write(path, with_alphas(tensors, 3.0, ".lora_down.weight"))
    expected = by_diffusers(path, model)
    assert len(expected) == 2
    assert_same(deltas(read(path, model)), expected)


def test_flux_s_width_is_converted_in_single_blocks_too(tmp_path: Path) -> None:
    """linear1 is q, k, v and the MLP beside one another; diffusers knows FLUX's own width."""
    width, name = 3072, "single_transformer_blocks.0"
    base = BaseLayers(
        {
            "denoiser": {
                **{f"{name}.attn.to_{letter}": (width, width) for letter in "qkv"},
                f"{name}.proj_mlp": (4 * width, width),
                f"{name}.proj_out": (width, 5 * width),
            }
        }
    )
    layers = {
        "single_blocks_0_linear1": (width, 7 * width),
        "single_blocks_0_linear2": (5 * width, width),
    }
    tensors = lora(layers, 2, "lora_unet_", forms=("lora_down", "lora_up"))
    path = tmp_path / "x.safetensors"
    write(path, with_alphas(tensors, 1.0, ".lora_down.weight"))
    parts = read_lora(path, base, "")
    joined = [f"{name}.attn.to_{letter}" for letter in "qkv"] + [f"{name}.proj_mlp"]
    assert {*parts["denoiser"]} == {*joined, f"{name}.proj_out"}
    up = torch.cat([parts["denoiser"][layer].up for layer in joined])
    torch.testing.assert_close(
        up, torch.from_numpy(tensors["lora_unet_single_blocks_0_linear1.lora_up.weight"]) / 2
    )


def test_the_demo_model_s_adapters_are_read(tmp_path: Path) -> None:
    demo = Path(__file__).parents[4] / "assets" / "models" / "demo"
    path = demo.parents[1] / "adapters" / "hollow.safetensors"
    parts = read(path, demo, torch.bfloat16)
    assert {*parts} == {"denoiser"}
    assert all(x.dtype == torch.bfloat16 for part in parts["denoiser"].values() for x in part)


BAD: dict[str, tuple[Arrays, str]] = {
    "two spellings": (
        {**lora(SINGLE), **lora(SINGLE, prefix="base_model.model.")},
        "twice",
    ),
    "T5": (lora(TEXT, prefix="text_encoder_2."), "changes nothing that is served"),
    "a block that is not there": (
        lora({"double_blocks_7_img_attn_proj": (32, 32)}, prefix="lora_unet_"),
        "has no layer",
    ),
    "a wider model": (
        lora({"double_blocks_0_img_attn_proj": (64, 64)}, prefix="lora_unet_"),
        "takes 32 numbers",
    ),
    "an endless alpha": (
        with_alphas(lora(SINGLE), float("inf"), ".lora_A.weight"),
        "not a finite number",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path, tiny_inpaint: Path) -> None:
    tensors, message = BAD[name]
    path = tmp_path / "x.safetensors"
    write(path, tensors)
    with pytest.raises(BadAdapter, match=message):
        read(path, tiny_inpaint)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        ("[" * 10_000, "cannot be read"),
        ('{"transformer.lora_alpha": "much"}', "of another form"),
        ('{"transformer.lora_alpha": 1, "transformer.alpha_pattern": 3}', "of another form"),
        ('{"transformer.lora_alpha": 1, "transformer.alpha_pattern": {"(a+)+$": 1}}', "no layer's"),
    ],
)
def test_metadata_of_another_form_are_refused(
    about: str, message: str, tmp_path: Path, tiny_inpaint: Path
) -> None:
    path = tmp_path / "x.safetensors"
    write(path, lora(SINGLE), lora_adapter_metadata=about)
    with pytest.raises(BadAdapter, match=message):
        read(path, tiny_inpaint)


def test_an_alpha_that_is_said_twice_is_refused(tmp_path: Path, tiny_inpaint: Path) -> None:
    path = tmp_path / "x.safetensors"
    about = json.dumps({"transformer.lora_alpha": 3})
    write(path, with_alphas(lora(SINGLE), 2.0, ".lora_A.weight"), lora_adapter_metadata=about)
    with pytest.raises(BadAdapter, match="twice"):
        read(path, tiny_inpaint)
