"""Qwen-Image-2.1 against diffusers' own pipeline, and cached rows of it against dense ones."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from numpy.typing import NDArray

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config import ConfigError
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.mmdit.rows import FlowPrimingRow
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.loop.engine import Engine
from maskserve_triton.accept import accept_edit
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import Case, config_of, encode_case, guided, random_case
from tests.fakes.loras import of_model, write
from tests.fakes.pipelines import qwen_edit, qwen_edit_pipeline
from tests.fakes.tiny_qwen_image21 import build_tiny_qwen_image21
from tests.support import cached_rows, own_rows
from tests.support.cached_rows import Primed, assert_equal, cached, result
from tests.support.engines import edit, make_engine
from tests.support.lora_oracle import read
from tests.support.ranks import Rank, by_ranks

LONG = "two cats and " * 24
KV = ("kv",)


class Model:
    """Diffusers' pipeline and our parts over the same folder."""

    def __init__(self, folder: Path, **asked: Any) -> None:
        asked |= {"max_sequence_length": 400}
        config = config_of(folder, model=asked)
        self.folder, self.config = folder, config
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.replay = Replay(self.adapter)
        self.pipeline = qwen_edit_pipeline(folder)
        self.pipeline.set_progress_bar_config(disable=True)

    def case(self, seed: int, **settings: Any) -> Case:
        """A random edit of 32 to 128 pixels a side, with a negative prompt every other time."""
        rng = np.random.default_rng(seed)
        away = guided(rng) if seed % 2 else {}
        steps = int(rng.integers(2, 8))
        asked = {"guidance_scale": None, "num_inference_steps": steps, **away, **settings}
        case = random_case(rng, **{"cache": "off", **asked})
        height, width = (32 * int(rng.integers(1, 5)) for _ in range(2))
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        mask = np.zeros((height, width), np.uint8)
        top, integers = int(rng.integers(0, height - 1)), int(rng.integers(0, width - 1))
        mask[top : top + int(rng.integers(1, height)), integers:] = 255
        mask = mask_for_model(mask, self.adapter.spec)
        prompt = LONG if seed % 3 == 2 else case.prompt
        return replace(case, pixels=pixels, mask=mask, prompt=prompt)

    def job(self, seed: int, **settings: Any) -> Any:
        return encode_case(self.encoder, self.case(seed, **settings), f"edit-{seed}")

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline, a token's 2x2 latents apart."""
        tokens = qwen_edit(
            self.pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            output_type="latent",
        )  # fmt: skip
        latents = self.pipeline._unpack_latents(tokens, *case.mask.shape, 16)[:, :, 0]
        found: NDArray[np.float32] = torch.nn.functional.pixel_shuffle(latents, 2)[0].numpy()
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(build_tiny_qwen_image21(tmp_path_factory.mktemp("models") / "2.1"))


def test_dense_rows_of_any_mix_are_the_pipelines(model: Model) -> None:
    """Sizes, strengths, prompts of any length and guidance of their own, in one batch."""
    cases = [model.case(seed) for seed in range(6)]
    jobs = [encode_case(model.encoder, case, str(i)) for i, case in enumerate(cases)]
    rows: list[Any] = [model.adapter.dense_row(job) for job in jobs]
    cached_rows.run(model.replay, rows, "dense")
    for case, row in zip(cases, rows, strict=True):
        assert_equal(row.result().array(), model.oracle(case))


def test_what_stands_before_the_picture_is_the_models_own_cache(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values: keys are turned to other places."""
    module, caches = importlib.import_module(type(model.pipeline).__module__), []
    real = module.QwenImage21KVCache

    def made(layers: int) -> Any:
        caches.append(real(layers))
        return caches[-1]

    monkeypatch.setattr(module, "QwenImage21KVCache", made)
    case = model.case(2, num_inference_steps=2, strength=1.0)
    model.oracle(case)
    row: Any = model.adapter.dense_row(encode_case(model.encoder, case, "edit"))
    model.adapter.step([row], None)
    sentence = (row.references.before, row.references, row.prompt.words)
    [cache] = caches
    for number, layer in enumerate(cache.layer_caches):
        tensor = torch.cat([each.entry.blocks[number].values.data for each in sentence])
        assert_equal(tensor.numpy(), layer.v[0].flatten(1).numpy())


def test_words_before_the_picture_are_the_same_of_all_prompts_and_pictures(model: Model) -> None:
    """Those behind it are not: they are about it."""
    case = model.case(0)

    def said(prompt: str, pixels: NDArray[np.uint8]) -> tuple[Any, Any]:
        found = model.encoder.encode_prompt(prompt, pixels)
        return found["before"], found["prompt_embeds"]

    before, behind = said("a red star", case.pixels)
    for prompt, pixels in (
        ("", case.pixels),
        (LONG, case.pixels),
        ("a red star", 255 - case.pixels),
    ):
        assert_equal(said(prompt, pixels)[0], before)
    assert np.abs(said("a red star", 255 - case.pixels)[1] - behind).max() > 1e-3


def test_a_prompt_longer_than_what_is_read_is_cut(model: Model, tmp_path: Path) -> None:
    config = config_of(model.folder, model={"max_sequence_length": 30})
    encoder = load_encoder(config)
    case = model.case(0)
    found = encoder.encode_prompt(LONG, case.pixels)["prompt_embeds"]
    assert len(found) == 30
    read = encoder.text_encoders["text_encoder"].read_of(LONG)
    whole = model.encoder.encode_prompt(LONG, case.pixels)["prompt_embeds"]
    assert (read.used, read.used + read.cut) == (30, len(whole))
    assert_equal(found, whole[:30])


def keys_at(model: Model, case: Case, step: int) -> dict[str, torch.Tensor]:
    """[blocks, tokens, width] of all that a row sees and does not compute, made for one step."""
    row: Any = model.adapter.dense_row(encode_case(model.encoder, case, "edit"))
    for _ in range(step):
        model.adapter.step([row], None)
    fixed = {
        "before": row.references.before,
        "reference": row.references,
        "words": row.prompt.words,
    }
    for each in fixed.values():
        each.entry = None
    model.adapter.step([row], None)
    return {
        name: torch.stack([block.keys.data for block in each.entry.blocks])
        for name, each in fixed.items()
    }


def test_references_depend_on_the_picture_alone_and_words_on_what_they_say(model: Model) -> None:
    case = replace(model.case(0, num_inference_steps=4, strength=1.0), prompt="a red star")
    expected = keys_at(model, case, 1)
    others: dict[str, tuple[Case, int, set[str]]] = {
        "seed": (replace(case, seed=case.seed + 1), 1, set()),
        "mask": (replace(case, mask=255 - case.mask), 1, set()),
        "step": (case, 3, set()),
        "prompt": (replace(case, prompt="a blue moon"), 1, {"words"}),
        "picture": (replace(case, pixels=255 - case.pixels), 1, {"reference", "words"}),
    }
    for key, (other, step, differ) in others.items():
        found = keys_at(model, other, step)
        for name, keys in found.items():
            is_match = keys.shape == expected[name].shape
            maximum = float((keys - expected[name]).abs().max()) if is_match else np.inf
            assert (maximum > 1e-3) if name in differ else (maximum == 0.0), (key, name)


@pytest.mark.parametrize("kind", cached_rows.KINDS[2:])
def test_with_all_tokens_active_a_cached_row_is_its_dense_one(model: Model, kind: str) -> None:
    """Whatever the lengths of its prompts: references of a template lie as far from its picture as
    they would without one.
    """
    for seed in (2, 3):
        job = model.job(seed, num_inference_steps=3, strength=1.0)
        cached_rows.check_all_active(model.replay, model.encoder, job, kind)


def with_references(model: Model, job: Any, primed: Primed) -> Any:
    """A cached row that reads its references, too, of the template."""
    row: Any = cached(model.replay, job, primed)
    row.references.entry = primed.row.references.entry
    return row


@pytest.mark.parametrize("turned", [True, False])
def test_references_of_a_template_are_those_that_an_edit_makes(model: Model, turned: bool) -> None:
    """If they are turned to where its prompt has them."""
    job = model.job(2, num_inference_steps=3, strength=1.0)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row = with_references(model, job, Primed(model.adapter, model.encoder, job))
    if not turned:
        row.prompt.words.back = None
    found = result(model.replay, row, "kv")
    dense = result(model.replay, model.adapter.dense_row(job))
    if turned:
        assert_equal(found, dense)
    else:
        assert np.abs(found - dense).max() > 1e-3


def test_a_template_is_the_same_primed_by_any_edit_of_it(model: Model) -> None:
    case = model.case(2, num_inference_steps=3)
    other = replace(case, prompt="a red star", seed=7)
    entries = [
        Primed(model.adapter, model.encoder, encode_case(model.encoder, each, "edit")).entries
        for each in (case, other)
    ]
    for one, same in zip(*entries, strict=True):
        for block, again in zip(one.blocks, same.blocks, strict=True):
            assert torch.equal(block.keys.data, again.keys.data)


def test_on_its_primings_inputs_a_cached_row_is_a_dense_one(model: Model) -> None:
    """Noise of the template's own and no word: what it reads is what it would compute."""
    job = model.job(4, num_inference_steps=4, strength=1.0)
    primed = Primed(model.adapter, model.encoder, job)
    said = {**job.conditioning, "prompt_embeds": job.conditioning["prompt_embeds"][:0]}
    job = replace(job, conditioning=said)
    row, dense = with_references(model, job, primed), model.adapter.dense_row(job)
    noise = primed.row.template.noise
    row.latents, dense.latents = noise[row.inactive.active], noise.clone()
    model.replay.step([row, dense], KV * model.adapter.blocks)
    moved = dense.latents - noise
    off = row.latents - dense.latents[row.inactive.active]
    assert float(off.abs().max() / moved.abs().max()) < 1e-5


def test_cached_rows_change_nothing_of_one_another(model: Model) -> None:
    jobs = [model.job(seed) for seed in range(20, 25)]
    cached_rows.check_mixed_batch(model.replay, model.encoder, jobs, "kv")


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", [4, 5], ids=["plain", "guided"])
def test_a_lora_is_the_one_that_diffusers_loads(
    model: Model, seed: int, late: bool, tmp_path: Path
) -> None:
    """Of every layer of the blocks: words and references are made with it, too, and anew where it
    has come after a step that had made them.
    """
    file, case = tmp_path / "a.safetensors", model.case(seed, num_inference_steps=3, strength=1.0)
    write(file, of_model(model.pipeline.transformer, 5))
    job = encode_case(model.encoder, case, "lora")
    row: Any = model.adapter.dense_row(job)
    assert (row.negative is not None) == (seed == 5)
    if late:
        begin = row.latents.clone()
        model.adapter.step([row], None)
        row.latents, row.step = begin, 0
    lora = model.adapter.low_rank(read(file, model.folder)["denoiser"])
    model.adapter.attach(row, job, ((lora, 0.7),))
    model.pipeline.load_lora_weights(str(file), adapter_name="x")
    model.pipeline.set_adapters("x", 0.7)
    try:
        expected = model.oracle(case)
    finally:
        model.pipeline.delete_adapters("x")
    assert_equal(result(model.replay, row), expected)


@pytest.mark.parametrize("deals", [False, True], ids=["tokens", "passes"])
def test_ranks_answer_what_one_does(model: Model, deals: bool) -> None:
    jobs = [model.job(seed, num_inference_steps=3) for seed in (4, 8)]
    primed = [Primed(model.adapter, model.encoder, job) for job in jobs]

    def run(rank: Rank) -> list[Any]:
        rows: list[Any] = [cached(rank.replay, *each) for each in zip(jobs, primed, strict=True)]
        return rank.run([*rows, rank.adapter.dense_row(jobs[0])], KV * model.adapter.blocks)

    [expected] = by_ranks(model.adapter, 1, run)
    for by_rank in by_ranks(model.adapter, 2, run, deals=deals):
        for one, other in zip(by_rank, expected, strict=True):
            assert_equal(one, other)


def test_anchors_of_its_own_hold_what_it_does_not_compute(model: Model) -> None:
    """At each step an anchor: dense. Between anchors the rest of the picture is foretold."""
    job = model.job(3, num_inference_steps=6, strength=1.0, mask_ring=1)
    dense = result(model.replay, model.adapter.dense_row(job))

    def own(*steps: int) -> tuple[Any, NDArray[np.float32]]:
        plan = own_rows.plan(*steps, text=False)
        row: Any = model.adapter.anchored_row(job, plan)
        own_rows.run(model.adapter, [row], [plan])
        at = np.zeros(row.grid[0] * row.grid[1], bool)
        at[row.inactive.active] = True
        return at.reshape(row.grid).repeat(2, 0).repeat(2, 1), row.result().array()

    at, found = own(*range(6))
    assert_equal(found[:, at], dense[:, at])
    _, near = own(0, 3)
    assert np.abs(near - dense)[:, at].mean() < 0.2 * np.abs(dense[:, at]).mean()


def test_a_template_has_its_reference_once_for_edits_of_any_prompt(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    real = FlowPrimingRow.of_references

    def of_references(row: Any, blocks: int) -> FlowPrimingRow:
        texts.append(row.request_id)
        return real(row, blocks)

    monkeypatch.setattr(FlowPrimingRow, "of_references", of_references)
    base = replace(model.case(0, num_inference_steps=4, strength=1.0), seed=7)
    mask = np.zeros((64, 96), np.uint8)
    mask[:32, :32] = 255
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    base = replace(base, pixels=pixels, mask=mask)
    with closing_engine(model) as engine:

        def ask(name: str, prompt: str, *, everything: bool = False, **asked: Any) -> Any:
            settings = structs.replace(base.settings, **{"cache": "auto", **asked})
            case = replace(base, prompt=prompt, settings=settings)
            case = replace(case, mask=np.full_like(mask, 255)) if everything else case
            return edit(engine, encode_case(model.encoder, case, name))

        plain = ask("off", LONG, everything=True, cache="off")
        for name, prompt in (("one", "a red star"), ("two", LONG)):
            assert ask(name, prompt, cache="require").meta["cache"] == "hit"
        again = ask("all", LONG, everything=True)
        assert again.meta["dense_for"] == "mask_ratio"
        assert_equal(again.latents, plain.latents)
        [held] = engine.cache.templates()
        assert (held["anchors"], texts) == (1 + 4, ["off"])


@contextmanager
def closing_engine(model: Model) -> Iterator[Engine]:
    engine = make_engine(model.folder, model.encoder, {"max_sequence_length": 400})
    try:
        yield engine
    finally:
        engine.close(5.0)


def changed(model: Model, folder: Path, part: str, **keys: Any) -> Path:
    """The model, of which one file says something else."""
    shutil.copytree(model.folder, folder)
    document = json.loads((folder / part).read_text("utf-8"))
    (folder / part).write_text(json.dumps(document | keys), "utf-8")
    return folder


def test_a_distilled_model_goes_by_its_own_schedule(model: Model, tmp_path: Path) -> None:
    """Which its pipeline is configured with; where its template is primed, too."""
    steps, sigmas = 8, [1.0, 0.97, 0.9, 0.8, 0.66, 0.5, 0.3, 0.1]
    folder = changed(model, tmp_path / "turbo", "model_index.json", sample_sigmas=sigmas)
    turbo = Model(folder, num_inference_steps=0)
    assert turbo.adapter.spec.steps_default(0) == steps
    for seed, strength in ((2, 1.0), (3, 0.6)):
        case = turbo.case(seed, num_inference_steps=steps, strength=strength)
        job = encode_case(turbo.encoder, case, "edit")
        found = result(turbo.replay, turbo.adapter.dense_row(job))
        assert_equal(found, turbo.oracle(case))
    job = turbo.job(2, num_inference_steps=steps, strength=1.0)
    anchors = turbo.adapter.anchors(turbo.adapter.tokens(job).total, steps, 1)
    walked = [sigma for sigma, _ in turbo.adapter.sigmas(job)]
    assert [anchor.sigma for anchor in anchors] == walked
    other = model.job(2, num_inference_steps=steps, strength=1.0)
    assert walked != [sigma for sigma, _ in model.adapter.sigmas(other)]


def test_other_steps_than_a_model_s_own_are_refused(model: Model, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "turbo", "model_index.json", sample_sigmas=[1.0, 0.6, 0.2])
    facts, config = load_spec(folder), config_of(folder, model={"num_inference_steps": 0})
    assert facts.stride == 1

    def accepted(steps: int | None) -> Any:
        edit_settings = EditSettings(num_inference_steps=steps)
        return accept_edit(edit_settings, b"a", facts, config, None).settings.num_inference_steps

    assert (accepted(None), accepted(3)) == (3, 3)
    with pytest.raises(InvalidRequest, match=r"is 20, and this model has a schedule.*: 3"):
        accepted(20)
    with pytest.raises(ConfigError, match=r"num_inference_steps: this model has 3 .*; use 0"):
        load_adapter(config_of(folder, model={"num_inference_steps": 20}))


@pytest.mark.parametrize("sigmas", [[], [0.5], 8, ["1"], [1.2, 0.5], [0.5, 0.5], [1, 0], [1, None]])
def test_what_is_no_schedule_is_refused(model: Model, tmp_path: Path, sigmas: Any) -> None:
    """One step cannot be stretched to the sampler's end."""
    folder = changed(model, tmp_path / "model", "model_index.json", sample_sigmas=sigmas)
    with pytest.raises(ConfigError, match=r"sample_sigmas: .* is no schedule; use 2 or more"):
        load_spec(folder)


def test_models_that_are_others_are_refused(model: Model, tmp_path: Path) -> None:
    part = "transformer/config.json"
    folder = changed(model, tmp_path / "model", part, causal_condition=False)
    with pytest.raises(ConfigError, match=r"causal_condition: False is not served for such models"):
        load_spec(folder)


@pytest.mark.parametrize("place", ["<|image_pad|>", "<|video_pad|>"])
def test_a_prompt_that_names_a_pictures_place_is_refused(model: Model, place: str) -> None:
    case = model.case(0)
    with pytest.raises(InvalidRequest, match="is where the model has a picture"):
        model.encoder.encode_prompt(f"a cat {place}", case.pixels)
