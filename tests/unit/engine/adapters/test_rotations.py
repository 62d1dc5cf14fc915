"""OFT: by PEFT, which writes the files, and by LyCORIS' and kohya's formula in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maskserve_engine.adapters.lora_file import changes_of
from maskserve_engine.adapters.oft import OftUpdate
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.lora_plan import check_file
from maskserve_lora.store import describe_file
from tests.fakes.loras import Arrays, write
from tests.support.draws import fresh_rng
from tests.support.fused import LAYERS, assert_near, check_fused

LINEAR, CONV = (32, 48), (16, 24, 3, 3)
"""Weights of two layers, [out, in] and [out, in, kh, kw]."""
UNET = BaseLayers({"denoiser": {"a.to_q": LINEAR, "a.conv": CONV}}, "unet")
_ATTENTION = "transformer_blocks.0.attn"
FLUX = BaseLayers(
    {"denoiser": {f"{_ATTENTION}.to_{x}": (12, 12) for x in "qkv"} | {"norm_out.linear": (24, 12)}}
)


def drawn(*shape: int) -> np.ndarray[Any, Any]:
    return (0.3 * fresh_rng().standard_normal(shape)).astype(np.float32)


def file_of(folder: Path, tensors: Arrays) -> Path:
    write(folder / "x.safetensors", tensors)
    return folder / "x.safetensors"


def rotated(file: Path, base: BaseLayers, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the new weights of the layers that a file rotates."""
    result = {}
    for change in changes_of(file, base, "a model", fused=True):
        assert isinstance(change.update, OftUpdate)
        result[change.layer] = change.update.applied(weights[change.layer].float())
    return result


SETTINGS: dict[str, dict[str, Any]] = {
    "as by default": {"oft_block_size": 8},
    "of few blocks": {"r": 2, "oft_block_size": 0},
    "of one term": {"oft_block_size": 8, "num_cayley_neumann_terms": 1},
    "of two terms": {"oft_block_size": 8, "num_cayley_neumann_terms": 2},
    "of three terms": {"oft_block_size": 8, "num_cayley_neumann_terms": 3},
    "of seven terms": {"oft_block_size": 8, "num_cayley_neumann_terms": 7},
    "an inverse": {"oft_block_size": 8, "use_cayley_neumann": False},
    "one block for all": {"oft_block_size": 12, "block_share": True},
    "bounded": {"oft_block_size": 8, "coft": True, "eps": 0.7},
}


@pytest.mark.parametrize("layer", ["to_q", "conv"])
@pytest.mark.parametrize("name", SETTINGS)
def test_peft_s_files_mean_what_they_mean_to_peft(tmp_path: Path, name: str, layer: str) -> None:
    import peft

    torch.manual_seed(3)
    layers = {"to_q": nn.Linear(48, 32), "conv": nn.Conv2d(24, 16, 3)}
    base: Any = nn.ModuleDict({"a": nn.ModuleDict(layers)})
    weight = base.a[layer].weight.detach().clone()
    tuned: Any = peft.get_peft_model(base, peft.OFTConfig(target_modules=[layer], **SETTINGS[name]))
    for key, parameter in tuned.named_parameters():
        if "oft_R" in key:
            nn.init.normal_(parameter, std=0.1)
    tuned.save_pretrained(str(tmp_path))
    expected = tuned.merge_and_unload().a[layer].weight.detach()
    assert name == "of one term" or not torch.equal(expected, weight)
    file = tmp_path / "adapter_model.safetensors"
    [actual] = rotated(file, UNET, {f"a.{layer}": weight}).values()
    assert_near(actual.double(), expected.double())


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_an_oft_is_fused_by_its_scale_s_share(
    tmp_path: Path, scale: float, tiny_fill: Path
) -> None:
    import peft

    def draw(name: str, parameter: Tensor) -> None:
        if "oft_R" in name:
            nn.init.normal_(parameter, std=0.2)

    peft_config = peft.OFTConfig(oft_block_size=4, target_modules=LAYERS)
    check_fused(tiny_fill, tmp_path / "oft", peft_config, draw, scale, "an OFT", names_file=False)


def by_formula(blocks: np.ndarray[Any, Any], weight: Tensor, bound: float) -> Tensor:
    """W' = Rᵀ W of kohya and LyCORIS, block by block."""
    skew = torch.from_numpy(blocks).double()
    skew = skew - skew.mT
    norm = float(skew.norm())
    if 0 < bound < norm:
        skew = skew * (bound / norm)
    side, rows = skew.shape[1], weight.double().flatten(1).clone()
    for number, q in enumerate(skew):
        one = torch.eye(side, dtype=torch.float64)
        rotation = (one + q) @ (one - q).inverse()
        rotated_rows = slice(number * side, (number + 1) * side)
        rows[rotated_rows] = rotation.T @ rows[rotated_rows]
    return rows.view(weight.shape)


@pytest.mark.parametrize("layer", ["a.to_q", "a.conv"])
@pytest.mark.parametrize("prefix", ["lycoris_", "oft_unet_", "lora_unet_"])
@pytest.mark.parametrize("alpha", [None, 0.0, 0.01, 100.0])
@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.each_value
def test_rows_are_rotated_by_lycoris_formula(
    tmp_path: Path, rescaled: bool, alpha: float | None, prefix: str, layer: str
) -> None:
    """An alpha times the number of outputs bounds the norm; one of 0, or none, bounds nothing."""
    weight = torch.from_numpy(drawn(*UNET.shape("denoiser", layer)))
    outputs, name = len(weight), f"{prefix}{layer.replace('.', '_')}"
    blocks, lengths = drawn(outputs // 4, 4, 4), drawn(outputs, *[1] * (weight.dim() - 1))
    tensors: Arrays = {f"{name}.oft_blocks": blocks}
    expected = by_formula(blocks, weight, (alpha or 0) * outputs)
    if alpha is not None:
        tensors[f"{name}.alpha"] = np.array(alpha, np.float32)
    if rescaled:
        tensors[f"{name}.rescale"] = lengths
        expected = expected * torch.from_numpy(lengths)
    [actual] = rotated(file_of(tmp_path, tensors), UNET, {layer: weight}).values()
    assert_near(actual.double(), expected)
    if alpha == 0.01 and not rescaled:
        assert not torch.allclose(actual.double(), by_formula(blocks, weight, 0), atol=1e-3)


@pytest.mark.parametrize("split", [False, True])
def test_joined_layers_are_rotated_each_by_its_blocks(tmp_path: Path, split: bool) -> None:
    """LyCORIS bounds the blocks of a joined layer together; kohya has `split` them by layer."""
    weights = {f"{_ATTENTION}.to_{x}": torch.from_numpy(drawn(12, 12)) for x in "qkv"}
    blocks, name = drawn(9, 4, 4), "_double_blocks_0_img_attn_qkv"
    tensors: Arrays = {f"lycoris{name}.oft_blocks": blocks}
    if split:
        tensors = {f"oft_unet{name}.oft_blocks.{n}": blocks[3 * n : 3 * n + 3] for n in range(3)}
    [alpha] = [f"{key.partition('.')[0]}.alpha" for key in list(tensors)[:1]]
    tensors[alpha] = np.array(0.02, np.float32)
    actual = rotated(file_of(tmp_path, tensors), FLUX, weights)
    if split:
        parts = [
            by_formula(blocks[3 * n : 3 * n + 3], w, 0.02 * 12)
            for n, w in enumerate(weights.values())
        ]
        expected = torch.cat(parts)
    else:
        expected = by_formula(blocks, torch.cat(list(weights.values())), 0.02 * 36)
    assert_near(torch.cat([actual[name] for name in weights]).double(), expected)


def test_halves_that_have_been_swapped_are_rotated_where_they_are(tmp_path: Path) -> None:
    weight, blocks = torch.from_numpy(drawn(24, 12)), drawn(6, 4, 4)
    name = "lycoris_final_layer_adaLN_modulation_1"
    published = torch.cat([weight[12:], weight[:12]])
    expected = by_formula(blocks, published, 0)
    [actual] = rotated(
        file_of(tmp_path, {f"{name}.oft_blocks": blocks}), FLUX, {"norm_out.linear": weight}
    ).values()
    assert_near(actual.double(), torch.cat([expected[12:], expected[:12]]))


@pytest.mark.parametrize("layer", ["a.to_q", "a.conv"])
def test_onetrainer_s_files_have_peft_s_rotations_without_a_configuration(
    tmp_path: Path, layer: str
) -> None:
    """Its layers are W Rᵀ, its convolutions W R."""
    weight = torch.from_numpy(drawn(*UNET.shape("denoiser", layer)))
    inputs = weight.flatten(1).shape[1]
    numbers = drawn(inputs // 8, 28) / 3
    file = file_of(tmp_path, {f"lora_unet_{layer.replace('.', '_')}.oft_R.weight": numbers})
    rotations = []
    for row in numbers:
        q = torch.zeros(8, 8, dtype=torch.float64)
        q[tuple(torch.triu_indices(8, 8, 1))] = torch.from_numpy(row).double()
        q = q - q.T
        rotations.append(torch.eye(8) + 2 * q + 2 * q @ q + 2 * q @ q @ q + q @ q @ q @ q)
    whole = torch.block_diag(*rotations)
    expected = weight.double().flatten(1) @ (whole if weight.dim() == 4 else whole.T)
    [actual] = rotated(file, UNET, {layer: weight}).values()
    assert_near(actual.double(), expected.view(weight.shape))


BAD: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "other rows": ({"oft_blocks": (4, 4, 4)}, "is for another model: .* rotates 16 rows"),
    "other columns": ({"oft_R.weight": (2, 28)}, "is for another model: .* rotates 16 columns"),
    "one block that does not divide": ({"oft_R.weight": (1, 21)}, "rotates 7 columns"),
    "no square": ({"oft_blocks": (4, 4, 8)}, r"oft_blocks in another form, \[4, 4, 8\]"),
    "empty": ({"oft_blocks": (0, 4, 4)}, "in another form"),
    "no triangle": ({"oft_R.weight": (2, 7)}, r"oft_R in another form, \[2, 7\]"),
    "blocks of one": ({"oft_R.weight": (48, 0)}, "in another form"),
    "a vector": ({"oft_R.weight": (28,)}, "in another form"),
    "a BOFT": ({"oft_blocks": (3, 8, 4, 4)}, "of a BOFT"),
    "rescale alone": ({"rescale": (32, 1)}, "is not whole: it has no oft_blocks"),
    "rescale of other rows": ({"oft_blocks": (8, 4, 4), "rescale": (16, 1)}, "rescale of shape"),
    "rescale of columns": ({"oft_blocks": (8, 4, 4), "rescale": (1, 32)}, "rescale of shape"),
    "a part is missing": ({"oft_blocks.0": (4, 4, 4), "oft_blocks.2": (4, 4, 4)}, "is not whole"),
    "rows and columns": ({"oft_blocks": (8, 4, 4), "oft_R.weight": (6, 28)}, "other matrices"),
    "with a magnitude": ({"oft_blocks": (8, 4, 4), "dora_scale": (32, 1)}, "with a DoRA"),
    "columns with an alpha": ({"oft_R.weight": (6, 28), "alpha": ()}, "or an alpha"),
    "alphas": ({"oft_blocks": (8, 4, 4), "alpha": (2,)}, "not a single number"),
    "a LoHa, too": ({"oft_blocks": (8, 4, 4), "hada_w1_a": (4, 4)}, "both LoHa and OFT"),
    "a LoRA, too": ({"oft_blocks": (8, 4, 4), "lora_up.weight": (4, 4)}, "both LoRA and OFT"),
    "PEFT's old": ({"oft_r": (2, 6, 6)}, "OFT of another form"),
    "OneTrainer's scaled": (
        {"oft_R.weight": (6, 28), "oft_R.scaled_oft": ()},
        "OFT of another form",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_ofts_are_refused_by_their_header(tmp_path: Path, case: str) -> None:
    shapes, why = BAD[case]
    file = file_of(
        tmp_path, {f"lycoris_a_to_q.{role}": np.array(drawn(*x)) for role, x in shapes.items()}
    )
    with pytest.raises(BadAdapter, match=why):
        check_file(file, UNET, fused=True)


def test_blocks_across_two_layers_are_refused(tmp_path: Path) -> None:
    name = "lycoris_double_blocks_0_img_attn_qkv"
    file = file_of(tmp_path, {f"{name}.oft_blocks": drawn(4, 9, 9)})
    with pytest.raises(BadAdapter, match="has blocks across two layers in double_blocks_0"):
        check_file(file, FLUX, fused=True)


@pytest.mark.parametrize("alpha", [np.inf, np.nan])
def test_an_alpha_that_is_no_number_is_refused(tmp_path: Path, alpha: float) -> None:
    name = "lycoris_a_to_q"
    tensors: Arrays = {
        f"{name}.oft_blocks": drawn(8, 4, 4),
        f"{name}.alpha": np.array(alpha, np.float32),
    }
    with pytest.raises(BadAdapter, match=r"holds NaN or infinity in lycoris_a_to_q\.alpha"):
        check_file(file_of(tmp_path, tensors), UNET, fused=True)


def test_numbers_that_make_no_rotation_are_refused(tmp_path: Path) -> None:
    tensors: Arrays = {"lora_unet_a_to_q.oft_R.weight": np.full((6, 28), 1e20, np.float32)}
    file = file_of(tmp_path, tensors)
    check_file(file, UNET, fused=True)
    with pytest.raises(BadAdapter, match=r"numbers for a\.to_q that are too large for a rotation"):
        rotated(file, UNET, {"a.to_q": torch.ones(LINEAR)})


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "BOFT": ({"peft_type": "BOFT"}, "BOFT"),
    "biases": ({"peft_type": "OFT", "bias": "oft_only"}, "with biases"),
    "endless terms": ({"peft_type": "OFT", "num_cayley_neumann_terms": 10**9}, "of another form"),
    "a word for a flag": ({"peft_type": "OFT", "coft": "yes"}, "of another form"),
    "a bound below 0": ({"peft_type": "OFT", "eps": -1.0}, "of another form"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_that_are_not_served_are_refused(tmp_path: Path, name: str) -> None:
    configuration, why = CONFIGS[name]
    write(
        tmp_path / "adapter_model.safetensors",
        {"base_model.model.a.to_q.oft_R.weight": drawn(6, 28)},
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(configuration))
    with pytest.raises(BadAdapter, match=why):
        check_file(tmp_path / "adapter_model.safetensors", UNET, fused=True)


def test_peft_s_file_without_its_configuration_says_so(tmp_path: Path, tiny_fill: Path) -> None:
    name = f"base_model.model.{_ATTENTION}.to_q"
    _, inputs = BaseLayers.of_folder(tiny_fill).shape("denoiser", f"{_ATTENTION}.to_q")
    file = file_of(tmp_path, {f"{name}.oft_R.weight": drawn(inputs // 4, 6)})
    [note] = describe_file(file, tiny_fill, fused=True)["notes"]
    assert "with PEFT's own settings" in note
    assert "adapter_config.json" in note
