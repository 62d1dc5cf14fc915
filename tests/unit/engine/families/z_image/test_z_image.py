"""Z-Image against diffusers' own pipeline, and cached rows of it against dense ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config import ConfigError
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_engine.base.job import EditJob
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.requests.refresh_schedules import make_refresh_schedule
from maskserve_engine.spec.control_nets import check_config
from maskserve_engine.spec.model_spec import refresh_rule
from maskserve_triton.accept import accept_edit, with_defaults
from tests.fakes.jobs import Case, config_of, encode_case, random_case
from tests.fakes.loras import of_model, write
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_z_image import build_tiny_z_image
from tests.support import cached_rows, own_rows
from tests.support.cached_rows import Primed, assert_equal, cached, result
from tests.support.engines import edit, make_engine
from tests.support.lora_oracle import assert_same, deltas, read
from tests.support.ranks import Rank, by_ranks, check_ranks

LONG = "two cats and " * 22


class Model:
    """Diffusers' pipeline and our parts over the same folder."""

    def __init__(self, folder: Path) -> None:
        from diffusers import DiffusionPipeline

        self.folder = folder
        self.pipeline: Any = DiffusionPipeline.from_pretrained(folder)
        self.pipeline.set_progress_bar_config(disable=True)
        config = config_of(folder)
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.replay = Replay(self.adapter)

    def case(self, seed: int, **settings: Any) -> Case:
        """A random edit, guided every other time."""
        rng = np.random.default_rng(seed)
        scale = {"guidance_scale": 0.0}
        if seed % 2:
            choice = str(rng.choice(["", "a blue circle"]))
            scale = {"guidance_scale": float(rng.uniform(0.5, 5.0)), "negative_prompt": choice}
        asked = {"num_inference_steps": int(rng.integers(2, 8)), **scale, **settings}
        case = random_case(rng, **{"cache": "off", **asked})
        return replace(case, prompt=LONG) if seed % 3 == 2 else case

    def job(self, seed: int, **settings: Any) -> EditJob:
        return encode_case(self.encoder, self.case(seed, **settings), f"edit-{seed}")

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline."""
        latents = diffusers_edit(
            self.pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            max_sequence_length=320, output_type="latent",
        )  # fmt: skip
        found: NDArray[np.float32] = latents[0].float().numpy()
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(build_tiny_z_image(tmp_path_factory.mktemp("models") / "z-image"))


def test_dense_rows_of_any_mix_are_the_pipelines(model: Model) -> None:
    """Sizes, strengths, prompts of any length and guidance of their own, in one batch."""
    cases = [model.case(seed) for seed in range(6)]
    jobs = [encode_case(model.encoder, case, str(i)) for i, case in enumerate(cases)]
    assert {bool(model.adapter.tokens(job).total % 32) for job in jobs} == {True, False}
    rows: list[Any] = [model.adapter.dense_row(job) for job in jobs]
    assert max(len(row.prompt.text) for row in rows) > 300
    for job, row in zip(jobs, rows, strict=True):  # what an edit is priced by
        words = len(job.conditioning["prompt_embeds"])
        assert model.adapter.text_tokens(words, row.grid) == len(row.prompt.text)
    cached_rows.run(model.replay, rows, "dense")
    for case, row in zip(cases, rows, strict=True):
        assert_equal(row.result().array(), model.oracle(case))


def test_prompts_together_are_read_as_each_alone(model: Model) -> None:
    prompts = ["", "a red star", LONG]
    together = model.encoder.encode_prompts(prompts)
    for prompt, found in zip(prompts, together, strict=True):
        alone = model.encoder.encode_prompt(prompt)["prompt_embeds"]
        assert_equal(found["prompt_embeds"], alone)
        read_of = model.encoder.text_encoders["text_encoder"].read_of(prompt)
        assert (read_of.used, read_of.cut) == (len(alone), 0)


@pytest.mark.parametrize("kind", cached_rows.KINDS)
def test_with_all_tokens_active_a_cached_row_is_a_dense_one(model: Model, kind: str) -> None:
    for seed in (1, 2):
        job = model.job(seed, num_inference_steps=3, strength=1.0)
        cached_rows.check_all_active(model.replay, model.encoder, job, kind)


def test_cached_rows_change_nothing_of_one_another(model: Model) -> None:
    jobs = [*(model.job(seed) for seed in range(20, 24)), picture_of(model, 4, 8, LONG)]
    assert {bool(model.adapter.tokens(job).total % 32) for job in jobs} == {True, False}
    for kind in ("project", "kv"):
        cached_rows.check_mixed_batch(model.replay, model.encoder, jobs, kind)
    cached_rows.check_step_without_anchor(model.replay, model.encoder, jobs[0])


def picture_of(model: Model, height: int, width: int, prompt: str, **asked: Any) -> EditJob:
    """An edit of a picture of so many tokens."""
    case = model.case(4, **{"num_inference_steps": 2, "strength": 1.0, **asked})
    pixels = np.random.default_rng(7).integers(0, 256, (8 * height, 8 * width, 3), np.uint8)
    mask = np.zeros(pixels.shape[:2], np.uint8)
    mask[:12, :12] = 255
    case = replace(case, pixels=pixels, mask=mask, prompt=prompt)
    return encode_case(model.encoder, case, f"{height}x{width}")


@pytest.mark.parametrize("width", [8, 6], ids=["whole", "padded"])
def test_anchors_of_its_own_are_dense_steps(model: Model, width: int) -> None:
    """Its text, which its first blocks do not see, is computed at each step."""
    asked = {"guidance_scale": 2.0, "negative_prompt": "", "num_inference_steps": 6}
    job = picture_of(model, 8, width, LONG, **asked)
    assert refresh_rule(config_of(model.folder), model.adapter.spec).text is False
    own_rows.check_dense_anchors(model.adapter, job, text=False)


def test_a_first_edit_has_anchors_of_its_own_where_that_is_asked_for(model: Model) -> None:
    engine = make_engine(model.folder, model.encoder, own_anchors=0.35, own_format="model")
    job = picture_of(model, 8, 8, LONG, num_inference_steps=20, cache="auto")
    refresh_schedule = make_refresh_schedule(engine.config, engine.adapter, job)
    assert refresh_schedule is not None
    try:
        found = edit(engine, job)
    finally:
        engine.close(5.0)
    assert (found.meta["cache"], found.meta["anchors"]) == (
        "own",
        sorted(refresh_schedule.computed_at),
    )
    assert_equal(found.latents, own_rows.result(model.adapter, job, refresh_schedule))


def entries_of(model: Model, job: EditJob) -> list[AnchorEntry]:
    """What an edit primes, whose priming prompt is the empty one whatever its own is."""
    return Primed(model.adapter, model.encoder, job, "kv").entries


def apart(found: list[AnchorEntry], expected: list[AnchorEntry]) -> float:
    pairs = [
        (block.part("kv"), other.part("kv"))
        for a, b in zip(found, expected, strict=True)
        for block, other in zip(a.blocks, b.blocks, strict=True)
    ]
    differ = [
        float((x.data - y.data).abs().max())
        for block, other in pairs
        for x, y in zip(block, other, strict=True)
    ]
    return max(differ)


def test_what_a_picture_s_entries_hold_does_not_depend_on_where_a_prompt_ends(
    model: Model,
) -> None:
    """A picture without pads lies alike beside any prompt, so its key does not say how long that
    is. The pads of another stand before the prompt: its entries differ, and so does their key.
    """
    facts = model.adapter.spec
    for (height, width), alike in {(4, 8): True, (6, 6): False}.items():
        short, long = (picture_of(model, height, width, prompt) for prompt in ("", LONG))
        texts = {
            facts.key_text(len(job.conditioning["prompt_embeds"]), height * width)
            for job in (short, long)
        }
        assert (texts == {0}) is alike
        assert (apart(entries_of(model, long), entries_of(model, short)) == 0.0) is alike


@pytest.mark.parametrize(("height", "width"), [(4, 8), (6, 6)])
def test_a_prompt_of_any_length_reads_what_its_own_length_would_have_primed(
    model: Model, height: int, width: int
) -> None:
    """Beside a dense row in which the picture lies where the pipeline has it, behind the prompt:
    with the priming's inputs a cached row is that, whatever it reads and computes.
    """
    job = picture_of(model, height, width, LONG)
    primed = Primed(model.adapter, model.encoder, job)
    row: Any = cached(model.replay, job, primed)
    whole: Any = cached(model.replay, job, primed)
    model.replay.reads(whole, [None] * whole.steps)
    for each in (row, whole):  # so that the row's own numbers are those of the priming
        entry = primed.entries[0]
        each.schedule = replace(
            each.schedule,
            sigmas=torch.tensor([entry.anchor.sigma, 0.0]),
            walk=(each.schedule.walk[0]._replace(
                timestep=entry.anchor.timestep, sigma=entry.anchor.sigma
            ),),
        )  # fmt: skip
        inputs = primed.row.template.at(torch.tensor(entry.anchor.sigma))
        each.latents = inputs[each.inactive.active].float()
        each.prompt = replace(primed.row.prompt)
        each.blend = None
    model.replay.reads(row, [primed.entries[0]])
    model.replay.reads(whole, [None])
    assert_equal(result(model.replay, row, "kv"), result(model.replay, whole, "dense"))


FORMS = (
    "transformer.{}.lora_A.weight",
    "{}.lora_down.weight",
    "diffusion_model.{}.lora_A.weight",
    "lora_unet_{}.lora_down.weight",
)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_loras_are_those_that_diffusers_loads(model: Model, form: str, tmp_path: Path) -> None:
    """Of every layer, beside a row without any."""
    file = tmp_path / "a.safetensors"
    write(file, of_model(model.pipeline.transformer, 5, form))
    cases = [model.case(seed, num_inference_steps=3, strength=1.0) for seed in (4, 5)]
    jobs = [encode_case(model.encoder, case, "lora") for case in cases]
    rows: list[Any] = [model.adapter.dense_row(job) for job in (*jobs, jobs[0])]
    lora = model.adapter.low_rank(read(file, model.folder)["denoiser"])
    for row, job in zip(rows[:2], jobs, strict=True):
        model.adapter.attach(row, job, ((lora, 0.7),))
    cached_rows.run(model.replay, rows, "dense")
    plain = [model.oracle(case) for case in cases]
    model.pipeline.load_lora_weights(str(file), adapter_name="x")
    model.pipeline.set_adapters("x", 0.7)
    try:
        expected = [model.oracle(case) for case in cases]
    finally:
        model.pipeline.delete_adapters("x")
    assert np.abs(expected[0] - plain[0]).max() > 1e-2
    for row, wanted in zip(rows, (*expected, plain[0]), strict=True):
        assert_equal(row.result().array(), wanted)


def test_the_publisher_s_names_are_several_layers_of_diffusers(
    model: Model, tmp_path: Path
) -> None:
    """`qkv` and `out`, beside the same numbers by diffusers' names."""
    rng, width = np.random.default_rng(3), model.adapter.weights.width
    down = rng.standard_normal((2, width)).astype("f4")
    up = rng.standard_normal((3 * width, 2)).astype("f4")
    own = {
        "layers.1.attention.qkv": ("layers.1.attention.to_q", "layers.1.attention.to_k",
                                   "layers.1.attention.to_v"),
        "noise_refiner.0.attention.out": ("noise_refiner.0.attention.to_out.0",),
    }  # fmt: skip
    files = []
    for number, form in enumerate(("published", "diffusers")):
        tensors = {}
        for name, layers in own.items():
            parts = [(name, up[: len(layers) * width])]
            if form == "diffusers":
                parts = [(part, up[i * width : (i + 1) * width]) for i, part in enumerate(layers)]
            for part, rows in parts:
                tensors[f"diffusion_model.{part}.lora_A.weight"] = down
                tensors[f"diffusion_model.{part}.lora_B.weight"] = rows
        files.append(tmp_path / f"{number}.safetensors")
        write(files[-1], tensors)
    found, expected = (deltas(read(file, model.folder)) for file in files)
    assert_same(found, expected)


@pytest.mark.parametrize("kind", cached_rows.KINDS)
def test_ranks_answer_what_one_does(model: Model, kind: str) -> None:
    """Of pictures without pads; others keep to one rank, or to one for each pass."""
    jobs = [picture_of(model, 4, 8, "a red star"), picture_of(model, 8, 8, LONG)]
    padded = picture_of(model, 6, 6, "")
    assert [model.adapter.most_ranks(job) for job in (*jobs, padded)] == [4, 4, 1]
    assert model.adapter.most_ranks(replace(padded, negative=padded.conditioning)) == 2
    check_ranks(model.adapter, model.encoder, jobs, kind)


def test_two_ranks_take_a_pass_each_of_a_padded_picture(model: Model) -> None:
    seeds = [seed for seed in range(1, 40, 2) if model.adapter.tokens(model.job(seed)).total % 32]
    job = model.job(seeds[0], num_inference_steps=3)

    def run(rank: Rank) -> Any:
        return rank.run([rank.adapter.dense_row(job)], ())[0]

    [expected] = by_ranks(model.adapter, 1, run)
    for by_rank in by_ranks(model.adapter, 2, run):
        assert_equal(by_rank, expected)


def test_int8_weights_serve_it(model: Model) -> None:
    adapter = load_adapter(config_of(model.folder, model={"weights": "int8"}))
    assert adapter.weight_bytes < 0.7 * model.adapter.weight_bytes
    replay = Replay(adapter)
    jobs = [model.job(seed, num_inference_steps=3) for seed in range(20, 24)]
    cached_rows.check_mixed_batch(replay, model.encoder, jobs, "kv")
    plain = result(model.replay, model.adapter.dense_row(jobs[0]))
    found = result(replay, adapter.dense_row(jobs[0]))
    assert 0 < np.abs(found - plain).mean() < 0.1 * np.abs(plain).mean()


def test_latents_stay_in_float32_between_steps(model: Model) -> None:
    """The model in bfloat16, as the pipeline: one step's rounding is all that they are apart."""
    adapter: Any = load_adapter(config_of(model.folder, model={"dtype": "bfloat16"}))
    case = model.case(4, num_inference_steps=7, strength=1.0)
    row = adapter.dense_row(encode_case(model.encoder, case, "half"))
    for _ in range(3):
        adapter.step([row], None)
        assert row.latents.dtype == torch.float32
        assert not torch.equal(row.latents, row.latents.to(torch.bfloat16).float())


def test_guidance_above_nothing_takes_a_second_pass(model: Model) -> None:
    facts, config = model.adapter.spec, config_of(model.folder)

    def filled(**asked: Any) -> EditSettings:
        return with_defaults(EditSettings(**asked), facts, config)

    assert filled().guidance_scale == 5.0
    assert filled().negative_prompt == filled(guidance_scale=0.5).negative_prompt == ""
    assert filled(guidance_scale=0.0).negative_prompt is None
    edit_settings = EditSettings(guidance_scale=0.0, negative_prompt="x")
    with pytest.raises(InvalidRequest, match=r"negative_prompt.*a guidance_scale above 0"):
        accept_edit(edit_settings, b"a", facts, config, None)


def test_the_distilled_model_is_told_by_its_schedule(model: Model, tmp_path: Path) -> None:
    turbo = load_spec(build_tiny_z_image(tmp_path / "turbo", turbo=True))
    assert (turbo.defaults.num_inference_steps, turbo.defaults.guidance_scale) == (8, 0.0)
    assert model.adapter.spec.defaults.num_inference_steps == 50


def test_what_is_not_served_is_said_in_a_sentence(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes no ControlNets"):
        check_config({"_class_name": "ZImageControlNetModel"}, model.adapter.spec)
    folder = tmp_path / "omni"
    shutil.copytree(model.folder, folder)
    file = folder / "transformer" / "config.json"
    for field, value in {"siglip_feat_dim": 8, "all_patch_size": [2, 4]}.items():
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value}), "utf-8")
        with pytest.raises(ConfigError, match=rf"{field}: .*not served"):
            load_spec(folder)
        shutil.copy(model.folder / "transformer" / "config.json", file)


def test_an_engine_makes_one_template_for_all_prompts_or_one_for_each_length(model: Model) -> None:
    engine = make_engine(model.folder, model.encoder, {"max_sequence_length": 320})
    try:
        for (height, width), expected in {(4, 8): 1, (6, 6): 1 + 2}.items():
            for prompt in ("a red star", "", LONG):
                hit = edit(engine, picture_of(model, height, width, prompt, cache="require"))
                assert hit.meta["cache"] == "hit"
            assert len(engine.cache.templates()) == expected
        engine.cache.store.check_integrity()
    finally:
        engine.close(5.0)
