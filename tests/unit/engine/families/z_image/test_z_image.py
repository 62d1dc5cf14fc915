"""The particulars of Z-Image: pictures with pads, entries of any prompt, and distilled models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_common.config import ConfigError
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.families.mmdit.preparation import pack_latents
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.families.specs import load_spec
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from maskserve_engine.spec.control_nets import check_config
from maskserve_engine.spec.model_spec import refresh_rule
from maskserve_triton.accept import accept_edit, with_defaults
from tests.fakes.jobs import config_of
from tests.fakes.loras import write
from tests.fakes.tiny_z_image import build_tiny_z_image
from tests.support import refresh_rows
from tests.support.cached_rows import Primed, assert_equal, cached, result
from tests.support.engines import edit, make_engine
from tests.support.family_cases import FamilyModel
from tests.support.lora_oracle import assert_same, deltas, read
from tests.support.ranks import Rank, by_ranks


@pytest.fixture
def model(family_model: Callable[[str], FamilyModel]) -> FamilyModel:
    return family_model("z-image")


def test_an_edit_is_priced_by_the_text_that_it_computes(model: FamilyModel) -> None:
    """The contract's edits are of pictures with pads and without, and of short and long prompts."""
    jobs = [model.job(seed) for seed in range(5)]
    assert {bool(model.adapter.tokens(job).total % 32) for job in jobs} == {True, False}
    rows: list[Any] = [model.adapter.dense_row(job) for job in jobs]
    assert max(len(row.prompt.text) for row in rows) > 300
    adapter: Any = model.adapter
    for job, row in zip(jobs, rows, strict=True):
        words = len(job.conditioning["prompt_embeds"])
        assert adapter.text_tokens(words, row.image.grid) == len(row.prompt.text)


def test_prompts_together_are_read_as_each_alone(model: FamilyModel) -> None:
    prompts = ["", "a red star", model.case.long_prompt]
    together = model.encoder.encode_prompts(prompts)
    for prompt, conditioning in zip(prompts, together, strict=True):
        alone = model.encoder.encode_prompt(prompt)["prompt_embeds"]
        assert_equal(conditioning["prompt_embeds"], alone)
        read_of = model.encoder.text_encoders["text_encoder"].read_of(prompt)
        assert (read_of.used, read_of.cut) == (len(alone), 0)


def picture_of(
    model: FamilyModel, height: int, width: int, prompt: str, **settings: Any
) -> EditJob:
    """An edit of a picture of so many tokens."""
    case = model.edit(4, **{"num_inference_steps": 2, "strength": 1.0, **settings})
    pixels = np.random.default_rng(7).integers(0, 256, (8 * height, 8 * width, 3), np.uint8)
    mask = np.zeros(pixels.shape[:2], np.uint8)
    mask[:12, :12] = 255
    case = replace(case, pixels=pixels, mask=mask, prompt=prompt)
    return model.encoded(case, f"{height}x{width}")


@pytest.mark.parametrize("width", [8, 6], ids=["whole", "padded"])
def test_refresh_steps_of_any_picture_are_dense_steps(model: FamilyModel, width: int) -> None:
    """The text, which the first blocks do not see, is computed at each step."""
    guidance = {"guidance_scale": 2.0, "negative_prompt": "", "num_inference_steps": 6}
    job = picture_of(model, 8, width, model.case.long_prompt, **guidance)
    assert refresh_rule(config_of(model.folder), model.adapter.spec).text is False
    refresh_rows.check_dense_refresh_steps(model.adapter, job, text=False)
    refresh_rows.check_lines(model.adapter, job, text=False)


def test_a_first_edit_has_refresh_steps_where_the_configuration_says_so(model: FamilyModel) -> None:
    engine = make_engine(model.folder, model.encoder, own_anchors=0.35, own_format="model")
    job = picture_of(model, 8, 8, model.case.long_prompt, num_inference_steps=20, cache="auto")
    refresh_schedule = RefreshSchedules(engine.config, engine.adapter).of(job)
    assert refresh_schedule is not None
    try:
        final = edit(engine, job)
    finally:
        engine.close(5.0)
    assert (final.meta["cache"], final.meta["anchors"]) == (
        "own",
        sorted(refresh_schedule.computed_at),
    )
    assert_equal(final.latents, refresh_rows.result(model.adapter, job, refresh_schedule))


def entries_of(model: FamilyModel, job: EditJob) -> list[AnchorEntry]:
    """The entries that an edit primes, with the empty prompt whatever the edit's is."""
    return Primed(model.adapter, model.encoder, job, "kv").entries


def apart(entries: list[AnchorEntry], expected: list[AnchorEntry]) -> float:
    pairs = [
        (block.part("kv"), other.part("kv"))
        for a, b in zip(entries, expected, strict=True)
        for block, other in zip(a.blocks, b.blocks, strict=True)
    ]
    differ = [
        float((x.data - y.data).abs().max())
        for block, other in pairs
        for x, y in zip(block, other, strict=True)
    ]
    return max(differ)


def test_what_a_picture_s_entries_hold_does_not_depend_on_where_a_prompt_ends(
    model: FamilyModel,
) -> None:
    """A picture without pads lies alike beside any prompt, so its key does not say how long that
    is. The pads of another stand before the prompt: its entries differ, and so does their key.
    """
    spec = model.adapter.spec
    for (height, width), alike in {(4, 8): True, (6, 6): False}.items():
        short, long = (
            picture_of(model, height, width, prompt) for prompt in ("", model.case.long_prompt)
        )
        texts = {
            spec.key_text(len(job.conditioning["prompt_embeds"]), height * width)
            for job in (short, long)
        }
        assert (texts == {0}) is alike
        assert (apart(entries_of(model, long), entries_of(model, short)) == 0.0) is alike


@pytest.mark.parametrize(("height", "width"), [(4, 8), (6, 6)])
def test_a_prompt_of_any_length_reads_what_its_own_length_would_have_primed(
    model: FamilyModel, height: int, width: int
) -> None:
    """Beside a dense row in which the picture lies where the pipeline has it, behind the prompt:
    with the priming's inputs a cached row is that, whatever it reads and computes.
    """
    job = picture_of(model, height, width, model.case.long_prompt)
    primed = Primed(model.adapter, model.encoder, job)
    row: Any = cached(model.replay, job, primed)
    whole: Any = cached(model.replay, job, primed)
    model.replay.reads(whole, [None] * whole.steps)
    for cached_row in (row, whole):  # so that the row's own numbers are those of the priming
        entry = primed.entries[0]
        cached_row.schedule = replace(
            cached_row.schedule,
            sigmas=torch.tensor([entry.anchor.sigma, 0.0]),
            walk=(cached_row.schedule.walk[0]._replace(
                timestep=entry.anchor.timestep, sigma=entry.anchor.sigma
            ),),
        )  # fmt: skip
        inputs = primed.row.template.at(torch.tensor(entry.anchor.sigma))
        cached_row.image.masked.latents = inputs[cached_row.image.masked.ids].float()
        cached_row.passes = (replace(primed.row.prompt), *cached_row.passes[1:])
        cached_row.image.masked.blend = None
    model.replay.reads(row, [primed.entries[0]])
    model.replay.reads(whole, [None])
    assert_equal(result(model.replay, row, "kv"), result(model.replay, whole, "dense"))


def test_the_publisher_s_names_are_several_layers_of_diffusers(
    model: FamilyModel, tmp_path: Path
) -> None:
    """`qkv` and `out`, beside the same numbers by diffusers' names."""
    adapter: Any = model.adapter
    rng, width = np.random.default_rng(3), adapter.weights.width
    down = rng.standard_normal((2, width)).astype("f4")
    up = rng.standard_normal((3 * width, 2)).astype("f4")
    published = {
        "layers.1.attention.qkv": ("layers.1.attention.to_q", "layers.1.attention.to_k",
                                   "layers.1.attention.to_v"),
        "noise_refiner.0.attention.out": ("noise_refiner.0.attention.to_out.0",),
    }  # fmt: skip
    files = []
    for number, form in enumerate(("published", "diffusers")):
        tensors = {}
        for name, layers in published.items():
            parts = [(name, up[: len(layers) * width])]
            if form == "diffusers":
                parts = [(part, up[i * width : (i + 1) * width]) for i, part in enumerate(layers)]
            for part, rows in parts:
                tensors[f"diffusion_model.{part}.lora_A.weight"] = down
                tensors[f"diffusion_model.{part}.lora_B.weight"] = rows
        files.append(tmp_path / f"{number}.safetensors")
        write(files[-1], tensors)
    assert_same(*(deltas(read(file, model.folder)) for file in files))


def test_a_padded_picture_keeps_to_one_rank_a_pass(model: FamilyModel) -> None:
    """Ranks share the tokens of other pictures."""
    prompt = model.case.long_prompt
    jobs = [picture_of(model, 4, 8, "a red star"), picture_of(model, 8, 8, prompt)]
    padded = picture_of(model, 6, 6, "")
    assert [model.adapter.most_ranks(job) for job in (*jobs, padded)] == [4, 4, 1]
    assert model.adapter.most_ranks(replace(padded, negative=padded.conditioning)) == 2


def test_two_ranks_take_a_pass_each_of_a_padded_picture(model: FamilyModel) -> None:
    seeds = [seed for seed in range(1, 40, 2) if model.adapter.tokens(model.job(seed)).total % 32]
    job = model.job(seeds[0], num_inference_steps=3)

    def run(rank: Rank) -> Any:
        return rank.run([rank.adapter.dense_row(job)], ())[0]

    [expected] = by_ranks(model.adapter, 1, run)
    for by_rank in by_ranks(model.adapter, 2, run):
        assert_equal(by_rank, expected)


def test_latents_stay_in_float32_between_steps(model: FamilyModel) -> None:
    """The model in bfloat16, as the pipeline: one step's rounding is all that they are apart."""
    adapter: Any = load_adapter(config_of(model.folder, model={"dtype": "bfloat16"}))
    case = model.edit(4, num_inference_steps=7, strength=1.0)
    row = adapter.dense_row(model.encoded(case))
    for _ in range(3):
        adapter.step([row], None)
        assert row.latents.dtype == torch.float32
        assert not torch.equal(row.latents, row.latents.to(torch.bfloat16).float())


def test_half_precision_begins_with_noise_in_float32(model: FamilyModel) -> None:
    """Without a source the pipeline draws it so; an edit's begins in the model's dtype."""
    job = model.job(0, "generate")
    adapter: Any = load_adapter(model.config_with(model={"dtype": "bfloat16"}))
    height, width = job.edit_mask.shape
    generator = torch.Generator("cpu").manual_seed(job.request.seed)
    pipeline, channels = model.sibling("ZImagePipeline"), adapter.spec.latent_channels
    drawn = pipeline.prepare_latents(1, channels, height, width, torch.float32, "cpu", generator)
    torch.testing.assert_close(adapter.dense_row(job).latents, pack_latents(drawn[0]))
    assert not torch.equal(drawn, drawn.bfloat16().float())


def test_guidance_above_nothing_takes_a_second_pass(model: FamilyModel) -> None:
    spec, config = model.adapter.spec, config_of(model.folder)

    def filled(**settings: Any) -> EditSettings:
        return with_defaults(EditSettings(**settings), spec, config)

    assert filled().guidance_scale == 5.0
    assert filled().negative_prompt == filled(guidance_scale=0.5).negative_prompt == ""
    assert filled(guidance_scale=0.0).negative_prompt is None
    edit_settings = EditSettings(guidance_scale=0.0, negative_prompt="x")
    with pytest.raises(InvalidRequest, match=r"negative_prompt.*a guidance_scale above 0"):
        accept_edit(edit_settings, b"a", spec, config, None)


def test_the_distilled_model_is_told_by_its_schedule(model: FamilyModel, tmp_path: Path) -> None:
    turbo = load_spec(build_tiny_z_image(tmp_path / "turbo", turbo=True))
    assert (turbo.defaults.num_inference_steps, turbo.defaults.guidance_scale) == (8, 0.0)
    assert model.adapter.spec.defaults.num_inference_steps == 50


def test_what_is_not_served_is_said_in_a_sentence(model: FamilyModel, tmp_path: Path) -> None:
    net = {"_class_name": "ZImageControlNetModel", "dim": 8}
    with pytest.raises(ValueError, match="is for another model: its dim is 8"):
        check_config(net, model.adapter.spec)
    folder = tmp_path / "omni"
    shutil.copytree(model.folder, folder)
    file = folder / "transformer" / "config.json"
    for field, value in {"siglip_feat_dim": 8, "all_patch_size": [2, 4]}.items():
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value}), "utf-8")
        with pytest.raises(ConfigError, match=rf"{field}: .*not served"):
            load_spec(folder)
        shutil.copy(model.folder / "transformer" / "config.json", file)


def test_an_engine_makes_one_template_for_all_prompts_or_one_for_each_length(
    model: FamilyModel,
) -> None:
    engine = make_engine(model.folder, model.encoder, {"max_sequence_length": 320})
    try:
        for (height, width), expected in {(4, 8): 1, (6, 6): 1 + 2}.items():
            for prompt in ("a red star", "", model.case.long_prompt):
                hit = edit(engine, picture_of(model, height, width, prompt, cache="require"))
                assert hit.meta["cache"] == "hit"
            assert len(engine.cache.templates()) == expected
        engine.cache.store.check_integrity()
    finally:
        engine.close(5.0)
