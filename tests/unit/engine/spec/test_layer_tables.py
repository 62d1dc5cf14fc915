"""Tables of layers against the modules of the real diffusers classes, and against torch's own
counter over a whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from maskserve_engine.families.specs import FAMILIES
from maskserve_engine.planning.flops import TERMS, ModelWork
from maskserve_engine.spec.family import StepPicture
from tests.support.flop_count import counted
from tests.support.model_configs import TINY_FLUX, TINY_SD21, TINY_SDXL

pytestmark = pytest.mark.each_value

HEIGHT, WIDTH, TEXT = 8, 12, 5
TOKENS = HEIGHT * WIDTH // 4

_SIZES = {"num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 24}
_SD3 = {**_SIZES, "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 3,
        "caption_projection_dim": 32, "pooled_projection_dim": 10, "pos_embed_max_size": 16,
        "qk_norm": "rms_norm"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    family: str
    model: str
    """Class in diffusers."""
    config: dict[str, Any]
    once: tuple[str, ...] = ()
    """Modules that run once per edit, before its steps, or in place of others of their size."""
    inputs: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Inputs of a whole step; None: the class's step has other work than is counted."""
    vectors: dict[str, int] = field(default_factory=dict)
    """Times that modules run per step, if it is not once."""


def _tokens(config: dict[str, Any], channels: int, *axes: int) -> dict[str, Any]:
    ids = {
        name: torch.zeros(*tokens, axes[0])
        for name, tokens in (("img_ids", (TOKENS,)), ("txt_ids", (TEXT,)))
        if axes
    }
    return {
        "hidden_states": torch.zeros(1, TOKENS, channels),
        "encoder_hidden_states": torch.zeros(1, TEXT, config["joint_attention_dim"]),
        "timestep": torch.ones(1),
        **ids,
    }


def _flux(config: dict[str, Any]) -> dict[str, Any]:
    inputs = _tokens(config, config["in_channels"], 3)
    return {
        **inputs,
        "pooled_projections": torch.zeros(1, config["pooled_projection_dim"]),
        "guidance": torch.ones(1) if config.get("guidance_embeds") else None,
    }


def _sd3(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_tokens(config, 1),
        "hidden_states": torch.zeros(1, config["in_channels"], HEIGHT, WIDTH),
        "pooled_projections": torch.zeros(1, config["pooled_projection_dim"]),
    }


def _qwen_image(config: dict[str, Any]) -> dict[str, Any]:
    shapes = [[(1, HEIGHT // 2, WIDTH // 2)]]
    return {**_tokens(config, config["in_channels"]), "img_shapes": shapes}


CASES = {
    "flux": Case("flux", "FluxTransformer2DModel", TINY_FLUX, inputs=_flux),
    "flux dev": Case(
        "flux", "FluxTransformer2DModel", {**TINY_FLUX, "guidance_embeds": True}, inputs=_flux
    ),
    "chroma": Case(
        "chroma", "ChromaTransformer2DModel",
        {**_SIZES, "in_channels": 12, "num_layers": 2, "num_single_layers": 3,
         "axes_dims_rope": (4, 6, 6), "approximator_num_channels": 16,
         "approximator_hidden_dim": 24, "approximator_layers": 2},
        inputs=lambda config: _tokens(config, 12, 3),
        vectors={"distilled_guidance_layer": 12 * 2 + 3 * 3 + 2},
    ),
    "flux2": Case(
        "flux2", "Flux2Transformer2DModel",
        {**_SIZES, "in_channels": 12, "num_layers": 2, "num_single_layers": 3, "mlp_ratio": 2.5,
         "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 40,
         "guidance_embeds": False},
        inputs=lambda config: {**_tokens(config, 12, 4), "guidance": None},
    ),
    "flux2 dev": Case(
        "flux2", "Flux2Transformer2DModel",
        {**_SIZES, "in_channels": 12, "num_layers": 2, "num_single_layers": 3,
         "axes_dims_rope": (4, 4, 4, 4)},
        inputs=lambda config: {**_tokens(config, 12, 4), "guidance": torch.ones(1)},
    ),
    "flux3": Case(
        "flux3", "Flux3Transformer2DModel",
        {**_SIZES, "in_channels": 12, "cond_in_channels": 12, "num_layers": 2,
         "num_single_layers": 3, "mlp_ratio": 2.5, "axes_dims_rope": (4, 4, 4, 4),
         "timestep_channels": 40, "flow_map": True},
        once=("mode_blocks.image_cond", "x_embedders.image_cond"),
    ),
    "joyimage": Case(
        "joyimage", "JoyImageEditTransformer3DModel",
        {"in_channels": 3, "hidden_size": 32, "num_attention_heads": 2, "text_dim": 24,
         "num_layers": 2, "rope_dim_list": [4, 6, 6]},
    ),  # without inputs: its positions are never on the device of shapes
    "longcat": Case(
        "longcat", "LongCatImageTransformer2DModel",
        {**_SIZES, "in_channels": 12, "num_layers": 2, "num_single_layers": 3,
         "axes_dims_rope": [4, 6, 6]},
        inputs=lambda config: _tokens(config, 12, 3),
    ),
    "qwen_image": Case(
        "qwen_image", "QwenImageTransformer2DModel",
        {**_SIZES, "in_channels": 12, "out_channels": 3, "num_layers": 2,
         "axes_dims_rope": (4, 6, 6)},
        inputs=_qwen_image,
    ),
    "qwen_image21": Case(
        "qwen_image21", "QwenImage21Transformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "context_in_dim": 24,
         "in_channels": 12, "num_layers": 2, "axes_dims_rope": (4, 6, 6), "mlp_ratio": 2},
        once=("txt_in",),
    ),
    "sd3 large": Case("sd3", "SD3Transformer2DModel", _SD3, inputs=_sd3),
    "sd3 medium": Case(
        "sd3", "SD3Transformer2DModel", {**_SD3, "dual_attention_layers": (0, 1)}
    ),
    "sd3, second attention everywhere": Case(
        "sd3", "SD3Transformer2DModel", {**_SD3, "dual_attention_layers": (0, 1, 2)}
    ),
    "z_image": Case(
        "z_image", "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4,
         "n_kv_heads": 4, "cap_feat_dim": 24, "axes_dims": [4, 6, 6], "axes_lens": [64, 64, 64]},
        once=("cap_embedder", "context_refiner"),
    ),
    "sdxl": Case("unet", "UNet2DConditionModel", TINY_SDXL),
    "sd21": Case("unet", "UNet2DConditionModel", TINY_SD21),
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    """Shapes are all that is counted; nothing is computed."""
    with torch.device("meta"):
        yield


def counted_model(case: Case) -> tuple[Any, ModelWork]:
    model, family = getattr(diffusers, case.model)(**case.config), FAMILIES[case.family]
    config = getattr(family, "as_flux", dict)(dict(model.config))
    return model, family.count(config, StepPicture(HEIGHT, WIDTH))


def table_of(work: ModelWork) -> dict[str, float]:
    """Multiply-adds of each layer for one unit, by the layer's name."""
    tables = [
        {f"{block.name}.{name}": shape for name, shape in shapes.items()}
        for block in work.blocks
        for term, shapes in block.layers.items()
        if term != "spare"
    ]
    for fixed in (*work.before, work.after):
        tables += [dict(shapes) for shapes in (*fixed.layers.values(), *fixed.convolutions)]
    return {name: math.prod(shape) for table in tables for name, shape in table.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_table_has_every_layer_of_the_model(case: Case) -> None:
    model, work = counted_model(case)
    expected = {
        name: layer.weight.numel() * case.vectors.get(name.split(".")[0], 1)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d) and not name.startswith(case.once)
    }
    assert table_of(work) == expected


@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.inputs],
    ids=[name for name, case in CASES.items() if case.inputs],
)  # fmt: skip
def test_a_dense_step_is_what_torch_counts(case: Case) -> None:
    model, work = counted_model(case)
    assert case.inputs is not None
    inputs = case.inputs(case.config)
    flops = counted(lambda: model(**inputs))
    assert work.step_flops([work.row_at(1.0, TEXT)], "dense") == flops


def test_the_terms_of_a_block() -> None:
    """FLUX.1 with tokens 4 wide, by hand: a double block has 4 square products and two of four
    widths for a token, 12 vectors for a row, and keys and values for a cached token.
    """
    config = {**TINY_FLUX, "num_attention_heads": 1, "attention_head_dim": 4,
              "num_layers": 1, "num_single_layers": 1}  # fmt: skip
    work = FAMILIES["flux"].count(config, StepPicture(HEIGHT, WIDTH))
    double, single = ({term: getattr(block, term) for term in TERMS} for block in work.blocks)
    token = 4 * 2 * 16 + 2 * 2 * 64
    assert token == 384
    assert double == {
        "row": 384.0, "token": token, "text": token, "spare": 64.0, "pair": 16.0, "cross": 0.0
    }  # fmt: skip
    assert single == {**double, "row": 96.0}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_typical_lora_has_every_linear_layer_of_the_blocks_but_modulation(case: Case) -> None:
    model, work = counted_model(case)
    blocks = tuple(f"{block.name}." for block in work.blocks)
    modulation = ("norm", "img_mod", "txt_mod", "adaLN")
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and name.startswith(blocks)
        and not any(part.startswith(modulation) for part in name.split("."))
    }
    lora, nbytes = work.typical_lora()
    numbers = {name: sum(layer.weight.shape) for name, layer in layers.items()}
    assert nbytes == 2 * sum(numbers.values())
    assert lora == work.lora_work(numbers)
