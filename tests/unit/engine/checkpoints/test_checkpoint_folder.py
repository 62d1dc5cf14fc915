"""Checkpoint files become folders with the weights of the diffusers folder they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from maskserve_common.config import ConfigError
from maskserve_engine.checkpoints.folder import describe, make_folder, write_tensors
from maskserve_engine.checkpoints.parts import converted_denoiser
from maskserve_engine.checkpoints.recorded import RecordedTensor
from maskserve_engine.checkpoints.request import CheckpointRequest
from maskserve_engine.checkpoints.stored import StoredTensors
from maskserve_engine.families.specs import load_spec
from tests.fakes.checkpoint_files import (
    FORMS,
    LAYOUTS,
    mxfp8,
    weights_of,
    write_checkpoint,
    write_gguf_checkpoint,
)
from tests.fakes.tiny_families import FAMILIES

U8 = torch.ones(4, 8, dtype=torch.uint8)


def mark(**values: object) -> torch.Tensor:
    """ComfyUI's mark of a layer's form."""
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


CLASSES = {
    "z-image": "ZImageTransformer2DModel",
    "klein": "Flux2Transformer2DModel",
    "qwen-image-edit": "QwenImageTransformer2DModel",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    root = tmp_path_factory.mktemp("bases")
    return cache(lambda model: FAMILIES[model](root / model))


def folder_of(folder: Path, file: Path, base: Path, **parts: object) -> Path:
    folder.mkdir()
    make_folder(CheckpointRequest(str(file), str(base), folder=str(folder), **parts))  # type: ignore[arg-type]
    return folder


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], error: float):  # type: ignore[no-untyped-def]
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        bound = error * float(tensor.abs().max())
        assert float((actual[name].float() - tensor.float()).abs().max()) <= bound, name


@pytest.mark.parametrize("model", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_has_the_weights_of_its_folder(
    bases: Callable[[str], Path],
    tmp_path: Path,
    model: str,
    form: str,
) -> None:
    base = bases(model)
    file = write_checkpoint(model, base, tmp_path / "it.safetensors", form)
    description = describe(file)
    assert (description.cls, description.form) == (CLASSES[model], form)
    folder = folder_of(tmp_path / "out", file, base)
    assert_near(
        weights_of(folder / "transformer"), weights_of(base / "transformer"), FORMS[form][1]
    )
    assert load_spec(folder) == load_spec(base)


@pytest.mark.parametrize("model", LAYOUTS)
def test_a_gguf_file_has_the_weights_of_its_folder(
    bases: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    base = bases(model)
    file = write_gguf_checkpoint(model, base, tmp_path / "it.gguf", ("Q8_0", "BF16", "F16"))
    assert describe(file).cls == CLASSES[model]
    folder = folder_of(tmp_path / "out", file, base)
    assert_near(weights_of(folder / "transformer"), weights_of(base / "transformer"), 2.0**-7)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"it.gguf is not a GGUF file that is read: .*cut short"):
        describe(file)


def test_marks_in_the_header_are_those_of_layers(
    bases: Callable[[str], Path], tmp_path: Path
) -> None:
    base = bases("z-image")
    tensors = mxfp8(LAYOUTS["z-image"](weights_of(base / "transformer")))
    layers = {
        name.removesuffix(".comfy_quant"): {"format": "mxfp8"}
        for name in list(tensors)
        if name.endswith(".comfy_quant") and tensors.pop(name) is not None
    }
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
    save_file(prefixed, tmp_path / "it.safetensors", metadata)
    folder = folder_of(tmp_path / "out", tmp_path / "it.safetensors", base)
    assert_near(weights_of(folder / "transformer"), weights_of(base / "transformer"), 2.0**-3)


def test_names_without_a_prefix_and_newer_names_of_scales(bases, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from tests.fakes.checkpoint_files import fp8_scaled, z_image

    base = bases("z-image")
    tensors = fp8_scaled(z_image(weights_of(base / "transformer")), "weight_scale")
    tensors.pop("scaled_fp8")
    save_file(tensors, tmp_path / "it.safetensors")
    folder = folder_of(tmp_path / "out", tmp_path / "it.safetensors", base)
    assert_near(weights_of(folder / "transformer"), weights_of(base / "transformer"), 2.0**-3)


def test_shards_are_one_checkpoint(bases, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    base = bases("z-image")
    whole = StoredTensors(write_checkpoint("z-image", base, tmp_path / "it.safetensors"))
    names = sorted(whole.names)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        tensors = whole.tensors()
        write_tensors(
            tmp_path / part, {name: tensors[name] for name in names if weight_map[name] == part}
        )
    index = tmp_path / "it.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    folder = folder_of(tmp_path / "out", index, base)
    assert_near(weights_of(folder / "transformer"), weights_of(base / "transformer"), 0.0)
    index.write_text(json.dumps({"weight_map": {"a": "../it.safetensors"}}))
    with pytest.raises(ConfigError, match=r"names ../it.safetensors; expected: files beside it"):
        StoredTensors(index)


def test_parts_beside_and_inside_the_file(bases, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    base = bases("z-image")
    file = write_checkpoint("z-image", base, tmp_path / "it.safetensors")
    bare = tmp_path / "bare"
    bare.mkdir()
    for child in base.iterdir():
        if child.is_dir():
            (bare / child.name).mkdir()
            for part in child.iterdir():
                if part.suffix != ".safetensors":
                    (bare / child.name / part.name).symlink_to(part)
        else:
            (bare / child.name).symlink_to(child)
    with pytest.raises(ConfigError, match=r"is missing: .*has no (vae|text_encoder), and"):
        folder_of(tmp_path / "none", file, bare)
    text, vae = (weights_of(base / name) for name in ("text_encoder", "vae"))
    save_file(text, tmp_path / "text.safetensors")
    named = folder_of(
        tmp_path / "named", file, bare, text_encoders=(str(tmp_path / "text.safetensors"),),
        vae=str(base / "vae"),
    )  # fmt: skip
    inside = {f"text_encoders.qwen3_4b.transformer.{name}": x for name, x in text.items()}
    inside |= {f"vae.{name}": x for name, x in vae.items()}
    save_file(
        {**{name: x.values() for name, x in StoredTensors(file).tensors().items()}, **inside},
        tmp_path / "all.safetensors",
    )
    whole = folder_of(tmp_path / "whole", tmp_path / "all.safetensors", bare)
    for folder in (named, whole):
        assert_near(weights_of(folder / "text_encoder"), text, 0.0)
        assert_near(weights_of(folder / "vae"), vae, 0.0)


def test_a_text_encoder_of_another_width_is_refused(bases, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    base = bases("z-image")
    file = write_checkpoint("z-image", base, tmp_path / "it.safetensors")
    text = {
        name: torch.cat([x, x], -1) if x.dim() == 2 else x
        for name, x in weights_of(base / "text_encoder").items()
    }
    save_file(text, tmp_path / "wide.safetensors")
    with pytest.raises(ConfigError, match=r"wide.safetensors has .* of shape .*; the model's has"):
        folder_of(tmp_path / "out", file, base, text_encoders=(str(tmp_path / "wide.safetensors"),))


def test_a_file_of_another_family_is_refused(bases, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = write_checkpoint("klein", bases("klein"), tmp_path / "it.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"it.safetensors is a Flux2Transformer2DModel by its tensors' names; "
        "expected: ZImageTransformer2DModel",
    ):
        folder_of(tmp_path / "out", file, bases("z-image"))


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (
            {"a.weight": U8, "a.weight_scale": torch.ones(4), "a.weight_scale_2": torch.ones(1)},
            "is in nvfp4 without ComfyUI's mark",
        ),
        (
            {"a.weight": U8, "a.weight_scale": torch.ones(1, dtype=torch.uint8)},
            "is in mxfp8 without ComfyUI's mark",
        ),
        ({"a.weight": U8, "a.comfy_quant": mark(format="mxfp8")}, "expected of mxfp8: F8_E4M3"),
        ({"a.weight": U8, "a.comfy_quant": mark(format="nvfp4")}, "has no 512 scales of nvfp4"),
        ({"a.weight": U8, "a.comfy_quant": mark(format="w4a8")}, "in ComfyUI's w4a8"),
        (
            {"a.weight": U8, "a.comfy_quant": mark(format="int8_tensorwise", convrot=True)},
            "in ComfyUI's int8_tensorwise with rotated weights",
        ),
        ({"a.comfy_quant": torch.ones(3, dtype=torch.uint8)}, "is no JSON object"),
        ({"a.comfy_quant": torch.ones(5000, dtype=torch.uint8)}, "is too long for a mark"),
        ({"a.qweight": torch.ones(1, dtype=torch.int8)}, "is in Nunchaku's W4A4"),
        ({"a.scale_weight": torch.ones(1)}, "is the scale of a.weight, which is missing"),
        (
            {"a.weight": torch.ones(3, 2, dtype=torch.int8), "a.weight_scale": torch.ones(2)},
            r"a.weight_scale has shape \[2\]; expected: one number, or one for each row",
        ),
    ],
)
def test_forms_that_are_not_read_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], sentence: str
) -> None:
    save_file(tensors, tmp_path / "it.safetensors")
    with pytest.raises(ConfigError, match=sentence):
        StoredTensors(tmp_path / "it.safetensors")


def test_a_file_cut_short_is_refused(bases, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = write_checkpoint("z-image", bases("z-image"), tmp_path / "it.safetensors")
    data = file.read_bytes()
    for length in np.random.default_rng(7).integers(0, len(data), 5):
        file.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"it.safetensors is"):
            describe(file)


def test_recorded_operations_give_the_values_of_plain_ones() -> None:
    plain = torch.arange(24.0).reshape(6, 4)
    recorded = RecordedTensor.of(plain.to("meta"), lambda: plain)

    def operations(tensor: torch.Tensor) -> torch.Tensor:
        first, _, third = torch.chunk(tensor, 3, dim=0)
        joined = torch.cat([third, first], dim=0)
        return joined[1:, None].clone().reshape(3, -1).T.contiguous()

    result = operations(recorded)
    assert isinstance(result, RecordedTensor)
    assert result.is_meta
    assert torch.equal(result.values(), operations(plain))


def test_flux_is_mapped_at_its_published_width() -> None:
    """Diffusers' map of FLUX.1 knows one width; so shapes alone are mapped here."""
    from diffusers import FluxTransformer2DModel

    config = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
    with torch.device("meta"):
        expected = FluxTransformer2DModel(**config).state_dict()
    width = 3072

    def linear(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        shapes = {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
        return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}

    tensors = linear("img_in", width, 64) | linear("txt_in", width, 4096)
    for name, inputs in (("time_in", 256), ("guidance_in", 256), ("vector_in", 768)):
        tensors |= linear(f"{name}.in_layer", width, inputs)
        tensors |= linear(f"{name}.out_layer", width, width)
    for mode in ("img", "txt"):
        block = f"double_blocks.0.{mode}"
        tensors |= linear(f"{block}_mod.lin", 6 * width, width)
        tensors |= linear(f"{block}_attn.qkv", 3 * width, width)
        tensors |= linear(f"{block}_attn.proj", width, width)
        tensors |= linear(f"{block}_mlp.0", 4 * width, width)
        tensors |= linear(f"{block}_mlp.2", width, 4 * width)
        for norm in ("query_norm", "key_norm"):
            tensors[f"{block}_attn.norm.{norm}.scale"] = torch.empty(128, device="meta")
    tensors |= linear("single_blocks.0.linear1", 7 * width, width)
    tensors |= linear("single_blocks.0.linear2", width, 5 * width)
    tensors |= linear("single_blocks.0.modulation.lin", 3 * width, width)
    for norm in ("query_norm", "key_norm"):
        tensors[f"single_blocks.0.norm.{norm}.scale"] = torch.empty(128, device="meta")
    tensors |= linear("final_layer.linear", 64, width)
    tensors |= linear("final_layer.adaLN_modulation.1", 2 * width, width)
    recorded = {
        name: RecordedTensor.of(tensor, lambda: torch.empty(0)) for name, tensor in tensors.items()
    }
    mapped = converted_denoiser(dict(recorded), "FluxTransformer2DModel", config, expected)
    assert mapped.keys() == expected.keys()
