"""What LoRAs add to the text encoders: the pipeline's own embeddings, and no trace afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskserve_core.adapters.store import AdapterStore
from maskserve_core.config import Config, ModelConfig
from maskserve_core.contracts.settings import Lora
from maskserve_core.errors import InvalidRequest, Overloaded
from maskserve_engine.adapters.text_encoders import TextAdapters
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from tests.fakes.loras import Arrays, lora, write

Embedding = Mapping[str, NDArray[np.float32]]
LAYERS = {
    "text_model.encoder.layers.0.self_attn.q_proj": (32, 32),
    "text_model.encoder.layers.0.self_attn.out_proj": (32, 32),
    "text_model.encoder.layers.0.mlp.fc1": (32, 32),
}
PROMPT = "a red star on a blue hill"


def served(folder: Path, model: Path, files: Mapping[str, Arrays]) -> tuple[Config, list[Lora]]:
    """A worker's configuration with these adapters in the host's memory, and the adapters."""
    for name, tensors in files.items():
        write(folder / "store" / f"{name}.safetensors", tensors)
    plain = Config(model=ModelConfig(path=str(model), max_sequence_length=16))
    adapters = replace(plain.adapters, store=str(folder / "store"))
    config = replace(plain, adapters=adapters, runtime_dir=str(folder))
    store = AdapterStore(config)
    store.catalogue.scan()
    found = []
    for name in files:
        version = store.catalogue.find(name).version
        store.fetch(name, version)
        found.append(Lora(name, 1.0, version, text=True))
    store.close()
    return config, found


def of_text(*parts: str, rank: int = 4) -> Arrays:
    """A LoRA of these text encoders, of the size of their own weights."""
    drawn: Arrays = {}
    for part in parts:
        drawn |= lora(LAYERS, rank, f"{part}.")
    return {name: (0.2 * value).astype(np.float32) for name, value in drawn.items()}


def same(found: Embedding, expected: Embedding) -> None:
    for name, value in expected.items():
        bound = 1e-4 * max(1.0, float(np.abs(value).max()))
        assert float(np.abs(found[name] - value).max()) <= bound, name


def unlike(found: Embedding, expected: Embedding) -> None:
    assert any(float(np.abs(found[name] - expected[name]).max()) > 1e-2 for name in expected)


def bits(found: Embedding, expected: Embedding) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def by_pipeline(cls: Any, model: Path, folder: Path, scales: Mapping[str, float]) -> Embedding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = cls.from_pretrained(model)
        for name in scales:
            pipe.load_lora_weights(str(folder / "store" / f"{name}.safetensors"), adapter_name=name)
        pipe.set_adapters(list(scales), list(scales.values()))
        with torch.inference_mode():
            if cls.__name__.startswith("Flux"):
                given = pipe.encode_prompt(PROMPT, PROMPT, device="cpu", max_sequence_length=16)
                return {"prompt_embeds": given[0][0].numpy(), "pooled": given[1][0].numpy()}
            plain = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}
            given = pipe.encode_prompt(PROMPT, device="cpu", **plain)
    found = {"prompt_embeds": given[0][0].numpy()}
    if "XL" in cls.__name__:
        found["pooled"] = given[2][0].numpy()
    return found


CASES = {
    "FLUX": ("FluxInpaintPipeline", ("text_encoder",)),
    "SD 2.1": ("StableDiffusionInpaintPipeline", ("text_encoder",)),
    "SDXL": ("StableDiffusionXLInpaintPipeline", ("text_encoder", "text_encoder_2")),
}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest, tiny_inpaint: Path, tiny_unets: dict[str, Path]
) -> tuple[Any, Path, tuple[str, ...]]:
    import diffusers

    name, parts = CASES[request.param]
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
    files = {"one": of_text(*parts), "two": of_text(*parts, rank=3)}
    config, (one, two) = served(tmp_path, model, files)
    encoder = load_encoder(config)
    adapters = TextAdapters(config, encoder.text_models)
    before = encoder.encode_prompt(PROMPT)
    for scales in ({"one": 1.0}, {"one": 0.7, "two": -1.3}):
        known = {each.name: each for each in (one, two)}
        asked = [replace(known[name], scale=scale) for name, scale in scales.items()]
        with adapters.applied(asked):
            found = encoder.encode_prompt(PROMPT)
        unlike(found, before)
        same(found, by_pipeline(pipeline, model, tmp_path, scales))
    bits(encoder.encode_prompt(PROMPT), before)
    with adapters.applied([replace(one, scale=0.0)]):
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
    made, config, (first, second, _) = encoder
    adapters = TextAdapters(config, made.text_models)

    def hooks() -> int:  # transformers has some of its own
        modules = (module for each in made.text_models.values() for module in each.modules())
        return sum(len(module._forward_hooks) for module in modules)

    before, hooks_before = made.encode_prompt(PROMPT), hooks()
    with pytest.raises(RuntimeError), adapters.applied([first]):
        raise RuntimeError
    gone = replace(second, version="0" * 32)
    with pytest.raises(Overloaded, match="send the edit again"), adapters.applied([first, gone]):
        pass
    bits(made.encode_prompt(PROMPT), before)
    assert hooks() == hooks_before


def test_adapters_without_a_text_part_need_no_file(
    encoder: tuple[Encoder, Config, list[Lora]],
) -> None:
    made, config, _ = encoder
    adapters = TextAdapters(config, made.text_models)
    with adapters.applied([Lora("elsewhere", 1.0, "1" * 32)]):
        made.encode_prompt(PROMPT)


def test_few_bytes_stay_with_the_encoders(
    encoder: tuple[Encoder, Config, list[Lora]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, config, loras = encoder
    adapters = TextAdapters(config, made.text_models)
    for lora_ in (*loras, loras[0]):
        with adapters.applied([lora_]):
            made.encode_prompt(PROMPT)
    assert list(adapters._held) == [loras[1].version, loras[2].version, loras[0].version]
    monkeypatch.setattr(TextAdapters, "HELD_BYTES", 1)
    with adapters.applied([loras[1]]):
        made.encode_prompt(PROMPT)
    assert list(adapters._held) == [loras[1].version]


def test_a_file_of_another_model_is_refused(
    encoder: tuple[Encoder, Config, list[Lora]], tmp_path: Path
) -> None:
    made, config, (first, *_) = encoder
    adapters = TextAdapters(config, made.text_models)
    [path] = adapters._store.host.folder.glob(f"{first.name}@*.safetensors")
    write(path, lora({"text_model.encoder.layers.7.mlp.fc1": (32, 32)}, prefix="text_encoder."))
    with (
        pytest.raises(InvalidRequest, match="adapter a is for another model"),
        adapters.applied([first]),
    ):
        pass
