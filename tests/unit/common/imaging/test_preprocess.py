"""From a client's tensors to the model's arrays."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from maskserve_common.config import CacheConfig, Config, LimitsConfig, ModelConfig
from maskserve_common.contracts.keys import entries_id, template_id
from maskserve_common.contracts.request import AcceptedEdit, EditRequest, ResolvedControl, steps_run
from maskserve_common.contracts.semantics import FILL, INPAINT
from maskserve_common.contracts.settings import EditSettings, parse_settings
from maskserve_common.errors import InvalidRequest, TemplateNotFound
from maskserve_common.imaging.images import NO_LIMITS, decode_image, encode_image
from maskserve_engine.families.unet import spec as unet
from maskserve_engine.spec.encoder_picture import EncoderPicture
from maskserve_engine.spec.model_spec import ALL_KINDS, ModelSpec
from maskserve_triton import preprocess
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import source_and_weights
from maskserve_triton.preprocess import PreparedEdit, prepare_edit
from maskserve_triton.templates import StoredTemplates
from tests.fakes.corpus.settings import good_settings
from tests.fakes.hostile import SIZE, bad_images, good_inputs, hostile_cases
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import blob_mask, encode, odd_images, scene

CONFIG = Config(model=ModelConfig(path="models/demo", num_inference_steps=20))


def prepare(
    spec: ModelSpec = FILL_SPEC,
    config: Config = CONFIG,
    templates: Any = None,
    decoded_pixels: int = preprocess.DECODED_PIXELS,
    **inputs: bytes,
) -> PreparedEdit:
    all_inputs = {**good_inputs(), **inputs}
    accepted = accept_edit(
        parse_settings(all_inputs["SETTINGS"]), all_inputs["PROMPT"], spec, config
    )
    find = None if templates is None else templates.get
    return prepare_edit(
        all_inputs["IMAGE"],
        all_inputs["MASK"],
        accepted,
        spec,
        config,
        find,
        decoded_pixels=decoded_pixels,
    )


def settings(**values: Any) -> bytes:
    return json.dumps(values).encode()


def test_a_picture_too_long_to_be_shown_is_refused() -> None:
    spec = replace(FILL_SPEC, encoder_picture=EncoderPicture(28, 3136, 2**24))
    image = encode(np.zeros((8, 2000, 3), np.uint8))
    mask = encode(np.full((8, 2000), 255, np.uint8))
    with pytest.raises(InvalidRequest, match=r"IMAGE: is \d+x8 pixels to the model.*200 times"):
        prepare(spec, IMAGE=image, MASK=mask)


def test_an_ordinary_edit() -> None:
    before_ns = time.time_ns()
    prepared_edit = prepare(SETTINGS=settings(seed=7, strength=0.5))
    assert prepared_edit.pixels.shape == (40, 56, 3)
    np.testing.assert_array_equal(prepared_edit.pixels, scene(*SIZE))
    np.testing.assert_array_equal(prepared_edit.edit_mask, blob_mask(*SIZE))
    source, weights, *_ = source_and_weights(prepared_edit.context, prepared_edit.request)
    np.testing.assert_array_equal(source, scene(*SIZE))
    np.testing.assert_array_equal(weights, blob_mask(*SIZE))
    request = prepared_edit.request
    assert (request.seed, request.prompt) == (7, "a red star")
    assert (request.source_size, request.model_size) == (SIZE, (40, 56))
    assert request.template_id == template_id(scene(*SIZE))
    assert before_ns <= request.accepted_ns <= time.time_ns()
    assert request.timings_ms["preprocess"] > 0
    assert EditRequest.from_json(request.to_json()) == request


@given(good_settings(), st.text(max_size=20))
def test_what_was_accepted_is_read_back_as_it_was(options: dict[str, Any], prompt: str) -> None:
    settings = EditSettings(**{key: value for key, value in options.items() if value is not None})
    accepted = AcceptedEdit(prompt, settings, time.time_ns())
    assert AcceptedEdit.from_json(accepted.to_json()) == accepted


def test_defaults_are_filled_in_from_the_configuration() -> None:
    filled = prepare(SETTINGS=b"").request.settings
    assert (filled.num_inference_steps, filled.guidance_scale) == (20, 30.0)
    without = prepare(spec=replace(FILL_SPEC, guidance="none"), SETTINGS=b"{}")
    assert without.request.settings.guidance_scale is None


@pytest.mark.parametrize(
    ("configured", "embedded", "classifier_free"), [(0.0, 30.0, 7.5), (3.0, 3.0, 3.0)]
)
def test_the_default_guidance_follows_the_models_kind_of_guidance(
    configured: float, embedded: float, classifier_free: float
) -> None:
    config = structs.replace(CONFIG, model=structs.replace(CONFIG.model, guidance_scale=configured))
    for guidance, scale in (("embedded", embedded), ("cfg", classifier_free)):
        defaults = FILL_SPEC.defaults if guidance == "embedded" else unet.DEFAULTS
        spec = replace(FILL_SPEC, guidance=guidance, defaults=defaults)
        assert prepare(spec, config, SETTINGS=b"").request.settings.guidance_scale == scale


def test_seeds_and_ids_are_drawn_when_not_given() -> None:
    drawn = [prepare(SETTINGS=b"{}").request for _ in range(5)]
    assert len({request.seed for request in drawn}) == 5
    assert len({request.request_id for request in drawn}) == 5
    for request in drawn:
        assert (request.settings.seed, request.settings.request_id) == (
            request.seed,
            request.request_id,
        )
    named = prepare(SETTINGS=settings(seed=0, request_id="mine-1")).request
    assert (named.seed, named.request_id) == (0, "mine-1")


def test_large_images_are_brought_to_the_models_area() -> None:
    whole = settings(crop_to_mask="off")
    large = encode(scene(300, 200)), encode(blob_mask(300, 200))
    prepared_edit = prepare(IMAGE=large[0], MASK=large[1], SETTINGS=whole)
    assert prepared_edit.request.source_size == (300, 200)
    assert prepared_edit.request.model_size == (152, 104)
    assert prepared_edit.pixels.shape == (152, 104, 3)
    assert prepared_edit.edit_mask.shape == (152, 104)
    assert set(np.unique(prepared_edit.edit_mask)) == {0, 255}
    _, weights, *_ = source_and_weights(prepared_edit.context, prepared_edit.request)
    np.testing.assert_array_equal(weights, blob_mask(300, 200))


def test_sources_travel_decoded_up_to_a_size() -> None:
    assert prepare().context.decoded
    large = prepare(decoded_pixels=SIZE[0] * SIZE[1] - 1)
    assert not large.context.decoded
    assert large.context.source == good_inputs()["IMAGE"]
    _, weights, *_ = source_and_weights(large.context, large.request)
    np.testing.assert_array_equal(weights, blob_mask(*SIZE))


def test_all_text_encodings_give_the_same_edit() -> None:
    plain = prepare(SETTINGS=settings(seed=1))
    raw_inputs = good_inputs()
    text = {key: base64.b64encode(raw_inputs[key]) for key in ("IMAGE", "MASK")}
    for inputs in (
        text,
        {key: b"data:image/png;base64," + value for key, value in text.items()},
    ):
        prepared_edit = prepare(SETTINGS=settings(seed=1), **inputs)
        assert prepared_edit.context.source == plain.context.source
        assert prepared_edit.context.paste == plain.context.paste
        np.testing.assert_array_equal(prepared_edit.pixels, plain.pixels)


@pytest.mark.parametrize("side", [45, 128])  # 128: the model's own size
def test_sources_that_differ_in_transparency_alone_share_entries(side: int) -> None:
    rgb = scene(side, side)
    alphas = [np.full((side, side, 1), clear, np.uint8) for clear in (255, 9, 0)]
    sources = [encode(np.concatenate([rgb, alpha], axis=2)) for alpha in alphas]
    mask = encode(blob_mask(side, side))
    edits = [prepare(IMAGE=source, MASK=mask).request for source in sources]
    assert len({edit.template_id for edit in edits}) == 3
    assert len({edit.pixels_id for edit in edits}) == 1
    assert len({edit.template_noise_seed for edit in edits}) == 1


@pytest.mark.parametrize("odd", odd_images(), ids=lambda odd: odd.name)
def test_odd_sources_are_edited_like_others(odd: Any) -> None:
    prepared_edit = prepare(
        IMAGE=odd.encoded, MASK=encode(np.full(odd.pixels.shape[:2], 255, np.uint8))
    )
    assert prepared_edit.request.source_size == odd.pixels.shape[:2]
    assert (
        prepared_edit.request.template_id
        == decode_image(odd.encoded, "IMAGE", NO_LIMITS).template_id
    )
    assert entries_id(prepared_edit.request.template_id) == template_id(odd.pixels)
    assert (prepared_edit.edit_mask == 255).all()


def test_odd_masks_select_what_they_show() -> None:
    height, width = 45, 61
    image = encode(scene(height, width))
    for odd in odd_images(height, width):
        mode = settings(mask_mode="white")
        prepared_edit = prepare(IMAGE=image, MASK=odd.encoded, SETTINGS=mode)
        assert prepared_edit.edit_mask.any(), odd.name


@pytest.mark.parametrize("prompt", ["", "ein grüner Stern ★ 星", "a\nb\tc", "a" * 32_000])
def test_prompts_may_be_empty_long_or_in_any_script(prompt: str) -> None:
    assert prepare(PROMPT=prompt.encode()).request.prompt == prompt


# What is refused; the rest is in test_corpus.py


def test_the_corpus_starts_from_a_request_that_works() -> None:
    assert prepare(**good_inputs()).request.seed == 1
    names = [case.name for case in hostile_cases()]
    assert len(names) == len(set(names)) > 80


@pytest.mark.parametrize(
    ("spec", "config", "options", "field"),
    [
        ({"guidance": "none"}, {}, {"guidance_scale": 3.5}, "guidance_scale"),
        ({}, {}, {"negative_prompt": ""}, "negative_prompt"),
        ({}, {}, {"true_cfg_scale": 1.5}, "true_cfg_scale"),
        ({"true_cfg": True}, {}, {"negative_prompt": "a\0b"}, "negative_prompt"),
        ({"true_cfg": True}, {}, {"negative_prompt": "blur"}, "negative_prompt"),
        ({"true_cfg": True}, {}, {"negative_prompt": "", "true_cfg_scale": 1}, "negative_prompt"),
        ({"true_cfg": True}, {}, {"true_cfg_scale": 1.5}, "true_cfg_scale"),
        ({"predicts_steps": False}, {}, {"step_interval": 2}, "step_interval"),
        ({}, {}, {"step_interval": 0}, "step_interval"),
        ({}, {}, {"first_block_threshold": 0.1}, "first_block_threshold"),
        ({"elastic": False}, {}, {"reuse": "elastic", "reuse_floor": 30.0}, "reuse"),
        ({}, {}, {"reuse": "elastic", "reuse_floor": 30.0, "reproducible": True}, "reuse"),
        ({}, {}, {"reuse": "elastic"}, "reuse"),
        ({}, {}, {"reuse_floor": 30.0, "cache": "require"}, "reuse_floor"),
        ({}, {}, {"reuse_floor": 30.0, "reproducible": True}, "reuse_floor"),
        ({}, {}, {"model": "demo2"}, "model"),
        ({}, {"limits": LimitsConfig(max_steps=9)}, {"num_inference_steps": 10}, "num_infer"),
        ({}, {"cache": CacheConfig(enabled=False)}, {"cache": "require"}, "cache"),
    ],
)
def test_what_the_model_or_worker_cannot_do_is_refused(
    spec: dict[str, Any], config: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare(
            replace(FILL_SPEC, **spec),
            structs.replace(CONFIG, **config),
            SETTINGS=settings(**options),
        )
    assert caught.value.field.startswith(f"SETTINGS.{field}")


def test_what_the_model_can_do_passes() -> None:
    able = replace(FILL_SPEC, true_cfg=True)
    edit_settings = settings(
        negative_prompt="blur", true_cfg_scale=2.0, guidance_scale=1, model="demo"
    )
    assert prepare(able, SETTINGS=edit_settings).request.settings.negative_prompt == "blur"
    assert prepare(SETTINGS=settings(true_cfg_scale=1.0)).request.settings.true_cfg_scale == 1


@pytest.mark.parametrize("name", bad_images())
def test_a_bad_control_picture_is_refused_as_a_bad_image_is(name: str) -> None:
    raw_inputs = good_inputs()
    controls = (ResolvedControl(name="outline", image=0),)
    accepted = replace(
        accept_edit(
            parse_settings(raw_inputs["SETTINGS"]), raw_inputs["PROMPT"], FILL_SPEC, CONFIG
        ),
        controls=controls,
    )
    picture = bad_images()[name]
    with pytest.raises(InvalidRequest) as caught:
        prepare_edit(
            raw_inputs["IMAGE"], raw_inputs["MASK"], accepted, FILL_SPEC, CONFIG, control=[picture]
        )
    assert caught.value.field == "CONTROL[0]"
    assert len(str(caught.value)) < 500
    prepared_edit = prepare_edit(
        raw_inputs["IMAGE"],
        raw_inputs["MASK"],
        accepted,
        FILL_SPEC,
        CONFIG,
        control=[raw_inputs["IMAGE"]],
    )
    np.testing.assert_array_equal(prepared_edit.controls[0], prepared_edit.pixels)


def filling(mask: Any, *controls: ResolvedControl) -> Any:
    """A prepared edit, or one without a mask, with a picture for each control's `image`."""
    raw_inputs, edit_settings = good_inputs(), EditSettings()
    spec = replace(FILL_SPEC, edit_kinds=ALL_KINDS)
    accepted = accept_edit(edit_settings, raw_inputs["PROMPT"], spec, CONFIG)
    if mask is None:
        accepted = replace(accepted, kind="edit")
    accepted, count = replace(accepted, controls=controls), len({c.image for c in controls})
    pictures = [raw_inputs["IMAGE"]] * count
    return prepare_edit(raw_inputs["IMAGE"], mask, accepted, spec, CONFIG, control=pictures)


def test_a_net_that_fills_the_mask_sees_its_picture_black_there() -> None:
    mask = good_inputs()["MASK"]
    outline, fill = (
        ResolvedControl(name=name, image=image, fills=name == "fill")
        for image, name in enumerate(("outline", "fill"))
    )
    prepared_edit = filling(mask, outline, fill)
    is_masked = prepared_edit.edit_mask > 127
    assert is_masked.any()
    assert not is_masked.all()
    np.testing.assert_array_equal(prepared_edit.controls[0], prepared_edit.pixels)
    assert not prepared_edit.controls[1][is_masked].any()
    np.testing.assert_array_equal(
        prepared_edit.controls[1][~is_masked], prepared_edit.pixels[~is_masked]
    )


def test_a_net_that_fills_the_mask_needs_one_and_a_picture_of_its_own() -> None:
    fill = ResolvedControl(name="fill", image=0, fills=True)
    with pytest.raises(InvalidRequest, match=r"MASK.* is missing, and ControlNet fill fills it"):
        filling(None, fill)
    mask, outline = good_inputs()["MASK"], ResolvedControl(name="outline", image=0)
    with pytest.raises(InvalidRequest, match=r"controls\[1\]\.image: is the picture of a"):
        filling(mask, fill, outline)


def test_control_pictures_are_seen_through_the_edit_s_window() -> None:
    spec, mask = replace(FILL_SPEC, native_resolution=64), np.zeros((500, 700), np.uint8)
    mask[180:215, 333:371] = 255
    source, outlines = scene(500, 700, 1), scene(500, 700, 2)
    accepted = replace(
        accept_edit(EditSettings(crop_to_mask="on"), b"x", spec, CONFIG),
        controls=(ResolvedControl(name="outline", image=0),),
    )
    prepared_edit = prepare_edit(
        encode(source), encode(mask), accepted, spec, CONFIG, control=[encode(outlines)]
    )
    assert prepared_edit.request.window is not None
    top, left, height, width = prepared_edit.request.window
    assert prepared_edit.request.model_size == (height, width)
    window = slice(top, top + height), slice(left, left + width)
    np.testing.assert_array_equal(prepared_edit.pixels, source[window])
    np.testing.assert_array_equal(prepared_edit.controls[0], outlines[window])


def test_steps_are_predicted_by_default_where_the_worker_says_so() -> None:
    config = structs.replace(CONFIG, model=structs.replace(CONFIG.model, step_interval=3))

    def interval(**options: Any) -> int | None:
        prepared_edit = prepare(config=config, SETTINGS=settings(**options))
        return prepared_edit.request.settings.step_interval

    assert (interval(), interval(step_interval=2), interval(step_interval=1)) == (3, 2, 1)
    assert prepare().request.settings.step_interval == 1


def test_output_formats_that_cannot_hold_the_size_are_refused() -> None:
    config = structs.replace(CONFIG, limits=LimitsConfig(max_side=20_000))
    inputs = {
        "IMAGE": encode(scene(2, 16_400)),
        "MASK": encode(np.full((2, 16_400), 255, np.uint8)),
    }
    with pytest.raises(InvalidRequest, match=r"SETTINGS.output_format: webp cannot hold 16400x2"):
        prepare(config=config, SETTINGS=settings(output_format="webp"), **inputs)
    assert prepare(config=config, SETTINGS=b"", **inputs).request.source_size == (2, 16_400)


def test_the_number_of_steps_is_that_of_diffusers() -> None:
    for steps in range(1, 60):
        for strength in (1.0, 0.999, 0.75, 0.5, 0.3, 0.1, 0.01):
            initial = min(steps * strength, steps)
            start = int(max(steps - initial, 0))
            assert steps_run(steps, strength) == len(range(steps)[start:]) >= 1
    assert steps_run(20, 1e-18) == 0


# Templates


def test_a_registered_template_stands_in_for_the_image(tmp_path: Path) -> None:
    raw_inputs = good_inputs()
    folder = StoredTemplates(tmp_path)
    name = template_id(scene(*SIZE))
    folder.put(name, raw_inputs["IMAGE"])
    prepared_edit = prepare(
        templates=folder, IMAGE=b"", SETTINGS=settings(template_id=name, seed=1)
    )
    direct_edit = prepare(SETTINGS=settings(seed=1))
    np.testing.assert_array_equal(prepared_edit.pixels, direct_edit.pixels)
    assert prepared_edit.context.source == direct_edit.context.source
    assert prepared_edit.request.template_id == direct_edit.request.template_id == name


def test_image_and_template_id_must_agree(tmp_path: Path) -> None:
    name = template_id(scene(*SIZE))
    assert prepare(SETTINGS=settings(template_id=name)).request.template_id == name
    with pytest.raises(InvalidRequest, match=f"SETTINGS.template_id: is not .* accepted: {name}"):
        prepare(SETTINGS=settings(template_id="0" * 32), templates=StoredTemplates(tmp_path))


def test_unknown_templates_are_not_found(tmp_path: Path) -> None:
    for templates in (None, StoredTemplates(tmp_path)):
        with pytest.raises(TemplateNotFound, match=r"SETTINGS\.template_id"):
            prepare(templates=templates, IMAGE=b"", SETTINGS=settings(template_id="0" * 32))


def test_inpaint_models_get_whole_latents_so_that_no_mask_vanishes() -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[13, 21] = 255
    picture = encode_image(np.stack([mask] * 3, axis=2), "png")
    source = encode_image(np.full((64, 64, 3), 90, np.uint8), "png")
    for semantics, expected in ((FILL, 1), (INPAINT, FILL_SPEC.vae_scale_factor**2)):
        spec = replace(FILL_SPEC, semantics=semantics, native_resolution=64)
        ready = prepare(spec, IMAGE=source, MASK=picture, SETTINGS=b"{}")
        assert (ready.edit_mask > 127).sum() == expected
        assert ready.edit_mask[13, 21] == 255


@pytest.mark.parametrize("semantics", [FILL, INPAINT])
def test_grey_says_how_much_may_change(semantics: Any) -> None:
    grey = np.zeros((64, 64), np.uint8)
    grey[8:24, 8:24], grey[13, 21], grey[40, 40] = 60, 200, 1
    source = encode_image(np.full((64, 64, 3), 90, np.uint8), "png")
    spec = replace(FILL_SPEC, semantics=semantics, native_resolution=64)
    edit_inputs = {"MASK": encode(grey), "SETTINGS": settings(mask_mode="strength")}
    ready = prepare(spec, IMAGE=source, **edit_inputs)
    side = spec.vae_scale_factor if semantics.blends else 1
    cells = grey.reshape(64 // side, side, 64 // side, side).max(axis=(1, 3))
    expected = np.repeat(np.repeat(cells, side, 0), side, 1)
    assert np.array_equal(ready.edit_mask, expected)
    _, weights, *_ = source_and_weights(ready.context, ready.request)
    assert np.array_equal(weights, np.where(grey > 0, 255, 0))  # what may change is pasted whole
    grown = {**edit_inputs, "SETTINGS": settings(mask_mode="strength", expand=[64, 0, 0, 0])}
    wide = prepare(replace(spec, native_resolution=128), IMAGE=source, **grown).edit_mask
    assert (wide[:, : wide.shape[1] // 2] == 255).all()
    assert set(np.unique(wide)) == {0, 1, 60, 200, 255}


@pytest.mark.parametrize("name", ["mask_dilate", "mask_feather"])
def test_grey_is_not_grown(name: str) -> None:
    edit_settings = settings(mask_mode="strength", **{name: 3})
    with pytest.raises(InvalidRequest, match=f"SETTINGS.{name}: is given with mask_mode strength"):
        prepare(SETTINGS=edit_settings)


def test_black_may_not_change_at_all() -> None:
    with pytest.raises(InvalidRequest, match=r"MASK: selects nothing.*luminance 1 or more"):
        prepare(MASK=encode(np.zeros(SIZE, np.uint8)), SETTINGS=settings(mask_mode="strength"))


@pytest.mark.parametrize(
    ("as_text", "options", "answered"),
    [
        (False, {}, "raw"),
        (True, {}, "base64"),
        (True, {"output_encoding": "raw"}, "raw"),
        (False, {"output_encoding": "base64"}, "base64"),
    ],
)
def test_an_answer_is_encoded_as_the_mask_came(
    as_text: bool, options: dict[str, Any], answered: str
) -> None:
    """JSON carries bytes as text only, and no model is told that a request was JSON."""
    mask = good_inputs()["MASK"]
    if as_text:
        mask = b"data:image/png;base64," + base64.b64encode(mask)
    prepared_edit = prepare(MASK=mask, SETTINGS=settings(**options))
    assert prepared_edit.request.settings.output_encoding == answered
