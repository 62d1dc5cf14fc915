"""The particulars of Qwen-Image-Edit, -2509 and -2511: prompts that see the picture. Some are those
of LongCat-Image-Edit, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from maskserve_benchmarks.edits.direct import request_of
from maskserve_common.config import ConfigError
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.qwen_image.encode import picture_processor
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.spec.encoder_picture import EncoderPicture
from maskserve_triton.encoder import EditEncoder
from maskserve_triton.encoder_input import EncoderInput
from tests.fakes.jobs import config_of
from tests.fakes.pipelines import qwen_edit_pipeline
from tests.support.cached_rows import Primed, assert_equal, cached, result
from tests.support.family_cases import FamilyModel

KV = ("kv",)
MODELS = ["qwen-image-edit", "qwen-image-edit-2509", "qwen-image-edit-2511"]
of_all_models = pytest.mark.parametrize(
    "model", [*MODELS, "longcat-image-edit", "joyimage-edit"], indirect=True
)


@pytest.fixture(params=MODELS)
def model(
    request: pytest.FixtureRequest, family_model: Callable[[str], FamilyModel]
) -> FamilyModel:
    return family_model(request.param)


def still(job: Any) -> Any:
    """The job with a posterior that is its mode: a template's reference is that, an edit's own is
    drawn.
    """
    half = len(job.moments) // 2
    certain = np.full_like(job.moments[half:], -30.0)
    return replace(job, moments=np.concatenate((job.moments[:half], certain)))


def test_of_what_is_shown_the_encoder_says_the_same_beside_any_prompt(model: FamilyModel) -> None:
    case = model.edit(0)
    embeds = [
        model.encoder.encode_prompt(prompt, [case.pixels])["prompt_embeds"]
        for prompt in ("", "a red star", model.case.long_prompt)
    ]
    shown_tokens = model.adapter.spec.encoder_picture_tokens(
        *(side // 4 for side in case.mask.shape)
    )
    assert shown_tokens > 0
    for other in embeds[1:]:
        assert_equal(other[:shown_tokens], embeds[0][:shown_tokens])
        assert np.abs(other[len(embeds[0]) - 2] - embeds[0][-2]).max() > 0.1
    other = np.roll(case.pixels, 5, 1)
    apart = model.encoder.encode_prompt("", [other])["prompt_embeds"]
    assert np.abs(apart - embeds[0])[:shown_tokens].max() > 0.1


def test_a_prompt_longer_than_what_is_read_is_cut(model: FamilyModel) -> None:
    """The pipeline does not cut. Here the last words go. They are counted without the picture and
    without the words that the pipeline puts before a prompt.
    """
    most, case, spec = 30, model.edit(0), model.adapter.spec
    encoder = load_encoder(config_of(model.folder, model={"max_sequence_length": most}))
    assert spec.encoder_picture is not None
    height, width = case.pixels.shape[:2]
    size = spec.encoder_picture.size(height, width)
    picture = model.pipeline.image_processor.resize(Image.fromarray(case.pixels), *size)
    before = spec.encoder_picture.tokens(height, width)
    if spec.encoder_picture.area:  # its pictures have numbers, and stand in no template
        named = "Picture 1: <|vision_start|><|image_pad|><|vision_end|>"
        before += len(model.pipeline.tokenizer(named).input_ids) - 1
    for prompt in ("", "a red star", model.case.long_prompt):
        [whole], _ = model.pipeline.encode_prompt(prompt, picture)
        words = len(whole) - before
        read_of = encoder.text_encoders["text_encoder"].read_of(prompt)
        assert (read_of.used, read_of.cut) == (min(words, most), max(0, words - most))
        embeds = encoder.encode_prompt(prompt, [case.pixels])["prompt_embeds"]
        assert_equal(embeds, whole[: before + min(words, most)].detach().numpy())
    assert words > 2 * most


@of_all_models
def test_prompts_are_kept_by_picture(model: FamilyModel, tmp_path: Path) -> None:
    """And are what each alone would be, however many come together."""
    encoder = EditEncoder(model.encoder, structs.replace(model.config, runtime_dir=str(tmp_path)))
    case = model.edit(0)
    roll = np.roll(case.pixels, 5, 1)

    def edits() -> list[EncoderInput]:
        return [
            EncoderInput(
                request_of(pixels, "a red star", case.settings, 1, str(n)), pixels, case.mask
            )
            for n, pixels in enumerate((case.pixels, roll))
        ]

    for name in ("made", "kept"):
        for edit, answer in zip(edits(), encoder.encode_all(edits()), strict=True):
            assert not isinstance(answer, Exception)
            encoded, report = answer
            alone = model.encoder.encode_prompt("a red star", [edit.pixels])["prompt_embeds"]
            assert np.array_equal(encoded.conditioning["prompt_embeds"], alone)
            assert report.prompt == name
    encoder.close()


@of_all_models
def test_a_template_is_the_same_primed_by_any_edit_of_its_prompt(model: FamilyModel) -> None:
    """By one of another prompt it is not: what is kept has seen the words."""
    case = model.edit(2, num_inference_steps=3)
    first, again, other = (
        Primed(model.adapter, model.encoder, model.encoded(edit)).entries[0]
        for edit in (case, replace(case, seed=7), replace(case, prompt="a red star"))
    )
    for number, block in enumerate(first.blocks):
        for part, coded in enumerate(block.part("kv")):
            same, apart = (e.blocks[number].part("kv")[part].data for e in (again, other))
            assert_equal(coded.data.numpy(), same.numpy())
            assert coded.data.shape == apart.shape
            assert (float((coded.data - apart).abs().max()) > 1e-4) == (number > 0)


@of_all_models
def test_on_its_primings_inputs_a_cached_row_is_a_dense_one(model: FamilyModel) -> None:
    """Noise of the template's own, and its prompt: what it reads is what it would compute. Without
    a word it is not, since references see the text.
    """
    case = replace(
        model.edit(4, num_inference_steps=4, strength=1.0), prompt=model.case.long_prompt
    )
    job = still(model.encoded(case))
    primed = Primed(model.adapter, model.encoder, job)
    picture_words = primed.row.picture_words
    assert picture_words < len(primed.row.prompt.text) == len(job.conditioning["prompt_embeds"])

    def apart(job: Any) -> float:
        """As a share of what the step moves."""
        row: Any = cached(model.replay, job, primed)
        dense: Any = model.adapter.dense_row(job)
        row.image.masked.latents, dense.image.masked.latents = (
            primed.row.template.noise[row.image.masked.ids],
            primed.row.template.noise.clone(),
        )
        model.replay.step([row, dense], KV * model.adapter.blocks)
        moved = dense.latents - primed.row.template.noise
        off = row.latents - dense.latents[row.image.masked.ids]
        return float(off.abs().max() / moved.abs().max())

    wordless = {"prompt_embeds": job.conditioning["prompt_embeds"][:picture_words]}
    same = apart(job)
    assert same < 1e-5
    assert apart(replace(job, conditioning=wordless)) > 10 * same


@of_all_models
def test_a_step_without_an_anchor_computes_all_that_is_shown(model: FamilyModel) -> None:
    """If every token is active, only reference and text are the template's."""
    job = still(model.job(1, num_inference_steps=3, strength=1.0))
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row: Any = cached(model.replay, job, Primed(model.adapter, model.encoder, job))
    model.replay.reads(row, [None] * row.steps)
    dense = result(model.replay, model.adapter.dense_row(job))
    assert_equal(result(model.replay, row, "kv"), dense)


def test_references_of_2511_are_what_they_are_at_time_0(model: FamilyModel) -> None:
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

    adapter: Any = model.adapter
    assert (apart(0) < 1e-5) == adapter.timeless
    assert apart(1) > 1e-4


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
    model: FamilyModel, tmp_path: Path
) -> None:
    """The newer of the two files that it has written, where both are."""
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
    picture = load_spec(folder).encoder_picture
    processor = qwen_edit_pipeline(folder).processor.image_processor
    assert picture is not None
    assert picture.most == processor.size["longest_edge"] == 802_816


@of_all_models
def test_entries_without_keys_and_values_are_refused(model: FamilyModel) -> None:
    config = config_of(model.folder, cache={"entry_kind": "h"})
    with pytest.raises(ConfigError, match="entry_kind: h is not served with models whose prompts"):
        load_adapter(config)


@pytest.mark.parametrize("place", ["<|image_pad|>", "<|video_pad|>"])
def test_a_prompt_that_names_a_pictures_place_is_refused(model: FamilyModel, place: str) -> None:
    case = model.edit(0)
    with pytest.raises(InvalidRequest, match="is where the model has a picture"):
        model.encoder.encode_prompt(f"a cat {place}", [case.pixels])
