"""Qwen-Image-Edit, -2509 and -2511 against diffusers' own pipelines, and cached rows of them
against dense ones.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.edits.direct import request_of
from maskserve_benchmarks.steps.replay import Replay, plan_of_kinds
from maskserve_common.config import ConfigError
from maskserve_common.errors import InvalidRequest
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.families.qwen_image.encode import picture_processor
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.requests.refresh_schedules import step_cache_bytes
from maskserve_engine.spec.encoder_picture import EncoderPicture
from maskserve_triton.encoder import EditEncoder, ToEncode
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import Case, config_of, encode_case, guided, random_case
from tests.fakes.loras import of_model, write
from tests.fakes.pipelines import qwen_edit, qwen_edit_pipeline
from tests.fakes.tiny_qwen_image import EDIT, PLUS, PLUS_2511, build_tiny_qwen_image
from tests.support import cached_rows
from tests.support.cached_rows import Primed, assert_equal, cached, result
from tests.support.lora_oracle import read
from tests.support.ranks import Rank, by_ranks

LONG = "two cats and " * 24
KV = ("kv",)


class Model:
    """Diffusers' pipeline and our parts over the same folder."""

    def __init__(self, folder: Path) -> None:
        config = config_of(folder, model={"max_sequence_length": 320})
        self.folder, self.config = folder, config
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.replay = Replay(self.adapter)
        self.pipeline = qwen_edit_pipeline(folder)
        self.pipeline.set_progress_bar_config(disable=True)

    def case(self, seed: int, **settings: Any) -> Case:
        """A random edit, with a negative prompt every other time."""
        rng = np.random.default_rng(seed)
        away = guided(rng) if seed % 2 else {}
        steps = int(rng.integers(2, 8))
        asked = {"guidance_scale": None, "num_inference_steps": steps, **away, **settings}
        case = random_case(rng, **{"cache": "off", **asked})
        prompt = LONG if seed % 3 == 2 else case.prompt
        return replace(case, prompt=prompt, mask=mask_for_model(case.mask, self.adapter.spec))

    def job(self, seed: int, **settings: Any) -> Any:
        return encode_case(self.encoder, self.case(seed, **settings), f"edit-{seed}")

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline."""
        tokens = qwen_edit(
            self.pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            output_type="latent",
        )  # fmt: skip
        factor = self.pipeline.vae_scale_factor
        latents = self.pipeline._unpack_latents(tokens, *case.mask.shape, factor)
        found: NDArray[np.float32] = latents[0, :, 0].float().numpy()
        return found


@pytest.fixture(scope="module", params=[EDIT, PLUS, PLUS_2511])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(build_tiny_qwen_image(tmp_path_factory.mktemp("models") / "edit", request.param))


def still(job: Any) -> Any:
    """The job with a posterior that is its mode: a template's reference is that, an edit's own is
    drawn.
    """
    half = len(job.moments) // 2
    certain = np.full_like(job.moments[half:], -30.0)
    return replace(job, moments=np.concatenate((job.moments[:half], certain)))


def test_dense_rows_of_any_mix_are_the_pipelines(model: Model) -> None:
    """Sizes, strengths, prompts of any length and guidance of their own, in one batch."""
    cases = [model.case(seed) for seed in range(6)]
    jobs = [encode_case(model.encoder, case, str(i)) for i, case in enumerate(cases)]
    rows: list[Any] = [model.adapter.dense_row(job) for job in jobs]
    cached_rows.run(model.replay, rows, "dense")
    for case, row in zip(cases, rows, strict=True):
        assert_equal(row.result().array(), model.oracle(case))


def test_of_what_is_shown_the_encoder_says_the_same_beside_any_prompt(model: Model) -> None:
    case = model.case(0)
    found = [
        model.encoder.encode_prompt(prompt, case.pixels)["prompt_embeds"]
        for prompt in ("", "a red star", LONG)
    ]
    shown_tokens = model.adapter.spec.encoder_picture_tokens(
        *(side // 4 for side in case.mask.shape)
    )
    assert shown_tokens > 0
    for other in found[1:]:
        assert_equal(other[:shown_tokens], found[0][:shown_tokens])
        assert np.abs(other[len(found[0]) - 2] - found[0][-2]).max() > 0.1
    other = np.roll(case.pixels, 5, 1)
    apart = model.encoder.encode_prompt("", other)["prompt_embeds"]
    assert np.abs(apart - found[0])[:shown_tokens].max() > 0.1


def test_a_prompt_longer_than_what_is_read_is_cut(model: Model) -> None:
    """Of what the pipeline says, which it does not cut, the last words go; they are counted without
    the picture and what the pipeline itself puts before a prompt.
    """
    most, case, facts = 30, model.case(0), model.adapter.spec
    encoder = load_encoder(config_of(model.folder, model={"max_sequence_length": most}))
    assert facts.encoder_picture is not None
    height, width = case.pixels.shape[:2]
    size = facts.encoder_picture.size(height, width)
    picture = model.pipeline.image_processor.resize(Image.fromarray(case.pixels), *size)
    before = facts.encoder_picture.tokens(height, width)
    if facts.encoder_picture.area:  # its pictures have numbers, and stand in no template
        named = "Picture 1: <|vision_start|><|image_pad|><|vision_end|>"
        before += len(model.pipeline.tokenizer(named).input_ids) - 1
    for prompt in ("", "a red star", LONG):
        [whole], _ = model.pipeline.encode_prompt(prompt, picture)
        words = len(whole) - before
        read_of = encoder.text_encoders["text_encoder"].read_of(prompt)
        assert (read_of.used, read_of.cut) == (min(words, most), max(0, words - most))
        found = encoder.encode_prompt(prompt, case.pixels)["prompt_embeds"]
        assert_equal(found, whole[: before + min(words, most)].detach().numpy())
    assert words > 2 * most


def test_prompts_are_kept_by_picture(model: Model, tmp_path: Path) -> None:
    """And are what each alone would be, however many come together."""
    encoder = EditEncoder(model.encoder, structs.replace(model.config, runtime_dir=str(tmp_path)))
    case = model.case(0)
    roll = np.roll(case.pixels, 5, 1)

    def edits() -> list[ToEncode]:
        return [
            ToEncode(request_of(pixels, "a red star", case.settings, 1, str(n)), pixels, case.mask)
            for n, pixels in enumerate((case.pixels, roll))
        ]

    for name in ("made", "kept"):
        for edit, found in zip(edits(), encoder.encode_all(edits()), strict=True):
            assert not isinstance(found, Exception)
            encoded, report = found
            alone = model.encoder.encode_prompt("a red star", edit.pixels)["prompt_embeds"]
            assert np.array_equal(encoded.conditioning["prompt_embeds"], alone)
            assert report.prompt == name
    encoder.close()


def test_a_template_is_the_same_primed_by_any_edit_of_its_prompt(model: Model) -> None:
    """By one of another prompt it is not: what is kept has seen the words."""
    case = model.case(2, num_inference_steps=3)
    first, again, other = (
        Primed(model.adapter, model.encoder, encode_case(model.encoder, each, "edit")).entries[0]
        for each in (case, replace(case, seed=7), replace(case, prompt="a red star"))
    )
    for number, block in enumerate(first.blocks):
        for part, coded in enumerate(block.part("kv")):
            same, apart = (e.blocks[number].part("kv")[part].data for e in (again, other))
            assert_equal(coded.data.numpy(), same.numpy())
            assert coded.data.shape == apart.shape
            assert (float((coded.data - apart).abs().max()) > 1e-4) == (number > 0)


def test_on_its_primings_inputs_a_cached_row_is_a_dense_one(model: Model) -> None:
    """Noise of the template's own, and its prompt: what it reads is what it would compute. Without
    a word it is not, since references see the text.
    """
    case = replace(model.case(4, num_inference_steps=4, strength=1.0), prompt=LONG)
    job = still(encode_case(model.encoder, case, "edit"))
    primed = Primed(model.adapter, model.encoder, job)
    shown = primed.row.picture_words
    assert shown < len(primed.row.prompt.text) == len(job.conditioning["prompt_embeds"])

    def apart(job: Any) -> float:
        """As a share of what the step moves."""
        row: Any = cached(model.replay, job, primed)
        dense: Any = model.adapter.dense_row(job)
        row.latents, dense.latents = (
            primed.row.template.noise[row.inactive.active],
            primed.row.template.noise.clone(),
        )
        model.replay.step([row, dense], KV * model.adapter.blocks)
        moved = dense.latents - primed.row.template.noise
        off = row.latents - dense.latents[row.inactive.active]
        return float(off.abs().max() / moved.abs().max())

    said = {"prompt_embeds": job.conditioning["prompt_embeds"][:shown]}
    same = apart(job)
    assert same < 1e-5
    assert apart(replace(job, conditioning=said)) > 10 * same


def test_cached_rows_change_nothing_of_one_another(model: Model) -> None:
    jobs = [model.job(seed) for seed in range(20, 25)]
    cached_rows.check_mixed_batch(model.replay, model.encoder, jobs, "kv")


def test_a_step_without_an_anchor_computes_all_that_is_shown(model: Model) -> None:
    """Of an edit whose every token is active nothing but reference and text is not its own."""
    job = still(model.job(1, num_inference_steps=3, strength=1.0))
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row: Any = cached(model.replay, job, Primed(model.adapter, model.encoder, job))
    model.replay.reads(row, [None] * row.steps)
    dense = result(model.replay, model.adapter.dense_row(job))
    assert_equal(result(model.replay, row, "kv"), dense)


def test_references_of_2511_are_what_they_are_at_time_0(model: Model) -> None:
    """In the first block, which has not seen the rest yet; behind it they see the text. Those of
    the others change with the time.
    """
    job = still(model.job(3, num_inference_steps=4, strength=1.0))
    late, early = Primed(model.adapter, model.encoder, job).entries[::3]
    gh, gw = (side // 8 for side in job.edit_mask.shape)
    context = slice(gh * gw, 2 * gh * gw)

    def apart(block: int) -> float:
        data = [e.blocks[block].keys.data[context] for e in (late, early)]
        return float((data[0] - data[1]).abs().max())

    timeless = model.adapter.timeless
    assert (apart(0) < 1e-5) == timeless
    assert apart(1) > 1e-4


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_a_lora_is_the_one_that_diffusers_loads(model: Model, tmp_path: Path) -> None:
    """Of every layer of the blocks, what gives references their own vectors among them, in the form
    of Lightning's files.
    """
    file, case = tmp_path / "a.safetensors", model.case(4, num_inference_steps=4, strength=1.0)
    write(file, of_model(model.pipeline.transformer, 5, "{}.lora_down.weight"))
    job = encode_case(model.encoder, case, "lora")
    row: Any = model.adapter.dense_row(job)
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


def test_anchors_of_its_own_hold_what_is_shown_too(model: Model) -> None:
    """At each step an anchor: dense. Between anchors text, references and the rest are foretold."""
    job = model.job(3, num_inference_steps=6, strength=1.0, mask_ring=1)
    dense = result(model.replay, model.adapter.dense_row(job))

    def own(*steps: int) -> tuple[Any, NDArray[np.float32]]:
        plan = RefreshSchedule(frozenset(steps), "model", True)
        row: Any = model.adapter.anchored_row(job, plan)
        reader, kinds = StepCacheReader(row, model.adapter.blocks), KV * model.adapter.blocks
        while row.step < row.steps:
            read: Any = None if row.step in steps else reader.turn_to(row.step)
            model.adapter.step([row], plan_of_kinds(kinds) if read else None, [read])
        kept = sum(each.nbytes for each in row.anchors)
        assert kept == step_cache_bytes(plan, model.adapter, job, "float32")
        at = np.zeros(row.grid[0] * row.grid[1], bool)
        at[row.inactive.active] = True
        return at.reshape(row.grid).repeat(2, 0).repeat(2, 1), row.result().array()

    at, found = own(*range(6))
    assert_equal(found[:, at], dense[:, at])
    _, near = own(0, 3)
    assert 0 < np.abs(near - dense)[:, at].mean() < 0.2 * np.abs(dense[:, at]).mean()


@pytest.mark.parametrize("area", [0, 384 * 384])
def test_what_is_shown_is_counted_as_the_pipelines_cut_it(area: int) -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(area)
    for _ in range(300):
        height, width = (32 * int(rng.integers(1, 60)) for _ in range(2))
        least, most = int(rng.integers(1, 90)) ** 2, int(rng.integers(90, 1500)) ** 2
        tokens = EncoderPicture(28, least, most, area).tokens(height, width)
        if area:
            width, height = calculate_dimensions(area, width / height)
        high, wide = smart_resize(height, width, 28, least, most)
        assert tokens == high * wide // 28**2


def test_what_is_shown_follows_from_the_file_that_transformers_reads(
    model: Model, tmp_path: Path
) -> None:
    """Of the two that it has written, the newer one where both are."""
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor

    folder = Path(shutil.copytree(model.folder, tmp_path / "model"))
    for file in (folder / "processor").glob("*processor_config.json"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*/preprocessor_config\.json"):
        load_spec(folder)
    Qwen2VLImageProcessorPil(max_pixels=12_845_056).save_pretrained(folder / "processor")
    assert load_spec(folder).encoder_picture == model.adapter.spec.encoder_picture
    pictures = Qwen2VLImageProcessorPil(max_pixels=802_816)
    newer = picture_processor(Qwen2VLProcessor, pictures, model.pipeline.tokenizer)
    newer.save_pretrained(folder / "processor")
    shown, read = (
        load_spec(folder).encoder_picture,
        qwen_edit_pipeline(folder).processor.image_processor,
    )
    assert shown is not None
    assert shown.most == read.size["longest_edge"] == 802_816


def test_entries_without_keys_and_values_are_refused(model: Model) -> None:
    config = config_of(model.folder, cache={"entry_kind": "h"})
    with pytest.raises(ConfigError, match="entry_kind: h is not served with models whose prompts"):
        load_adapter(config)


@pytest.mark.parametrize("place", ["<|image_pad|>", "<|video_pad|>"])
def test_a_prompt_that_names_a_pictures_place_is_refused(model: Model, place: str) -> None:
    case = model.case(0)
    with pytest.raises(InvalidRequest, match="is where the model has a picture"):
        model.encoder.encode_prompt(f"a cat {place}", case.pixels)
