"""LoRAs of the text encoders give the pipeline's own embeddings, and leave no trace afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from numpy.typing import NDArray

from maskserve_common.config import Config
from maskserve_common.contracts.request import Lora
from maskserve_common.errors import InvalidRequest, Overloaded
from maskserve_engine.adapters.text_encoders import TextAdapters
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from tests.fakes.loras import lora, write
from tests.fakes.tiny_sd3 import build_tiny_sd3
from tests.support.text_loras import of_text, served

Embedding = Mapping[str, NDArray[np.float32]]
PROMPT = "a red star on a blue hill"


def same(result: Embedding, expected: Embedding) -> None:
    for name, value in expected.items():
        bound = 1e-4 * max(1.0, float(np.abs(value).max()))
        assert float(np.abs(result[name] - value).max()) <= bound, name


def unlike(result: Embedding, expected: Embedding) -> None:
    assert any(float(np.abs(result[name] - expected[name]).max()) > 1e-2 for name in expected)


def bits(result: Embedding, expected: Embedding) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(result[name], value)


def by_pipeline(cls: Any, model: Path, folder: Path, scales: Mapping[str, float]) -> Embedding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = cls.from_pretrained(model)
        for name in scales:
            pipe.load_lora_weights(str(folder / "store" / f"{name}.safetensors"), adapter_name=name)
        pipe.set_adapters(list(scales), list(scales.values()))
        with torch.inference_mode():
            if cls.__name__.startswith("Flux"):
                outputs = pipe.encode_prompt(PROMPT, PROMPT, device="cpu", max_sequence_length=16)
                return {"prompt_embeds": outputs[0][0].numpy(), "pooled": outputs[1][0].numpy()}
            if cls.__name__.startswith("StableDiffusion3"):
                outputs = pipe.encode_prompt(
                    PROMPT, None, None, do_classifier_free_guidance=False, max_sequence_length=16
                )
                return {"prompt_embeds": outputs[0][0].numpy(), "pooled": outputs[2][0].numpy()}
            plain = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}
            outputs = pipe.encode_prompt(PROMPT, device="cpu", **plain)
    result = {"prompt_embeds": outputs[0][0].numpy()}
    if "XL" in cls.__name__:
        result["pooled"] = outputs[2][0].numpy()
    return result


CASES = {
    "FLUX": ("FluxInpaintPipeline", ("text_encoder",)),
    "SD 2.1": ("StableDiffusionInpaintPipeline", ("text_encoder",)),
    "SDXL": ("StableDiffusionXLInpaintPipeline", ("text_encoder", "text_encoder_2")),
    "SD 3.5": ("StableDiffusion3InpaintPipeline", ("text_encoder", "text_encoder_2")),
}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest,
    tiny_inpaint: Path,
    tiny_unets: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, Path, tuple[str, ...]]:
    import diffusers

    name, parts = CASES[request.param]
    if request.param == "SD 3.5":
        folder = build_tiny_sd3(tmp_path_factory.mktemp("models") / "sd3")
        return getattr(diffusers, name), folder, parts
    models = {
        "FLUX": tiny_inpaint,
        "SD 2.1": tiny_unets["sd-base"],
        "SDXL": tiny_unets["sdxl-base"],
    }
    return getattr(diffusers, name), models[request.param], parts


def test_embeddings_are_those_of_the_pipeline_with_its_loras(
    case: tuple[Any, Path, tuple[str, ...]], tmp_path: Path
) -> None:
    pipeline, model, parts = case
    width, inner = (12, {"text_encoder_2": 40}) if "Diffusion3" in pipeline.__name__ else (32, {})
    files = {
        "one": of_text(*parts, width=width, inner=inner),
        "two": of_text(*parts, rank=3, width=width, inner=inner),
    }
    config, (one, two) = served(tmp_path, model, files)
    encoder = load_encoder(config)
    adapters = TextAdapters(config, encoder.text_models)
    before = encoder.encode_prompt(PROMPT)
    for scales in ({"one": 1.0}, {"one": 0.7, "two": -1.3}):
        known = {text_lora.name: text_lora for text_lora in (one, two)}
        loras = [structs.replace(known[name], scale=scale) for name, scale in scales.items()]
        with adapters.applied(loras):
            result = encoder.encode_prompt(PROMPT)
        unlike(result, before)
        same(result, by_pipeline(pipeline, model, tmp_path, scales))
    bits(encoder.encode_prompt(PROMPT), before)
    with adapters.applied([structs.replace(one, scale=0.0)]):
        bits(encoder.encode_prompt(PROMPT), before)
    adapters.close()


@pytest.fixture
def encoder(tiny_unets: dict[str, Path], tmp_path: Path) -> tuple[Encoder, Config, list[Lora]]:
    files = {name: of_text("text_encoder", "text_encoder_2") for name in "abc"}
    config, loras = served(tmp_path, tiny_unets["sdxl-base"], files)
    return load_encoder(config), config, loras


def test_an_edit_that_fails_leaves_no_trace(
    encoder: tuple[Encoder, Config, list[Lora]],
) -> None:
    text_encoder, config, (first, second, _) = encoder
    adapters = TextAdapters(config, text_encoder.text_models)

    def hooks() -> int:  # transformers has some of its own
        modules = (
            module
            for text_model in text_encoder.text_models.values()
            for module in text_model.modules()
        )
        return sum(len(module._forward_hooks) for module in modules)

    before, hooks_before = text_encoder.encode_prompt(PROMPT), hooks()
    with pytest.raises(RuntimeError), adapters.applied([first]):
        raise RuntimeError
    absent = structs.replace(second, version="0" * 32)
    with pytest.raises(Overloaded, match="send the edit again"), adapters.applied([first, absent]):
        pass
    bits(text_encoder.encode_prompt(PROMPT), before)
    assert hooks() == hooks_before


def test_adapters_without_a_text_part_need_no_file(
    encoder: tuple[Encoder, Config, list[Lora]],
) -> None:
    text_encoder, config, _ = encoder
    adapters = TextAdapters(config, text_encoder.text_models)
    with adapters.applied([Lora(name="elsewhere", version="1" * 32)]):
        text_encoder.encode_prompt(PROMPT)


def test_few_bytes_stay_with_the_encoders(
    encoder: tuple[Encoder, Config, list[Lora]],
) -> None:
    text_encoder, config, loras = encoder
    adapters = TextAdapters(config, text_encoder.text_models)
    for lora_ in (*loras, loras[0]):
        with adapters.applied([lora_]):
            text_encoder.encode_prompt(PROMPT)
    assert list(adapters._loaded_parts) == [loras[1].version, loras[2].version, loras[0].version]
    narrow = TextAdapters(config, text_encoder.text_models, most_bytes=1)
    for lora_ in (loras[0], loras[1]):
        with narrow.applied([lora_]):
            text_encoder.encode_prompt(PROMPT)
        assert list(narrow._loaded_parts) == [lora_.version]


def test_a_file_of_another_model_is_refused(
    encoder: tuple[Encoder, Config, list[Lora]], tmp_path: Path
) -> None:
    text_encoder, config, (first, *_) = encoder
    adapters = TextAdapters(config, text_encoder.text_models)
    [path] = adapters._store.host.folder.glob(f"{first.name}@*.safetensors")
    write(path, lora({"text_model.encoder.layers.7.mlp.fc1": (32, 32)}, prefix="text_encoder."))
    with (
        pytest.raises(InvalidRequest, match="adapter a is for another model"),
        adapters.applied([first]),
    ):
        pass
