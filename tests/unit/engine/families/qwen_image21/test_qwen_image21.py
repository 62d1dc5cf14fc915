"""The particulars of Qwen-Image-2.1: words before the picture, references of a template, and
models with a schedule of their own.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from numpy.typing import NDArray

from maskserve_common.config import ConfigError
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.mmdit.rows import FlowPrimingRow
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.loop.engine import Engine
from maskserve_triton.accept import accept_edit
from tests.fakes.jobs import Case, config_of
from tests.support.cached_rows import Primed, assert_equal, cached, result
from tests.support.engines import edit, make_engine
from tests.support.family_cases import CASES, FamilyModel

KV = ("kv",)


@pytest.fixture
def model(family_model: Callable[[str], FamilyModel]) -> FamilyModel:
    return family_model("qwen-image-21")


def test_what_stands_before_the_picture_is_the_models_own_cache(
    model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values: keys are turned to other places."""
    module, caches = importlib.import_module(type(model.pipeline).__module__), []
    real = module.QwenImage21KVCache

    def recorded(layers: int) -> Any:
        caches.append(real(layers))
        return caches[-1]

    monkeypatch.setattr(module, "QwenImage21KVCache", recorded)
    case = model.edit(2, num_inference_steps=2, strength=1.0)
    model.oracle(case)
    row: Any = model.adapter.dense_row(model.encoded(case))
    model.adapter.step([row], None)
    sentence = (row.references.before, row.references, row.prompt.words)
    [cache] = caches
    for number, layer in enumerate(cache.layer_caches):
        tensor = torch.cat([part.entry.blocks[number].values.data for part in sentence])
        assert_equal(tensor.numpy(), layer.v[0].flatten(1).numpy())


def test_words_before_the_picture_are_the_same_of_all_prompts_and_pictures(
    model: FamilyModel,
) -> None:
    """Those behind it are not: they are about it."""
    case = model.edit(0)

    def words(prompt: str, pixels: NDArray[np.uint8]) -> tuple[Any, Any]:
        conditioning = model.encoder.encode_prompt(prompt, [pixels])
        return conditioning["before"], conditioning["prompt_embeds"]

    before, behind = words("a red star", case.pixels)
    for prompt, pixels in (
        ("", case.pixels),
        (model.case.long_prompt, case.pixels),
        ("a red star", 255 - case.pixels),
    ):
        assert_equal(words(prompt, pixels)[0], before)
    assert np.abs(words("a red star", 255 - case.pixels)[1] - behind).max() > 1e-3


def test_a_prompt_longer_than_what_is_read_is_cut(model: FamilyModel, tmp_path: Path) -> None:
    config = config_of(model.folder, model={"max_sequence_length": 30})
    encoder = load_encoder(config)
    case = model.edit(0)
    embeds = encoder.encode_prompt(model.case.long_prompt, [case.pixels])["prompt_embeds"]
    assert len(embeds) == 30
    read = encoder.text_encoders["text_encoder"].read_of(model.case.long_prompt)
    whole = model.encoder.encode_prompt(model.case.long_prompt, [case.pixels])["prompt_embeds"]
    assert (read.used, read.used + read.cut) == (30, len(whole))
    assert_equal(embeds, whole[:30])


def keys_at(model: FamilyModel, case: Case, step: int) -> dict[str, torch.Tensor]:
    """[blocks, tokens, width] of all that a row sees and does not compute, made for one step."""
    row: Any = model.adapter.dense_row(model.encoded(case))
    for _ in range(step):
        model.adapter.step([row], None)
    fixed = {
        "before": row.references.before,
        "reference": row.references,
        "words": row.prompt.words,
    }
    for tokens in fixed.values():
        tokens.entry = None
    model.adapter.step([row], None)
    return {
        name: torch.stack([block.keys.data for block in tokens.entry.blocks])
        for name, tokens in fixed.items()
    }


def test_references_depend_on_the_picture_alone_and_words_on_what_they_say(
    model: FamilyModel,
) -> None:
    case = replace(model.edit(0, num_inference_steps=4, strength=1.0), prompt="a red star")
    expected = keys_at(model, case, 1)
    changes: dict[str, tuple[Case, int, set[str]]] = {
        "seed": (replace(case, seed=case.seed + 1), 1, set()),
        "mask": (replace(case, mask=255 - case.mask), 1, set()),
        "step": (case, 3, set()),
        "prompt": (replace(case, prompt="a blue moon"), 1, {"words"}),
        "picture": (replace(case, pixels=255 - case.pixels), 1, {"reference", "words"}),
    }
    for key, (other, step, differ) in changes.items():
        for name, keys in keys_at(model, other, step).items():
            is_match = keys.shape == expected[name].shape
            maximum = float((keys - expected[name]).abs().max()) if is_match else np.inf
            assert (maximum > 1e-3) if name in differ else (maximum == 0.0), (key, name)


def with_references(model: FamilyModel, job: Any, primed: Primed) -> Any:
    """A cached row that reads its references, too, of the template."""
    row: Any = cached(model.replay, job, primed)
    row.references.entry = primed.row.references.entry
    return row


@pytest.mark.parametrize("turned", [True, False])
def test_references_of_a_template_are_those_that_an_edit_makes(
    model: FamilyModel, turned: bool
) -> None:
    """If they are turned to where its prompt has them."""
    job = model.job(2, num_inference_steps=3, strength=1.0)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row = with_references(model, job, Primed(model.adapter, model.encoder, job))
    if not turned:
        row.prompt.words.back = None
    latents = result(model.replay, row, "kv")
    dense = result(model.replay, model.adapter.dense_row(job))
    if turned:
        assert_equal(latents, dense)
    else:
        assert np.abs(latents - dense).max() > 1e-3


def test_a_template_is_the_same_primed_by_any_edit_of_it(model: FamilyModel) -> None:
    case = model.edit(2, num_inference_steps=3)
    other = replace(case, prompt="a red star", seed=7)
    entries = [
        Primed(model.adapter, model.encoder, model.encoded(edit)).entries for edit in (case, other)
    ]
    for one, same in zip(*entries, strict=True):
        for block, again in zip(one.blocks, same.blocks, strict=True):
            assert torch.equal(block.keys.data, again.keys.data)


def test_on_its_primings_inputs_a_cached_row_is_a_dense_one(model: FamilyModel) -> None:
    """Noise of the template's own and no word: what it reads is what it would compute."""
    job = model.job(4, num_inference_steps=4, strength=1.0)
    primed = Primed(model.adapter, model.encoder, job)
    wordless = {**job.conditioning, "prompt_embeds": job.conditioning["prompt_embeds"][:0]}
    job = replace(job, conditioning=wordless)
    dense: Any = model.adapter.dense_row(job)
    row = with_references(model, job, primed)
    noise = primed.row.template.noise
    row.image.masked.latents, dense.image.masked.latents = (
        noise[row.image.masked.ids],
        noise.clone(),
    )
    model.replay.step([row, dense], KV * model.adapter.blocks)
    moved = dense.latents - noise
    off = row.latents - dense.latents[row.image.masked.ids]
    assert float(off.abs().max() / moved.abs().max()) < 1e-5


def test_a_template_has_its_reference_once_for_edits_of_any_prompt(
    model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    real = FlowPrimingRow.of_references

    def of_references(row: Any, references: Any, blocks: int) -> FlowPrimingRow:
        texts.append(row.request_id)
        return real(row, references, blocks)

    monkeypatch.setattr(FlowPrimingRow, "of_references", of_references)
    base = replace(model.edit(0, num_inference_steps=4, strength=1.0), seed=7)
    mask = np.zeros((64, 96), np.uint8)
    mask[:32, :32] = 255
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    base = replace(base, pixels=pixels, mask=mask)
    with closing_engine(model) as engine:

        def ask(name: str, prompt: str, *, everything: bool = False, **more: Any) -> Any:
            settings = structs.replace(base.settings, **{"cache": "auto", **more})
            case = replace(base, prompt=prompt, settings=settings)
            case = replace(case, mask=np.full_like(mask, 255)) if everything else case
            return edit(engine, model.encoded(case, name))

        plain = ask("off", model.case.long_prompt, everything=True, cache="off")
        for name, prompt in (("one", "a red star"), ("two", model.case.long_prompt)):
            assert ask(name, prompt, cache="require").meta["cache"] == "hit"
        again = ask("all", model.case.long_prompt, everything=True)
        assert again.meta["dense_for"] == "mask_ratio"
        assert_equal(again.latents, plain.latents)
        [template] = engine.cache.templates()
        assert (template["anchors"], texts) == (1 + 4, ["off"])


@contextmanager
def closing_engine(model: FamilyModel) -> Iterator[Engine]:
    engine = make_engine(model.folder, model.encoder, {"max_sequence_length": 400})
    try:
        yield engine
    finally:
        engine.close(5.0)


def changed(model: FamilyModel, folder: Path, part: str, **keys: Any) -> Path:
    """The model, of which one file says something else."""
    shutil.copytree(model.folder, folder)
    document = json.loads((folder / part).read_text("utf-8"))
    (folder / part).write_text(json.dumps(document | keys), "utf-8")
    return folder


def test_a_distilled_model_goes_by_its_own_schedule(model: FamilyModel, tmp_path: Path) -> None:
    """Which its pipeline is configured with; where its template is primed, too."""
    steps, sigmas = 8, [1.0, 0.97, 0.9, 0.8, 0.66, 0.5, 0.3, 0.1]
    folder = changed(model, tmp_path / "turbo", "model_index.json", sample_sigmas=sigmas)
    turbo = FamilyModel(CASES["qwen-image-21"], folder, num_inference_steps=0)
    assert turbo.adapter.spec.steps_default(0) == steps
    for seed, strength in ((2, 1.0), (3, 0.6)):
        case = turbo.edit(seed, num_inference_steps=steps, strength=strength)
        job = turbo.encoded(case)
        assert_equal(result(turbo.replay, turbo.adapter.dense_row(job)), turbo.oracle(case))
    job = turbo.job(2, num_inference_steps=steps, strength=1.0)
    anchors = turbo.adapter.anchors(turbo.adapter.tokens(job).total, steps, 1)
    walked = [sigma for sigma, _ in turbo.adapter.sigmas(job)]
    assert [anchor.sigma for anchor in anchors] == walked
    other = model.job(2, num_inference_steps=steps, strength=1.0)
    assert walked != [sigma for sigma, _ in model.adapter.sigmas(other)]


def test_other_steps_than_a_model_s_own_are_refused(model: FamilyModel, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "turbo", "model_index.json", sample_sigmas=[1.0, 0.6, 0.2])
    spec, config = load_spec(folder), config_of(folder, model={"num_inference_steps": 0})
    assert spec.stride == 1

    def accepted(steps: int | None) -> Any:
        edit_settings = EditSettings(num_inference_steps=steps)
        return accept_edit(edit_settings, b"a", spec, config, None).settings.num_inference_steps

    assert (accepted(None), accepted(3)) == (3, 3)
    with pytest.raises(InvalidRequest, match=r"is 20, and this model has a schedule.*: 3"):
        accepted(20)
    with pytest.raises(ConfigError, match=r"num_inference_steps: this model has 3 .*; use 0"):
        load_adapter(config_of(folder, model={"num_inference_steps": 20}))


@pytest.mark.parametrize("sigmas", [[], [0.5], 8, ["1"], [1.2, 0.5], [0.5, 0.5], [1, 0], [1, None]])
def test_what_is_no_schedule_is_refused(model: FamilyModel, tmp_path: Path, sigmas: Any) -> None:
    """One step cannot be stretched to the sampler's end."""
    folder = changed(model, tmp_path / "model", "model_index.json", sample_sigmas=sigmas)
    with pytest.raises(ConfigError, match=r"sample_sigmas: .* is no schedule; use 2 or more"):
        load_spec(folder)


def test_models_that_are_others_are_refused(model: FamilyModel, tmp_path: Path) -> None:
    part = "transformer/config.json"
    folder = changed(model, tmp_path / "model", part, causal_condition=False)
    with pytest.raises(ConfigError, match=r"causal_condition: False is not served for such models"):
        load_spec(folder)


@pytest.mark.parametrize("place", ["<|image_pad|>", "<|video_pad|>"])
def test_a_prompt_that_names_a_pictures_place_is_refused(model: FamilyModel, place: str) -> None:
    case = model.edit(0)
    with pytest.raises(InvalidRequest, match="is where the model has a picture"):
        model.encoder.encode_prompt(f"a cat {place}", [case.pixels])
