"""Names that models' publishers gave their layers, as trainers and ComfyUI write them into LoRAs:
what the file changes here is what the checkpoint changes in diffusers, once the file's matrices are
multiplied into it and diffusers has converted it.

The names are those of the publishers' own repositories, and no table of the product's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from maskserve_engine.adapters.lora_file import read_lora
from maskserve_lora.base_layers import BaseLayers
from tests.fakes.loras import write
from tests.support.lora_oracle import assert_same, deltas

WIDTH = 3072
"""That diffusers' converters of FLUX.1 and Chroma take for granted."""
INPUTS = 4
"""Inputs of each layer: fewer than the model has, as no converter looks at them."""

FLUX_DOUBLE = {
    "img_attn.qkv": 3, "img_attn.proj": 1, "img_mlp.0": 4, "img_mlp.2": 1,
    "txt_attn.qkv": 3, "txt_attn.proj": 1, "txt_mlp.0": 4, "txt_mlp.2": 1,
}  # fmt: skip
FLUX_NORMS = {
    "double_blocks.{}": ("img_attn.norm.query_norm.scale", "img_attn.norm.key_norm.scale",
                         "txt_attn.norm.query_norm.scale", "txt_attn.norm.key_norm.scale"),
    "single_blocks.{}": ("norm.query_norm.scale", "norm.key_norm.scale"),
}  # fmt: skip
SD3_BLOCK = {
    "x_block.attn.qkv": 3, "x_block.attn.proj": 1, "x_block.attn2.qkv": 3, "x_block.attn2.proj": 1,
    "x_block.mlp.fc1": 4, "x_block.mlp.fc2": 1, "x_block.adaLN_modulation.1": 9,
    "context_block.attn.qkv": 3, "context_block.attn.proj": 1, "context_block.mlp.fc1": 4,
    "context_block.mlp.fc2": 1, "context_block.adaLN_modulation.1": 6,
}  # fmt: skip
Z_IMAGE_BLOCK = {
    "attention.qkv": 3, "attention.out": 1, "feed_forward.w1": 2, "feed_forward.w2": 1,
    "feed_forward.w3": 2, "adaLN_modulation.0": 4,
}  # fmt: skip


class Published(NamedTuple):
    """A model as its publisher has it."""

    converter: str
    """Diffusers' function that converts the publisher's checkpoint."""
    blocks: Mapping[str, Mapping[str, int]]
    """Names of two blocks of each sort, and by layer its outputs, in `width`."""
    outside: Mapping[str, int]
    more_names: Mapping[str, tuple[str, ...]] = {}
    """Other tensors that the converter needs, by their block; "": in none."""
    last: Mapping[str, int | None] = {}
    """Layers that differ in the last block; None: it has no such layer."""
    width: int = WIDTH
    biases: bool = True
    inputs: Callable[[str], tuple[int, ...]] = lambda name: (INPUTS,)
    time: str = "time_text_embed"
    """Diffusers' name of the part that embeds the time, in the converter's place."""

    def layers(self) -> dict[str, int]:
        """Each layer's outputs."""
        outside = dict(self.outside)
        for block, layers in self.blocks.items():
            for number in (0, 1):
                layer_sizes = {**layers, **(self.last if number else {})}
                named = {
                    f"{block.format(number)}.{name}": n for name, n in layer_sizes.items() if n
                }
                outside |= named
        return {name: n * self.width for name, n in outside.items()}

    def checkpoint(self) -> dict[str, Tensor]:
        """All zero."""
        tensors = {}
        for name, outputs in self.layers().items():
            tensors[f"{name}.weight"] = torch.zeros(outputs, *self.inputs(name))
            if self.biases:
                tensors[f"{name}.bias"] = torch.zeros(outputs)
        for block, names in self.more_names.items():
            for number in (0, 1):
                tensors |= {
                    f"{block.format(number)}.{name}".removeprefix("."): torch.zeros(1)
                    for name in names
                }
        return tensors


FLUX_1 = Published(
    "flux",
    {
        "double_blocks.{}": {**FLUX_DOUBLE, "img_mod.lin": 6, "txt_mod.lin": 6},
        "single_blocks.{}": {"linear1": 7, "linear2": 1, "modulation.lin": 3},
    },
    {"img_in": 1, "txt_in": 1, "time_in.in_layer": 1, "time_in.out_layer": 1,
     "vector_in.in_layer": 1, "vector_in.out_layer": 1, "guidance_in.in_layer": 1,
     "guidance_in.out_layer": 1, "final_layer.linear": 1, "final_layer.adaLN_modulation.1": 2},
    FLUX_NORMS,
)  # fmt: skip
_POOLED = tuple(
    f"vector_in.{layer}.{part}"
    for layer in ("in_layer", "out_layer")
    for part in ("weight", "bias")
)
LONGCAT = FLUX_1._replace(
    outside={name: n for name, n in FLUX_1.outside.items() if "guidance" not in name
             and "vector" not in name},
    more_names={**FLUX_NORMS, "": _POOLED},
    time="time_embed",
)  # fmt: skip
CHROMA = Published(
    "chroma",
    {
        "double_blocks.{}": FLUX_DOUBLE,
        "single_blocks.{}": {"linear1": 7, "linear2": 1},
        "distilled_guidance_layer.layers.{}": {"in_layer": 1, "out_layer": 1},
    },
    {"img_in": 1, "txt_in": 1, "final_layer.linear": 1,
     "distilled_guidance_layer.in_proj": 1, "distilled_guidance_layer.out_proj": 1},
    {**FLUX_NORMS, "distilled_guidance_layer.norms.{}": ("scale",)},
)  # fmt: skip
FLUX_2 = Published(
    "flux2",
    {
        "double_blocks.{}": {**FLUX_DOUBLE, "img_mlp.0": 6, "txt_mlp.0": 6},
        "single_blocks.{}": {"linear1": 9, "linear2": 1},
    },
    {"img_in": 1, "txt_in": 1, "time_in.in_layer": 1, "time_in.out_layer": 1,
     "double_stream_modulation_img.lin": 6, "double_stream_modulation_txt.lin": 6,
     "single_stream_modulation.lin": 3, "final_layer.linear": 1,
     "guidance_in.in_layer": 1, "guidance_in.out_layer": 1, "final_layer.adaLN_modulation.1": 2},
    FLUX_NORMS, width=64, biases=False,
)  # fmt: skip
FLUX_3_BLOCK = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "attn_out": 1, "mlp_in": 6, "mlp_out": 1}
FLUX_3 = Published(
    "flux3",
    dict.fromkeys(
        ("content_mode_blocks.image.{}", "content_mode_blocks.image_cond.{}", "txt_mode_blocks.{}",
         "single_blocks.{}"), FLUX_3_BLOCK),
    {f"{stream}_stream_modulations.{mode}.lin": 3 for stream in ("early", "single")
     for mode in ("image", "image_cond", "txt")}
    | {"emb_in.image": 1, "emb_in.image_cond": 1, "txt_in": 1, "time_in.in_layer": 1,
       "time_in.out_layer": 1, "ref_time_in.in_layer": 1, "ref_time_in.out_layer": 1,
       "final_layer.image.linear": 1, "final_layer.image.adaLN_modulation.1": 2},
    width=64, biases=False,
)  # fmt: skip
SD_3 = Published(
    "sd3",
    {"joint_blocks.{}": SD3_BLOCK},
    {"x_embedder.proj": 1, "context_embedder": 1, "t_embedder.mlp.0": 1, "t_embedder.mlp.2": 1,
     "y_embedder.mlp.0": 1, "y_embedder.mlp.2": 1, "final_layer.linear": 1,
     "final_layer.adaLN_modulation.1": 2},
    {
        "": ("pos_embed",),
        "joint_blocks.{}": (
            "x_block.attn2.ln_q.weight",
            "x_block.attn2.ln_k.weight",
            "x_block.attn.ln_q.weight",
            "x_block.attn.ln_k.weight",
            "context_block.attn.ln_q.weight",
            "context_block.attn.ln_k.weight",
        ),
    },
    {"context_block.attn.proj": None, "context_block.mlp.fc1": None, "context_block.mlp.fc2": None,
     "context_block.adaLN_modulation.1": 2},
    width=64,
    inputs=lambda name: (
        (64,) if "adaLN" in name else (4, 2, 2) if name == "x_embedder.proj" else (INPUTS,)
    ),
)  # fmt: skip
Z_IMAGE = Published(
    "z_image",
    {f"{stack}.{{}}": Z_IMAGE_BLOCK for stack in ("layers", "noise_refiner")}
    | {"context_refiner.{}": {k: n for k, n in Z_IMAGE_BLOCK.items() if "adaLN" not in k}},
    {"x_embedder": 1, "cap_embedder.1": 1, "t_embedder.mlp.0": 1, "t_embedder.mlp.2": 1,
     "final_layer.linear": 1, "final_layer.adaLN_modulation.1": 1},
    width=64,
)  # fmt: skip
QWEN_IMAGE_21 = Published(
    "qwen_image21",
    {"transformer_blocks.{}": {"attn.to_q": 1, "attn.to_k": 1, "attn.to_v": 1, "attn.to_out.0": 1,
                               "img_mlp.gate_up": 6, "img_mlp.net.2": 1}},
    {"img_in": 1, "proj_out": 1},
    width=64, biases=False,
)  # fmt: skip
MODELS = {
    "FLUX.1": FLUX_1, "Chroma": CHROMA, "LongCat-Image": LONGCAT,
    "FLUX.2": FLUX_2, "FLUX.3": FLUX_3, "Stable Diffusion 3.5": SD_3,
    "Z-Image": Z_IMAGE, "Qwen-Image-2.1": QWEN_IMAGE_21,
}  # fmt: skip
FORMS = {
    "ComfyUI's": ("diffusion_model.{}", "lora_A", "lora_B"),
    "kohya's": ("lora_unet_{}", "lora_down", "lora_up"),
    "VideoX-Fun's": ("lora_unet__{}", "lora_down", "lora_up"),
    "LyCORIS'": ("lycoris_{}", "lora_down", "lora_up"),
}


def converted(model: Published, checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from diffusers.loaders import single_file_utils

    name = f"convert_{model.converter}_transformer_checkpoint_to_diffusers"
    tensors: dict[str, Tensor] = getattr(single_file_utils, name)(dict(checkpoint))
    renamed = {key.replace("time_text_embed", model.time): x for key, x in tensors.items()}
    return {key: value for key, value in renamed.items() if key.endswith(".weight")}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[Published, dict[str, Tensor], BaseLayers]:
    model = MODELS[request.param]
    plain = converted(model, model.checkpoint())
    shapes = {
        name.removesuffix(".weight"): tuple(weight.shape)
        for name, weight in plain.items()
        if weight.dim() > 1
    }
    return model, plain, BaseLayers({"denoiser": shapes})


def loras(model: Published) -> Iterator[tuple[str, dict[str, Any]]]:
    """The factors of each layer alone."""
    rng = np.random.default_rng(7)
    for name, outputs in model.layers().items():
        inner = model.inputs(name)
        down = rng.standard_normal((2, *inner)).astype("f4")
        up = rng.standard_normal((outputs, 2, *[1] * (len(inner) - 1))).astype("f4")
        yield name, {"down": down, "up": up}


@pytest.mark.parametrize("form", FORMS)
def test_a_lora_changes_what_the_merged_checkpoint_changes(
    case: tuple[Published, dict[str, Tensor], BaseLayers], form: str, tmp_path: Path
) -> None:
    model, plain, base = case
    spelling, first, second = FORMS[form]
    path = tmp_path / "x.safetensors"
    for name, factors in loras(model):
        module = spelling.format(name if spelling.endswith(".{}") else name.replace(".", "_"))
        write(path, {f"{module}.{first}.weight": factors["down"],
                     f"{module}.{second}.weight": factors["up"]})  # fmt: skip
        down, up = (torch.from_numpy(x).double().flatten(1) for x in factors.values())
        merged = model.checkpoint()
        merged[f"{name}.weight"] = (up @ down).view_as(merged[f"{name}.weight"])
        expected = {
            f"denoiser/{layer.removesuffix('.weight')}": weight.double()
            for layer, weight in converted(model, merged).items()
            if not torch.equal(weight, plain[layer].to(weight.dtype))
        }
        assert expected, name
        assert_same(deltas(read_lora(path, base, "x")), expected)
