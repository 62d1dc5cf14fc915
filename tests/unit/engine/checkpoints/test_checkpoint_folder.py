"""Checkpoint files become folders with the weights of the diffusers folder they were made from."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from maskserve_common.config import ConfigError
from maskserve_common.config_file import config_of
from maskserve_engine.checkpoints.folder import describe, make_folder, write_tensors
from maskserve_engine.checkpoints.parts import converted_denoiser, denoiser_class
from maskserve_engine.checkpoints.recorded import RecordedTensor
from maskserve_engine.checkpoints.request import CheckpointRequest
from maskserve_engine.checkpoints.stored import StoredTensors
from maskserve_engine.families.specs import load_spec
from maskserve_engine.spec.model_index import read_model_index
from maskserve_engine.stages.loader import load_part
from tests.fakes.checkpoint_files import (
    FORMS,
    denoiser_of,
    mxfp8,
    weights_of,
    write_checkpoint,
    write_gguf_checkpoint,
    write_whole_checkpoint,
)
from tests.fakes.checkpoint_layouts import LAYOUTS, PARTS, flux, z_image
from tests.fakes.checkpoint_layouts import clip as clip_layout
from tests.fakes.tiny_families import FAMILIES
from tests.support.draws import fresh_rng

U8 = torch.ones(4, 8, dtype=torch.uint8)


def mark(**values: object) -> torch.Tensor:
    """ComfyUI's mark of a layer's form."""
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


CLASSES = {
    "z": "ZImageTransformer2DModel",
    "joyimage": "JoyImageEditTransformer3DModel",
    "klein": "Flux2Transformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "flux3": "Flux3Transformer2DModel",
    "qwen": "QwenImageTransformer2DModel",
    "qwen-image-21": "QwenImage21Transformer2DModel",
    "sd3": "SD3Transformer2DModel",
    "sdxl": "UNet2DConditionModel",
    "sd21": "UNet2DConditionModel",
}
PUBLISHED = ("bf16", "fp16", "fp8 scaled")
"""Forms of all models. One model has all forms, for they do not depend on its names."""


def class_of(model: str) -> str:
    return CLASSES.get(model) or CLASSES[model.split("-")[0]]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    root = tmp_path_factory.mktemp("bases")
    return cache(lambda model: FAMILIES[model](root / model))


def folder_of(folder: Path, file: Path, base: Path, **parts: object) -> Path:
    folder.mkdir()
    make_folder(CheckpointRequest(str(file), str(base), folder=str(folder), **parts))  # type: ignore[arg-type]
    return folder


def bare(base: Path, folder: Path) -> Path:
    """Make a copy of a model's folder without weights."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def part_class(folder: Path, name: str) -> Any:
    """The class of a part by the folder's index."""
    library, cls = read_model_index(folder)[name]
    return getattr(importlib.import_module(library), cls)


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], error: float):  # type: ignore[no-untyped-def]
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        bound = error * float(tensor.abs().max())
        assert float((actual[name].float() - tensor.float()).abs().max()) <= bound, name


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("model", "form"),
    [(model, form) for model in LAYOUTS for form in (FORMS if model == "z-image" else PUBLISHED)],
)
def test_a_checkpoint_has_the_weights_of_its_folder(
    bases: Callable[[str], Path],
    tmp_path: Path,
    model: str,
    form: str,
) -> None:
    base = bases(model)
    file = write_checkpoint(model, base, tmp_path / "it.safetensors", form)
    description = describe(file)
    assert description.cls == class_of(model)
    if denoiser_of(base).name != "unet":  # most bytes of a small one are convolutions
        assert description.form == form
    folder = folder_of(tmp_path / "out", file, base)
    assert_near(weights_of(denoiser_of(folder)), weights_of(denoiser_of(base)), FORMS[form][1])
    assert load_spec(folder) == load_spec(base)


@pytest.mark.spread("model")
@pytest.mark.parametrize("model", LAYOUTS)
def test_a_gguf_file_has_the_weights_of_its_folder(
    bases: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    base = bases(model)
    file = write_gguf_checkpoint(model, base, tmp_path / "it.gguf", ("Q8_0", "BF16", "F16"))
    assert describe(file).cls == class_of(model)
    folder = folder_of(tmp_path / "out", file, base)
    assert_near(weights_of(denoiser_of(folder)), weights_of(denoiser_of(base)), 2.0**-7)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"it.gguf is not a GGUF file that is read: .*cut short"):
        describe(file)


def test_a_shape_in_the_metadata_of_gguf_must_be_the_tensors(tmp_path: Path) -> None:
    import gguf

    for shape in ((2, 3), (64, 0), (-4, -16), ("a",), (2.0, 32.0)):
        writer = gguf.GGUFWriter(tmp_path / "it.gguf", "a model")
        writer.add_array("comfy.gguf.orig_shape.a.weight", shape)
        writer.add_tensor("a.weight", np.ones((2, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(
            ConfigError,
            match=r"it.gguf: comfy.gguf.orig_shape.a.weight is no shape of .* 64 numbers",
        ):
            describe(tmp_path / "it.gguf")


@pytest.mark.parametrize("model", PARTS)
def test_a_whole_checkpoint_has_text_encoders_and_vae(
    bases: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    """The parts are loaded as a worker loads them, and compared with those of the base."""
    base = bases(model)
    file = write_whole_checkpoint(model, base, tmp_path / "it.safetensors")
    description = describe(file)
    encoders = [name for name in PARTS[model] if name != "vae"]
    assert (description.vae, description.text_encoders) == (True, len(encoders))
    folder = folder_of(tmp_path / "out", file, bare(base, tmp_path / "bare"))
    for name in (denoiser_of(base).name, *PARTS[model]):
        parts = [
            load_part(config_of({"model": {"path": str(path), "device": "cpu"}}), name, cls)
            for path in (folder, base)
            for cls in [part_class(base, name)]
        ]
        assert_near(parts[0].state_dict(), parts[1].state_dict(), 0.0)


def test_a_clip_without_its_projection_has_the_identity(bases, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """As diffusers and ComfyUI read the smaller CLIP of Stable Diffusion 3.5's files."""
    from transformers import CLIPTextModelWithProjection

    base = tmp_path / "base"
    shutil.copytree(bases("sd3-large"), base)
    encoder = CLIPTextModelWithProjection.from_pretrained(base / "text_encoder")
    encoder.config.hidden_size = encoder.config.projection_dim = 8
    square = CLIPTextModelWithProjection(encoder.config)
    square.save_pretrained(base / "text_encoder")
    clip = clip_layout(weights_of(base / "text_encoder"))
    clip.pop("text_projection.weight")
    save_file(clip, tmp_path / "clip_l.safetensors")
    file = write_checkpoint("sd3-large", base, tmp_path / "it.safetensors")
    folder = folder_of(
        tmp_path / "out", file, base, text_encoders=(str(tmp_path / "clip_l.safetensors"),)
    )
    loaded = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder").state_dict()
    assert torch.equal(loaded.pop("text_projection.weight"), torch.eye(8))
    assert_near(loaded, {n: x for n, x in square.state_dict().items() if n in loaded}, 0.0)


def test_the_default_base_of_a_unet_is_that_of_its_kind(bases, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for model, base in (
        ("sdxl-fill", "diffusers/stable-diffusion-xl-1.0-inpainting-0.1"),
        ("sdxl-base", "stabilityai/stable-diffusion-xl-base-1.0"),
    ):
        for write in (write_checkpoint, write_whole_checkpoint):
            file = write(model, bases(model), tmp_path / "it.safetensors")
            assert describe(file).base == base
    tensors = {name: x.values() for name, x in StoredTensors(file).tensors().items()}
    save_file({**tensors, "edm_mean": torch.zeros(4)}, file)
    assert "playground" in describe(file).base
    refiner = {**tensors, "model.diffusion_model.label_emb.0.0.weight": torch.zeros(8, 2560)}
    save_file(refiner, file)
    with pytest.raises(ConfigError, match=r"it.safetensors is a checkpoint of xl_refiner, which"):
        describe(file)


@pytest.mark.spread("model")
@pytest.mark.parametrize("model", LAYOUTS)
def test_a_file_without_a_tensor_is_refused_by_name(
    bases: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    base = bases(model)
    tensors = LAYOUTS[model](weights_of(denoiser_of(base)))
    lost = sorted(tensors)[fresh_rng().integers(len(tensors))]
    file = tmp_path / "less.safetensors"
    save_file({name: x.contiguous() for name, x in tensors.items() if name != lost}, file)
    sentence = (
        r"less.safetensors (is not a (whole )?checkpoint.*: it|has no tensor for|has no) .*\w"
    )
    with pytest.raises(ConfigError, match=sentence):
        folder_of(tmp_path / "out", file, base)


@pytest.mark.parametrize(
    ("model", "count"), [("klein", "num_single_layers"), ("sd3-large", "num_layers")]
)
def test_a_file_with_more_blocks_than_its_base_is_refused(
    bases: Callable[[str], Path], tmp_path: Path, model: str, count: str
) -> None:
    file = write_checkpoint(model, bases(model), tmp_path / "it.safetensors")
    base = Path(shutil.copytree(bases(model), tmp_path / "base"))
    config = denoiser_of(base) / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, count: values[count] - 1}))
    with pytest.raises(
        ConfigError, match=r"it.safetensors has (single_)?transformer_blocks\..* in a block"
    ):
        folder_of(tmp_path / "out", file, base)


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
    from tests.fakes.checkpoint_files import fp8_scaled

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
    without = bare(base, tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"is missing: .*has no (vae|text_encoder), and"):
        folder_of(tmp_path / "none", file, without)
    text, vae = (weights_of(base / name) for name in ("text_encoder", "vae"))
    save_file(text, tmp_path / "text.safetensors")
    named = folder_of(
        tmp_path / "named", file, without, text_encoders=(str(tmp_path / "text.safetensors"),),
        vae=str(base / "vae"),
    )  # fmt: skip
    inside = {f"text_encoders.qwen3_4b.transformer.{name}": x for name, x in text.items()}
    inside |= {f"vae.{name}": x for name, x in vae.items()}
    save_file(
        {**{name: x.values() for name, x in StoredTensors(file).tensors().items()}, **inside},
        tmp_path / "all.safetensors",
    )
    whole = folder_of(tmp_path / "whole", tmp_path / "all.safetensors", without)
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


@pytest.mark.parametrize(
    "cls",
    ["FluxTransformer2DModel", "ChromaTransformer2DModel", "LongCatImageTransformer2DModel"],
)
def test_flux_and_models_like_it_are_mapped_at_their_published_width(cls: str) -> None:
    """Diffusers' maps know one width. Each row of a matrix repeats one drawn number, so no
    matrix takes memory.
    """
    import diffusers

    model = getattr(diffusers, cls)
    config: dict[str, Any] = {"num_layers": 1, "num_single_layers": 1}
    if cls.startswith("Flux"):
        config["guidance_embeds"] = True
    elif cls.startswith("Chroma"):
        config |= {"approximator_layers": 2}
    with torch.device("meta"):
        expected = model(**config).state_dict()
    rows = {
        name: torch.randn(len(x), *[1] * (x.dim() - 1), dtype=torch.bfloat16)
        for name, x in expected.items()
    }
    recorded = {
        name: RecordedTensor.of(x.to("meta").bfloat16(), partial(rows[name].expand, x.shape))
        for name, x in expected.items()
    }
    published = flux(recorded)
    assert denoiser_class(published)[0] == cls
    mapped = converted_denoiser(published, cls, config, expected)
    assert mapped.keys() == expected.keys()
    for name, tensor in mapped.items():
        assert torch.equal(tensor.values(), rows[name].expand(expected[name].shape)), name
