"""Each layer of each class that is served, with a LoRA of that layer alone: the latents of
diffusers' pipeline that has loaded the same file by itself; and with one of all layers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from maskserve_engine.adapters.lora_file import read_lora
from maskserve_engine.adapters.text_encoders import TextAdapters
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_lora.base_layers import BaseLayers
from tests.fakes.jobs import Case, config_of, encode_case, random_case, tolerance, unet_case
from tests.fakes.loras import Arrays, of_model, write
from tests.fakes.pipelines import diffusers_edit, diffusers_latents
from tests.fakes.tiny_unet import VARIANTS
from tests.support.draws import fresh_rng
from tests.support.text_loras import served

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]


@pytest.fixture(params=["fill", "inpaint", *VARIANTS])
def folder(
    request: pytest.FixtureRequest, tiny_fill: Path, tiny_inpaint: Path, tiny_unets: dict[str, Path]
) -> Path:
    return {"fill": tiny_fill, "inpaint": tiny_inpaint, **tiny_unets}[request.param]


def pipeline_of(folder: Path) -> Any:
    import diffusers

    index = json.loads((folder / "model_index.json").read_text())
    plain = {"safety_checker": None} if index["_class_name"].startswith("StableDiffusionIn") else {}
    pipe: Any = getattr(diffusers, index["_class_name"]).from_pretrained(folder, **plain)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def layers_of(net: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    """All that multiply, in diffusers' own words."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            yield name, module


def one_layer(name: str, layer: nn.Linear | nn.Conv2d, part: str) -> Arrays:
    """A LoRA of it, of the size of its own weights."""
    rng, (out, *inner) = fresh_rng(), layer.weight.shape
    down = rng.standard_normal((3, *inner)) / np.prod(inner) ** 2.0
    up = rng.standard_normal((out, 3, *([1] * (len(inner) - 1)))) * 2.0
    return {
        f"{part}.{name}.lora_A.weight": down.astype("f4"),
        f"{part}.{name}.lora_B.weight": up.astype("f4"),
    }


def case_of(*, flux: bool, **settings: Any) -> Case:
    """A random edit whose mask covers more than a corner."""
    rng = fresh_rng()
    while True:
        case = random_case(rng, **settings) if flux else unet_case(rng, **settings)
        if case.mask.mean() > 40:
            return case


def test_a_lora_of_all_layers_is_the_pipeline_s(folder: Path, tmp_path: Path) -> None:
    pipe, base, path = pipeline_of(folder), BaseLayers.of_folder(folder), tmp_path / "x.safetensors"
    assert base is not None
    flux = hasattr(pipe, "transformer")
    part = "transformer" if flux else "unet"
    config, net = config_of(folder, model={"outside_noise": "edit"}), getattr(pipe, part)
    encoder, adapter = load_encoder(config), load_adapter(config)
    case = case_of(flux=flux, num_inference_steps=2, strength=1.0, guidance_scale=2.0)
    write(path, of_model(net, 5, f"{part}.{{}}.lora_A.weight"))
    factors, job = read_lora(path, base, str(folder))["denoiser"], encode_case(encoder, case, "r")
    assert set(factors) == {name for name, _ in layers_of(net)}
    row = adapter.dense_row(job)
    adapter.attach(row, job, ((adapter.low_rank(factors), 0.7),))
    while row.step < row.steps:
        adapter.step([row], None)
    plain = by_pipeline(pipe, case, flux=flux)
    load(pipe, path)
    pipe.set_adapters("x", 0.7)
    expected, result = by_pipeline(pipe, case, flux=flux), row.result().array()
    assert np.abs(expected - plain).max() > 1e-2
    assert np.abs(result - expected).max() <= tolerance(expected)


@pytest.mark.slow
def test_each_layer_of_the_denoiser_is_the_pipeline_s(folder: Path, tmp_path: Path) -> None:
    pipe, base = pipeline_of(folder), BaseLayers.of_folder(folder)
    flux = hasattr(pipe, "transformer")
    config = config_of(folder, model={"outside_noise": "edit"})
    encoder, adapter = load_encoder(config), load_adapter(config)
    settings = {"num_inference_steps": 2, "strength": 1.0, "guidance_scale": 2.0}
    case = case_of(flux=flux, **settings)
    job = encode_case(encoder, case, "r")
    plain, path = by_pipeline(pipe, case, flux=flux), tmp_path / "x.safetensors"
    part = "transformer" if flux else "unet"
    net, heard = getattr(pipe, part), list[bool]()
    for name, layer in list(layers_of(net)):
        for _ in range(8):  # draws, until one matters: queries can lie where attention is flat
            write(path, one_layer(name, layer, part))
            load(pipe, path)
            scale, expected = 1.0, by_pipeline(pipe, case, flux=flux)
            # Random weights hear little of a timestep.
            while (little := np.abs(plain - expected).max() <= 10 * tolerance(expected)) and (
                scale < 4**8
            ):
                scale *= 4.0
                pipe.set_adapters("x", scale)
                expected = by_pipeline(pipe, case, flux=flux)
            pipe.delete_adapters("x")
            if not little:
                break
        row = adapter.dense_row(job)
        factors = read_lora(path, base, str(folder))["denoiser"]
        adapter.attach(row, job, ((adapter.low_rank(factors), scale),))
        while row.step < row.steps:
            adapter.step([row], None)
        pixels = row.result().array()
        assert np.abs(pixels - expected).max() <= tolerance(expected), name
        heard.append(not little)
    # Where no draw mattered, a layer that is left out passes; of most layers one mattered.
    assert sum(heard) >= 0.9 * len(heard)


def by_pipeline(pipe: Any, case: Case, *, flux: bool) -> NDArray[np.float32]:
    """[C, h, w] latents of the pipeline."""
    if flux:
        return diffusers_latents(pipe, case)
    latents: Any = diffusers_edit(
        pipe, case.pixels, case.mask, case.prompt, case.settings, case.seed, output_type="latent"
    )
    answer: NDArray[np.float32] = latents[0].numpy()
    return answer


def load(pipe: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe.load_lora_weights(str(path), adapter_name="x")


@pytest.mark.slow
def test_each_layer_of_the_text_encoders_is_the_pipeline_s(folder: Path, tmp_path: Path) -> None:
    """FLUX's T5 is none of them. The last layer of SDXL's first is not read by anybody."""
    pipe = pipeline_of(folder)
    flux = hasattr(pipe, "transformer")
    parts = ["text_encoder"] + ["text_encoder_2"] * (hasattr(pipe, "text_encoder_2") and not flux)
    for part in parts:
        layers = [
            text_layer for name, text_layer in layers_of(getattr(pipe, part)) if "q_proj" in name
        ]
        for name, layer in list(layers_of(getattr(pipe, part))):
            if name == "text_projection":
                continue  # of PEFT's form diffusers cannot load it; kohya's: test_lora_forms
            dotted = name if name.startswith("text_model.") else f"text_model.{name}"
            tensors = one_layer(dotted, layer, part)
            if "q_proj" not in name:  # without any, diffusers cannot tell the file's form
                query = one_layer("text_model.encoder.layers.0.self_attn.q_proj", layers[0], part)
                tensors |= {
                    key: 0 * value if "lora_B" in key else value for key, value in query.items()
                }
            lora_folder = tmp_path / f"{part}.{name}"
            config, [lora] = served(lora_folder, folder, {"x": tensors})
            encoder = load_encoder(config)
            adapters = TextAdapters(config, encoder.text_models)
            before = encoder.encode_prompt("a red star")
            with adapters.applied([lora]):
                result = encoder.encode_prompt("a red star")
            adapters.close()
            fresh = pipeline_of(folder)
            load(fresh, lora_folder / "store" / "x.safetensors")
            for key, expected in embeddings(fresh, flux=flux).items():
                bound = 1e-4 * max(1.0, float(np.abs(expected).max()))
                assert float(np.abs(result[key] - expected).max()) <= bound, (part, name, key)
            same = all(np.array_equal(result[key], before[key]) for key in result)
            unread = part == "text_encoder" and len(parts) == 2 and ".layers.1." in f".{name}"
            assert same == unread, (part, name)


def embeddings(pipe: Any, *, flux: bool) -> dict[str, NDArray[np.float32]]:
    with torch.inference_mode():
        if flux:
            outputs = pipe.encode_prompt(
                "a red star", "a red star", device="cpu", max_sequence_length=16
            )
            return {"prompt_embeds": outputs[0][0].numpy(), "pooled": outputs[1][0].numpy()}
        plain = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}
        outputs = pipe.encode_prompt("a red star", device="cpu", **plain)
    result = {"prompt_embeds": outputs[0][0].numpy()}
    if len(outputs) > 2:
        result["pooled"] = outputs[2][0].numpy()
    return result
