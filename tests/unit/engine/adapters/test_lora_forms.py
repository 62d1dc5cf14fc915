"""LoRA files as trainers write them, against diffusers' own loader on the same file.

Where that fails, too, the test says how, and the update is held against its definition.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from maskserve_common.config import Config, ModelConfig
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.store import AdapterStore, describe_file
from tests.fakes.loras import Arrays, lora, write
from tests.support.lora_oracle import assert_same, by_diffusers, deltas, read

KOHYA = ("lora_down", "lora_up")
Q, K = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"
PROJ = "double_blocks_0_img_attn_proj"
UNET_Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
FC1 = "text_model.encoder.layers.0.mlp.fc1"
T5_Q = "encoder.block.0.layer.0.SelfAttention.q"

FLUX = lora({Q: (32, 32)})
FLUX_KOHYA = lora({PROJ: (32, 32)}, prefix="lora_unet_", forms=KOHYA)
UNET = lora({UNET_Q: (64, 64)}, prefix="unet.")
UNET_KOHYA = lora({UNET_Q.replace(".", "_"): (64, 64)}, prefix="lora_unet_", forms=KOHYA)


def flat(name: str) -> str:
    return name.replace(".", "_")


def kohya(name: str, inputs: int, outputs: int, prefix: str) -> Arrays:
    return lora({name: (inputs, outputs)}, prefix=prefix, forms=KOHYA)


X_FLUX = lora(
    {
        "double_blocks.0.processor.qkv_lora1": (32, 96),
        "double_blocks.0.processor.qkv_lora2": (32, 96),
        "double_blocks.0.processor.proj_lora1": (32, 32),
        "double_blocks.0.processor.proj_lora2": (32, 32),
        "single_blocks.1.processor.qkv_lora": (32, 96),
        "single_blocks.1.processor.proj_lora": (160, 32),
    },
    prefix="",
    forms=("down", "up"),
)


@pytest.fixture
def models(tiny_fill: Path, tiny_inpaint: Path, tiny_unets: dict[str, Path]) -> dict[str, Path]:
    return {"fill": tiny_fill, "flux": tiny_inpaint, **tiny_unets}


# A file of which diffusers takes a part: the same part is served, and the rest is told.
PARTLY: dict[str, tuple[str, Arrays, str]] = {
    "differences of biases": (
        "flux", {**FLUX_KOHYA, f"lora_unet_{PROJ}.diff_b": np.ones(32, "f4")}, "of biases",
    ),
    "differences of norms": (
        "flux",
        {**kohya("double_blocks.0.img_attn.proj", 32, 32, "diffusion_model."),
         "diffusion_model.double_blocks.0.img_attn.norm.key_norm.diff": np.ones(16, "f4")},
        "of weights",
    ),
    "T5 of PEFT's form": (
        "flux", {**FLUX, **lora({T5_Q: (32, 32)}, prefix="text_encoder_2.")}, "T5",
    ),
    "T5 of kohya's form": ("flux", {**FLUX_KOHYA, **kohya(flat(T5_Q), 32, 32, "lora_te3_")}, "T5"),
    "T5 of OneTrainer's form": (
        "flux", {**FLUX_KOHYA, **kohya(flat(T5_Q), 32, 32, "lora_te2_")}, "T5",
    ),
    "T5 of ComfyUI's form": (
        "flux",
        {**FLUX_KOHYA, **kohya(f"{T5_Q}", 32, 32, "text_encoders.t5xxl.transformer.")},
        "T5",
    ),
    "a projection of the text that FLUX does not read": (
        "flux",
        {**FLUX_KOHYA, **kohya(FC1, 32, 32, "text_encoders.clip_l.transformer."),
         **kohya("text_projection", 32, 32, "text_encoders.clip_l.transformer.")},
        "text encoder",
    ),
    "a projection of the text that SD 2.1 has not": (
        "sd-base",
        {**UNET_KOHYA, **kohya(flat(FC1), 32, 32, "lora_te_"),
         **kohya("text_projection", 32, 32, "lora_te_")},
        "text encoder",
    ),
    "places of words": (
        "sdxl-base",
        {**UNET_KOHYA, **kohya(flat(FC1), 32, 32, "lora_te1_"),
         **kohya("text_model_embeddings_position_embedding", 32, 77, "lora_te1_")},
        "text encoder",
    ),
    "an embedding for a word": (
        "flux", {**FLUX_KOHYA, "bundle_emb.x.clip_l": np.ones((1, 32), "f4")}, "no part of a LoRA",
    ),
    "a tensor that nobody knows": ("flux", {**FLUX, "surprise": np.ones(3, "f4")}, "no part"),
    "a layer of a deeper model": (
        "flux", {**FLUX, **lora({"transformer_blocks.7.attn.to_q": (32, 32)})}, "no such layer",
    ),
    "a layer that no UNet has": (
        "sdxl-base", {**UNET, **lora({"foo": (8, 8)}, prefix="unet.")}, "no such layer",
    ),
    "a second text encoder that SD 2.1 has not": (
        "sd-base", {**UNET, **lora({FC1: (32, 32)}, prefix="text_encoder_2.")}, "no text_encoder_2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTLY)
def test_what_diffusers_leaves_out_is_left_out_and_told(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model, tensors, message = PARTLY[name]
    path = tmp_path / "x.safetensors"
    write(path, tensors)
    result = deltas(read(path, models[model]))
    assert result
    assert_same(result, by_diffusers(path, models[model]))
    [note] = describe_file(path, models[model])["notes"]
    assert "leaves out" in note
    assert message in note


# A file that diffusers takes whole.
WHOLE: dict[str, tuple[str, Arrays]] = {
    "doubles": ("flux", lora({Q: (32, 32)}, dtype=np.float64)),
    "an alpha in double precision": (
        "flux", {**FLUX, f"transformer.{Q}.alpha": np.array(8.0, np.float64)},
    ),
    "an alpha in integers": (
        "flux", {**FLUX_KOHYA, f"lora_unet_{PROJ}.alpha": np.array(8, np.int64)},
    ),
    "an alpha in short integers": (
        "sdxl-base", {**UNET_KOHYA, f"lora_unet_{flat(UNET_Q)}.alpha": np.array(8, np.int16)},
    ),
    "fewer inputs than Fill has": ("fill", {**FLUX, **lora({"x_embedder": (16, 32)})}),
    "fewer inputs of another layer": ("flux", {**FLUX, **lora({K: (16, 32)})}),
    "x-flux": ("flux", X_FLUX),
    "ComfyUI's text encoder": (
        "flux", {**FLUX_KOHYA, **kohya(FC1, 32, 32, "text_encoders.clip_l.transformer.")},
    ),
    "the timestep's embedding of a UNet": (
        "sdxl-base",
        {**UNET, **lora({"time_embedding.linear_1": (32, 128)}, prefix="unet."),
         **lora({"add_embedding.linear_2": (128, 128)}, prefix="unet.")},
    ),
    "a projection of the text that SDXL reads": (
        "sdxl-base",
        {**UNET_KOHYA, **kohya(flat(FC1), 32, 32, "lora_te2_"),
         **kohya("text_projection", 32, 32, "lora_te2_")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_is_what_diffusers_makes_of_it(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model, tensors = WHOLE[name]
    path = tmp_path / "x.safetensors"
    write(path, tensors)
    result = deltas(read(path, models[model]))
    assert_same(result, by_diffusers(path, models[model]))
    assert describe_file(path, models[model])["notes"] == []


# A file that diffusers refuses, or of which it takes nothing: the update by its definition.
BEYOND: dict[str, tuple[str, Arrays, dict[str, str]]] = {
    # "The alpha key seems to be incorrect"
    "an alpha in integers, PEFT's names": (
        "flux", {**FLUX, f"transformer.{Q}.alpha": np.array(4, np.int32)},
        {f"denoiser/{Q}": f"transformer.{Q}"},
    ),
    # "keys have not been correctly renamed"
    "biases that do not differ": (
        "sdxl-base", {**UNET_KOHYA, f"lora_unet_{flat(UNET_Q)}.diff_b": -np.zeros(64, "f4")},
        {f"denoiser/{UNET_Q}": f"lora_unet_{flat(UNET_Q)}"},
    ),
    # "Make sure all LoRA param names contain `'lora'`"
    "a tensor of zeros": (
        "sdxl-base", {**UNET, "unet.surprise": np.zeros(3, "f4")},
        {f"denoiser/{UNET_Q}": f"unet.{UNET_Q}"},
    ),
    # Converted, and then not found: their names have lost the part that they belong to.
    "the first layers of FLUX, kohya's names": (
        "flux",
        {**kohya("img_in", 16, 32, "lora_unet_"), **kohya("txt_in", 32, 32, "lora_unet_"),
         **kohya("time_in_in_layer", 256, 32, "lora_unet_")},
        {"denoiser/x_embedder": "lora_unet_img_in", "denoiser/context_embedder": "lora_unet_txt_in",
         "denoiser/time_text_embed.timestep_embedder.linear_1": "lora_unet_time_in_in_layer"},
    ),
    # PEFT: "Could not automatically infer state dict type"
    "a projection of the text, PEFT's names": (
        "sdxl-base", lora({"text_projection": (32, 32)}, prefix="text_encoder_2."),
        {"text_encoder_2/text_projection": "text_encoder_2.text_projection"},
    ),
    # Nothing is loaded, without a word.
    "ComfyUI's names and PEFT's matrices": (
        "flux", lora({"double_blocks.0.img_attn.proj": (32, 32)}, prefix="diffusion_model."),
        {"denoiser/transformer_blocks.0.attn.to_out.0":
             "diffusion_model.double_blocks.0.img_attn.proj"},
    ),
    "ComfyUI's names of SDXL": (
        "sdxl-base",
        {**kohya("input_blocks.3.1.transformer_blocks.0.attn1.to_q", 64, 64, "diffusion_model."),
         **kohya(FC1, 32, 32, "text_encoders.clip_g.transformer.")},
        {"denoiser/down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q":
             "diffusion_model.input_blocks.3.1.transformer_blocks.0.attn1.to_q",
         "text_encoder_2/encoder.layers.0.mlp.fc1": f"text_encoders.clip_g.transformer.{FC1}"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_what_diffusers_cannot_read_is_served_where_its_meaning_is_plain(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model, tensors, layers = BEYOND[name]
    path = tmp_path / "x.safetensors"
    write(path, tensors)
    expected = {layer: defined(tensors, module) for layer, module in layers.items()}
    result = {
        name.replace("/text_model.", "/"): delta
        for name, delta in deltas(read(path, models[model])).items()
    }
    assert_same(result, expected)
    try:
        diffusers = by_diffusers(path, models[model])
    except (ValueError, RuntimeError):
        diffusers = {}
    assert len(diffusers) < len(expected), "diffusers reads it by now: let that be the oracle"


def defined(tensors: Arrays, module: str) -> Tensor:
    down, up = (
        next(
            value for form in forms if (value := tensors.get(f"{module}.{form}.weight")) is not None
        )
        for forms in (("lora_A", "lora_down"), ("lora_B", "lora_up"))
    )
    alpha = float(tensors.get(f"{module}.alpha", np.array(len(down))))
    return torch.from_numpy(up).double() @ torch.from_numpy(down).double() * (alpha / len(down))


NOT_SERVED: dict[str, tuple[str, Arrays, str]] = {
    "biases that differ": (
        "sdxl-base", {**UNET_KOHYA, f"lora_unet_{flat(UNET_Q)}.diff_b": np.ones(64, "f4")}, "zero",
    ),
    "biases of the factors": (
        "flux", {**FLUX, f"transformer.{Q}.lora_B.bias": np.ones(32, "f4")}, "all zero",
    ),
    "differences of whole weights": (
        "flux", {**FLUX_KOHYA, f"lora_unet_{PROJ}.diff": np.ones((32, 32), "f4")}, "all zero",
    ),
    "a base's first convolution on nine channels": (
        "sdxl-fill",
        {**UNET, "unet.conv_in.lora_A.weight": np.ones((2, 4, 3, 3), "f4"),
         "unet.conv_in.lora_B.weight": np.ones((32, 2, 1, 1), "f4")},
        "takes 9 numbers",
    ),
    "matrices in integers": ("flux", lora({Q: (32, 32)}, dtype=np.int32), "in I32"),
    "only another model's layers": ("flux", lora({"up_blocks.0.proj": (8, 8)}), "another model"),
    "only T5's": ("flux", lora({T5_Q: (32, 32)}, prefix="text_encoder_2."), "changes nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_would_change_the_picture_otherwise_is_refused_by_name(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    model, tensors, message = NOT_SERVED[name]
    path = tmp_path / "x.safetensors"
    write(path, tensors)
    with pytest.raises(BadAdapter, match=message):
        describe_file(path, models[model])


# Names of the first publishers (those of transformers: `test_published_names`)


@pytest.mark.parametrize("xl", [True, False])
def test_every_published_name_of_a_unet_is_diffusers_own_conversion(xl: bool) -> None:
    """SDXL and SD 2.1 in their own size, without weights."""
    from diffusers.loaders.lora_conversion_utils import (
        _convert_non_diffusers_lora_to_diffusers,
        _maybe_map_sgm_blocks_to_diffusers,
    )

    model = unet_of(xl=xl)
    base = BaseLayers({"denoiser": shapes_of(model)}, "unet")
    published = base.published
    assert len(published) == len(shapes_of(model))
    for name, (layer,) in published.items():
        key = f"lora_unet_{flat(name)}.lora_down.weight"
        one = {key: torch.zeros(1, 1), key.replace("down", "up"): torch.zeros(1, 1)}
        named, _ = _convert_non_diffusers_lora_to_diffusers(
            _maybe_map_sgm_blocks_to_diffusers(one, model.config)
        )
        if layer == "up_blocks.0.upsamplers.0.conv" and not xl:
            continue  # diffusers: `up_blocks.0.attentions`, and SD 2.1 has none there
        converted = next(iter(named)).removeprefix("unet.").replace(".processor", "")
        for end in ("_lora.down.weight", ".lora.down.weight"):
            converted = converted.removesuffix(end)
        converted = converted.replace("to_out", "to_out.0")
        assert converted.replace("_", ".") == layer.replace("_", "."), name


def unet_of(*, xl: bool) -> Any:
    from diffusers import UNet2DConditionModel

    attends = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D")
    config: dict[str, Any] = {
        "block_out_channels": (320, 640, 1280) if xl else (320, 640, 1280, 1280),
        "down_block_types": ("DownBlock2D", attends[0], attends[0])
        if xl else (attends[0], attends[0], attends[0], "DownBlock2D"),
        "up_block_types": (attends[1], attends[1], "UpBlock2D")
        if xl else ("UpBlock2D", attends[1], attends[1], attends[1]),
        "cross_attention_dim": 2048 if xl else 1024,
        "use_linear_projection": True,
        "attention_head_dim": (5, 10, 20) if xl else (5, 10, 20, 20),
    }  # fmt: skip
    if xl:
        config |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
            "transformer_layers_per_block": (1, 2, 10),
        }
    with torch.device("meta"):
        return UNet2DConditionModel(**config)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None and module.weight.dim() in (2, 4)
    }


# What a file says of its strength beside the tensors

SAID: dict[str, tuple[Mapping[str, Any], float]] = {
    "diffusers'": ({"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8})}, 2.0),
    "a trainer's": ({"lora_alpha": "8"}, 1.0),
    "kohya's": ({"ss_network_alpha": "2.0", "ss_network_dim": "4"}, 1.0),
    "kohya's, the rank": ({"ss_network_alpha": "4.0"}, 1.0),
    "kohya's, not said": ({"ss_network_alpha": "None"}, 1.0),
    "kohya's, no number": ({"ss_network_alpha": "much"}, 1.0),
}


@pytest.mark.parametrize("name", SAID)
def test_alphas_in_the_header_s_metadata_are_diffusers_alone(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Trainers' say how they were set, and stay where a converter has multiplied the alpha into the
    matrices. Where such a one is not the rank, a note says so.
    """
    metadata, scale = SAID[name]
    path = tmp_path / "x.safetensors"
    write(path, FLUX, **metadata)
    result = deltas(read(path, models["flux"]))
    assert_same(result, {f"denoiser/{Q}": scale * defined(FLUX, f"transformer.{Q}")})
    if name != "diffusers'":  # which wants all of PEFT's configuration there
        assert_same(result, by_diffusers(path, models["flux"]))
    notes = describe_file(path, models["flux"])["notes"]
    is_match = name in ("a trainer's", "kohya's", "kohya's, no number")
    assert [key for note in notes for key in metadata if key in note] == list(metadata)[
        :1
    ] * is_match


def test_a_tensor_s_alpha_is_before_the_trainer_s_metadata(
    models: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {**FLUX, f"transformer.{Q}.alpha": np.array(8.0, "f4")}
    write(path, tensors, ss_network_alpha="1")
    result = deltas(read(path, models["flux"]))
    assert_same(result, {f"denoiser/{Q}": defined(tensors, f"transformer.{Q}")})
    assert describe_file(path, models["flux"])["notes"] == []


# PEFT's folder


@pytest.mark.parametrize("rooted", [False, True])
def test_peft_s_folder_is_served_as_peft_has_it(
    rooted: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    """The folder has several ranks and alphas, and is read as it lies and after the host has it in
    one file. Diffusers reads no adapter_config.json.
    """
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["to_q", "to_k", "proj_out"], init_lora_weights=False,
        rank_pattern={"to_k": 2, "proj_out": 3},
        alpha_pattern={"single_transformer_blocks.0.attn.to_k": 5},
        use_rslora=rooted, fan_in_fan_out=True,
    )  # fmt: skip
    plain: Any = FluxTransformer2DModel.from_pretrained(models["flux"], subfolder="transformer")
    with pytest.warns(UserWarning, match="fan_in_fan_out is set to True but"):
        net: Any = get_peft_model(plain, config)
    net.save_pretrained(tmp_path / "store" / "mine")
    expected = {
        f"denoiser/{name}": layer.get_delta_weight("default").detach().double()
        for name, layer in net.base_model.model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    assert len(expected) > 7
    folder = tmp_path / "store" / "mine"
    assert_same(deltas(read(folder / "adapter_model.safetensors", models["flux"])), expected)
    spec = describe_file(folder, models["flux"])
    assert (spec["name"], spec["rank"], spec["notes"]) == ("mine", 4, [])
    store = store_of(tmp_path, models["flux"])
    known = store.catalogue.find("mine")
    adapter_file = store.fetch("mine", known.version)
    assert (known.rank, known.notes, adapter_file.digest) == (4, (), spec["digest"])
    assert_same(deltas(read(adapter_file.path, models["flux"])), expected)
    version = known.version
    document = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**document, "lora_alpha": 8.0}))
    store.catalogue.scan(at_once=True)
    assert store.catalogue.find("mine").version != version
    store.close()


def test_peft_s_file_without_its_configuration_says_so(
    models: dict[str, Path], tmp_path: Path
) -> None:
    write(tmp_path / "x.safetensors", lora({Q: (32, 32)}, prefix="base_model.model."))
    [note] = describe_file(tmp_path / "x.safetensors", models["flux"])["notes"]
    assert "without its adapter_config.json" in note


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "DoRA"),
    "IA3": ({"peft_type": "IA3"}, "IA3"),
    "biases": ({"bias": "all"}, "with biases"),
    "biases of the factors": ({"lora_bias": True}, "with biases"),
    "whole layers": ({"modules_to_save": ["proj_out"]}, "whole layers"),
    "another base": ({"init_lora_weights": "pissa_niter_16"}, "base's own weights"),
    "another form": ({"lora_alpha": [1]}, "another form"),
    "expressions": ({"lora_alpha": 1, "alpha_pattern": {"(a+)+$": 1}}, "no layer's name"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_mean_more_are_refused_by_name(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    configuration, why = CONFIGS[name]
    write(
        tmp_path / "x" / "adapter_model.safetensors",
        lora({Q: (32, 32)}, prefix="base_model.model."),
    )
    (tmp_path / "x" / "adapter_config.json").write_text(json.dumps(configuration))
    with pytest.raises(BadAdapter, match=why):
        describe_file(tmp_path / "x", models["flux"])


def store_of(tmp_path: Path, model: Path) -> AdapterStore:
    plain = Config(model=ModelConfig(path=str(model)))
    adapters = structs.replace(plain.adapters, store=str(tmp_path / "store"))
    store = AdapterStore(structs.replace(plain, adapters=adapters, runtime_dir=str(tmp_path)))
    store.catalogue.scan()
    return store
