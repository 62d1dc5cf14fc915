"""LoKr, LoHa and DoRA: by their formulas in float64, and by PEFT, which writes the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from maskserve_engine.adapters.lora_file import read_lora
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter, Layer, header_of_file
from maskserve_lora.lora_plan import check_file
from tests.fakes.loras import Arrays, write
from tests.support.draws import fresh_rng
from tests.support.fused import LAYERS, assert_near, check_fused
from tests.support.lora_oracle import deltas

LINEAR, CONV = (32, 48), (16, 24, 3, 3)
"""Weights of two layers, [out, in] and [out, in, kh, kw]."""
BASE = BaseLayers({"denoiser": {"a.to_q": LINEAR, "a.conv": CONV}}, "unet")
SIDES = {"a.to_q": ((4, 6), (8, 8)), "a.conv": ((4, 3), (4, 8))}
"""Shapes of W1 and W2 of a LoKr of each; a convolution's W2 has its kernel, too."""


def drawn(*shape: int) -> np.ndarray[Any, Any]:
    return fresh_rng().standard_normal(shape).astype(np.float32)


def file_of(folder: Path, tensors: Arrays) -> Path:
    write(folder / "x.safetensors", tensors)
    return folder / "x.safetensors"


def changes(file: Path, base: BaseLayers = BASE) -> dict[str, Tensor]:
    return deltas(read_lora(file, base, "a model"))


@pytest.mark.parametrize("layer", SIDES)
@pytest.mark.parametrize("factored", ["", "1", "2", "12"])
@pytest.mark.parametrize("prefix", ["lycoris_", "diffusion_model.", "lora_unet_"])
@pytest.mark.each_value
def test_lokr_is_kronecker_s_product(
    tmp_path: Path, layer: str, factored: str, prefix: str
) -> None:
    kernel = CONV[2:] if layer == "a.conv" else ()
    name = layer if prefix.endswith(".") else layer.replace(".", "_")
    tensors: Arrays = {f"{prefix}{name}.alpha": np.array(3.0, np.float32)}
    whole = []
    for side, (rows, columns) in zip("12", SIDES[layer], strict=True):
        inner = (columns, *kernel) if side == "2" else (columns,)
        if side in factored:
            pair = drawn(rows, 2), drawn(2, *inner)
            tensors |= {
                f"{prefix}{name}.lokr_w{side}_{end}": x for end, x in zip("ab", pair, strict=True)
            }
            product = np.tensordot(pair[0].astype(np.float64), pair[1], 1)
        else:
            product = drawn(rows, *inner)
            tensors[f"{prefix}{name}.lokr_w{side}"] = product
        whole.append(torch.from_numpy(product.astype(np.float64)))
    first = whole[0][..., None, None] if kernel else whole[0]
    expected = torch.kron(first, whole[1]) * (3.0 / 2 if factored else 1.0)
    assert_near(changes(file_of(tmp_path, tensors))[f"denoiser/{layer}"], expected)


@pytest.mark.parametrize("shape", [LINEAR, CONV])
@pytest.mark.parametrize("rank", [2, 7])
def test_loha_is_hadamard_s_product(tmp_path: Path, shape: tuple[int, ...], rank: int) -> None:
    layer = "a_conv" if len(shape) > 2 else "a_to_q"
    inputs = int(np.prod(shape[1:]))
    pairs = [(drawn(shape[0], rank), drawn(rank, inputs)) for _ in range(2)]
    tensors: Arrays = {f"lycoris_{layer}.alpha": np.array(1.0, np.float32)}
    for side, pair in enumerate(pairs, 1):
        for end, matrix in zip("ab", pair, strict=True):
            tensors[f"lycoris_{layer}.hada_w{side}_{end}"] = matrix
    products = [torch.from_numpy(a).double() @ torch.from_numpy(b).double() for a, b in pairs]
    [actual] = changes(file_of(tmp_path, tensors)).values()
    assert_near(actual, (products[0] * products[1]).view(shape) / rank)


def tiny() -> nn.Module:
    torch.manual_seed(3)
    layers = {"to_q": nn.Linear(48, 32, bias=False), "conv": nn.Conv2d(24, 16, 3, bias=False)}
    return nn.ModuleDict({"a": nn.ModuleDict(layers)})


@pytest.mark.parametrize("layer", ["to_q", "conv"])
@pytest.mark.parametrize("cored", [False, True])
@pytest.mark.parametrize("kind", ["LoKr", "LoHa"])
def test_peft_s_files_mean_what_they_mean_to_peft(
    tmp_path: Path, kind: str, cored: bool, layer: str
) -> None:
    """`cored`: PEFT's use_effective_conv2d, with a core of Tucker's for a convolution."""
    import peft

    config = getattr(peft, f"{kind}Config")(
        r=2, alpha=5, target_modules=[layer], use_effective_conv2d=cored
    )
    model = peft.get_peft_model(tiny(), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    model.save_pretrained(str(tmp_path))
    tuned: Any = model.get_submodule(f"base_model.model.a.{layer}")
    expected = tuned.get_delta_weight("default").detach().double()
    file = tmp_path / "adapter_model.safetensors"
    with safe_open(file, "np") as opened:
        names = list(opened.keys())
    cores = [name for name in names if "_t" in name.split(".")[-1]]
    assert bool(cores) == (cored and layer == "conv")
    [actual] = changes(file).values()
    assert_near(actual, expected.view(actual.shape))


def test_a_lora_with_a_core_is_tucker_s_product(tmp_path: Path) -> None:
    """LyCORIS' formula: core, inputs' and outputs' factors."""
    down, core, up = drawn(3, 24, 1, 1), drawn(2, 3, 3, 3), drawn(16, 2, 1, 1)
    tensors: Arrays = {
        f"lora_unet_a_conv.{name}.weight": x
        for name, x in {"lora_down": down, "lora_mid": core, "lora_up": up}.items()
    }
    tensors["lora_unet_a_conv.alpha"] = np.array(1.0, np.float32)
    [actual] = changes(file_of(tmp_path, tensors)).values()
    expected = np.einsum("ijkl,pi,jr->prkl", core, up[..., 0, 0], down[..., 0, 0])
    assert_near(actual, torch.from_numpy(expected).double() / 2)


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_a_dora_is_fused_by_peft_s_formula(tmp_path: Path, scale: float, tiny_fill: Path) -> None:
    import peft

    def draw(name: str, parameter: Tensor) -> None:
        if "lora_" in name:
            nn.init.uniform_(parameter, 0.1, 0.5)

    peft_config = peft.LoraConfig(r=3, lora_alpha=2, target_modules=LAYERS, use_dora=True)
    check_fused(tiny_fill, tmp_path / "dora", peft_config, draw, scale, "a DoRA")


def test_half_precision_bytes_of_products_are_counted(tmp_path: Path) -> None:
    tensors: Arrays = {"lycoris_a_to_q.lokr_w1": drawn(4, 6), "lycoris_a_to_q.lokr_w2": drawn(8, 8)}
    header = header_of_file(file_of(tmp_path, tensors))
    assert header.layers["denoiser", "a_to_q"] == Layer(32, 48, 32, (), True, -1)
    assert header.product_bytes == 2 * 32 * (48 + 32)


BAD: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "a side is missing": ({"lokr_w1": (4, 6)}, "is not whole: it has no lokr_w2"),
    "a factor is missing": ({"lokr_w1": (4, 6), "lokr_w2_a": (8, 2)}, "has no lokr_w2"),
    "a side twice": (
        {"lokr_w1": (4, 6), "lokr_w2": (8, 8), "lokr_w2_a": (8, 2)},
        "lokr_w2 in another form",
    ),
    "factors of other ranks": (
        {"lokr_w1": (4, 6), "lokr_w2_a": (8, 2), "lokr_w2_b": (3, 8)},
        "do not fit",
    ),
    "other widths": ({"lokr_w1": (4, 6), "lokr_w2": (8, 2)}, "is for another model"),
    "empty": ({"lokr_w1": (0, 6), "lokr_w2": (8, 8)}, "empty"),
    "Hadamard's of two shapes": (
        {"hada_w1_a": (32, 2), "hada_w1_b": (2, 48), "hada_w2_a": (32, 2), "hada_w2_b": (2, 40)},
        "W2 of",
    ),
    "two kinds": ({"lokr_w1": (4, 6), "hada_w1_a": (8, 8)}, "both LoHa and LoKr"),
    "a core alone": ({"lokr_t2": (2, 2, 3, 3)}, "is not whole: it has no lokr_w1"),
    "a core of another rank": (
        {"lokr_w1": (4, 6), "lokr_w2_a": (2, 8), "lokr_w2_b": (2, 8), "lokr_t2": (3, 2, 1, 1)},
        "do not fit their core",
    ),
    "a core in the first side": ({"lokr_t1": (2, 2, 3, 3)}, "a core in its first side"),
    "a core of a LoRA alone": ({"lora_mid.weight": (2, 2, 3, 3)}, "is not whole"),
    "a core that does not fit its factors": (
        {
            "lora_down.weight": (2, 48, 1, 1),
            "lora_mid.weight": (2, 3, 3, 3),
            "lora_up.weight": (32, 2, 1, 1),
        },
        "has a core that does not fit",
    ),
    "a rank beyond the bound": (
        {"hada_w1_a": (32, 5), "hada_w1_b": (5, 48), "hada_w2_a": (32, 5), "hada_w2_b": (5, 48)},
        r"has rank 25 in a_to_q; at most 24 served, and any if it is fused",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_products_are_refused_by_their_header(tmp_path: Path, case: str) -> None:
    shapes, why = BAD[case]
    file = file_of(tmp_path, {f"lycoris_a_to_q.{role}": drawn(*x) for role, x in shapes.items()})
    with pytest.raises(BadAdapter, match=why):
        check_file(file, BASE, max_rank=24)
