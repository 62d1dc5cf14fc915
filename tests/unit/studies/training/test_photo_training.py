"""How the photo model learns: what it is fed, and that a run goes on where the last one stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from PIL import Image
from safetensors.torch import load_file

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.demo_model.prompts import MAX_SEQUENCE_LENGTH
from maskserve_benchmarks.demo_model.scenes import Picture
from maskserve_studies.photo_model import command
from maskserve_studies.photo_model.scenes import Stock, draw_example
from maskserve_studies.photo_model.sources import SOURCES, textures
from maskserve_studies.photo_model.words import LOOKS, THINGS, draw_prompts, words
from maskserve_studies.training import photo
from maskserve_studies.training.attention import MatmulAttention
from maskserve_studies.training.command import start_helpers
from maskserve_studies.training.export import assemble, export
from maskserve_studies.training.text import Language, train_text
from maskserve_studies.training.transformer import build_transformer
from maskserve_studies.training.vae import build_vae


def noise_crops(rng: np.random.Generator, side: int, count: int) -> list[Picture]:
    return [rng.integers(256, size=(side, side, 3)).astype(np.uint8) for _ in range(count)]


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> FluxFillPipeline:
    """The photo model at its smallest: an untrained decoder and transformer."""
    folder = tmp_path_factory.mktemp("text")
    language = Language(words(), len(LOOKS), len(THINGS), draw_prompts)
    train_text(folder, language, steps=2, batch=8)

    vae = build_vae(32, 32, 8, noise_crops)
    return assemble(vae, folder, build_transformer(32, 8, 1, 1, 1))


@pytest.fixture(scope="module")
def pictures() -> Stock:
    noise = np.random.default_rng(0).integers(256, size=(96, 96, 3)).astype(np.uint8)
    return Stock([Image.fromarray(noise)], textures())


def test_examples_are_encoded_as_the_pipeline_does(pipe: FluxFillPipeline, pictures: Stock) -> None:
    sampler = photo.PhotoSampler(pictures, pipe, [0])
    example = draw_example(np.random.default_rng(1), pictures, (64, 64), "object")
    batch = sampler.encode([example], ["a cat"])
    inputs: dict[str, torch.Tensor] = {}

    def look(model: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        inputs.setdefault("hidden", kwargs["hidden_states"])
        inputs.setdefault("prompt", kwargs["encoder_hidden_states"])
        inputs.setdefault("pooled", kwargs["pooled_projections"])

    hook = pipe.transformer.register_forward_pre_hook(look, with_kwargs=True)
    pipe(
        prompt="a cat",
        image=Image.fromarray(example.answer),
        mask_image=Image.fromarray(example.mask.astype(np.uint8) * 255),
        height=64,
        width=64,
        num_inference_steps=1,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        output_type="latent",
    )
    hook.remove()
    condition = inputs["hidden"][..., -batch.condition.shape[2] :]
    torch.testing.assert_close(batch.condition, condition, atol=0.02, rtol=0)
    torch.testing.assert_close(batch.prompt, inputs["prompt"])
    torch.testing.assert_close(batch.pooled, inputs["pooled"])
    assert batch.ids.shape == (16, 3)


def test_a_run_goes_on_from_its_checkpoint(
    pipe: FluxFillPipeline, pictures: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photo, "_COUNTS", {32: 2, 48: 2, 64: 1})
    monkeypatch.setattr(photo, "_PHASES", ((0.0, (1.0, 0.0, 0.0)), (0.5, (0.0, 0.5, 0.5))))
    monkeypatch.setattr(photo, "_FUSED_SINCE", 16)
    sampler = photo.PhotoSampler(pictures, pipe, [0])
    steps = []
    for seconds in (0.2, 0.4):
        model = build_transformer(32, 8, 1, 1, 1)
        photo.train(model, sampler, tmp_path, seconds=seconds, rate=1e-3)
        state = torch.load(tmp_path / "worker0.pt", weights_only=True)
        steps.append(state["step"])
        assert state["spent"] >= seconds
    assert steps[1] > steps[0] > 0


def test_fused_attention_is_the_same_sum() -> None:
    model = build_transformer(4, 8, 2, 1, 1)
    drawn = torch.Generator().manual_seed(0)
    batch = {
        "hidden_states": torch.randn(2, 9, 288, generator=drawn),
        "timestep": torch.rand(2, generator=drawn),
        "pooled_projections": torch.randn(2, 64, generator=drawn),
        "encoder_hidden_states": torch.randn(2, 5, 64, generator=drawn),
        "txt_ids": torch.zeros(5, 3),
        "img_ids": torch.randint(9, (9, 3), generator=drawn).float(),
    }
    expected = model(**batch).sample
    for fused_since in (None, 14, 15):
        model.set_attn_processor(MatmulAttention(fused_since))
        torch.testing.assert_close(model(**batch).sample, expected, atol=1e-5, rtol=1e-4)


def test_a_written_model_is_judged(
    pipe: FluxFillPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, halved = tmp_path / "model", ("transformer", "vae")
    export(pipe, model, MAX_SEQUENCE_LENGTH, halved=halved, steps=photo.STEPS)
    for part in halved:
        (weights,) = (load_file(path) for path in (model / part).glob("*.safetensors"))
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    pipe.to(torch.float32)
    monkeypatch.setattr(command, "_PAIRS", {"pattern": 1, "shape": 1})
    figures, sheet, blind = (tmp_path / name for name in ("f.json", "sheet.png", "blind.png"))
    flags = f"--edits 1 --steps 1 --side 96 --json {figures} --sheet {sheet} --blind {blind}"
    model_flags = ["--model", str(model), "--beside", str(model)]
    monkeypatch.setattr(sys, "argv", ["eval_photo_model", *flags.split(), *model_flags])
    assert command.main() == 0
    report = json.loads(figures.read_text())
    assert report["fill"]["rim_beside_untouched"] > 0
    assert report["pattern"]["psnr_db_of_a_smooth_fill"] > report["pattern"]["psnr_db"]
    assert report["words_followed"] == 0  # noise is no word
    assert report["vae_psnr_db"] > 8  # a decoder that has learnt nothing blurs
    for picture in (sheet, blind):
        with Image.open(picture) as page:
            assert page.width > 500
    assert len(json.loads(blind.with_suffix(".json").read_text())) == 2


def test_helpers_run_the_command_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench module_index", "--help"])
    (helper,) = start_helpers(2)
    assert helper.wait(120) == 0


def test_more_latent_channels_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="latent_channels: 31 do not fit; accepted: at most 30"):
        build_vae(31, 32, 4, noise_crops)


def test_every_photograph_is_listed_with_its_licence() -> None:
    table = (CHECKOUT / "assets" / "photos" / "LICENSES.md").read_text(encoding="utf-8")
    for source in SOURCES:
        for name in source.files:
            assert f"`{name.removesuffix('.exr.js')}`" in table, name
