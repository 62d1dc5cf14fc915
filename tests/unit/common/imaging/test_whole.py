"""Pictures without a mask: their sizes are diffusers', and their answers the model's pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import c2pa
import numpy as np
import pytest
from PIL import Image

from maskserve_common.config import Config, LimitsConfig, ProvenanceConfig, SafetyConfig
from maskserve_common.contracts.keys import template_id
from maskserve_common.contracts.request import EditKind, EditRequest, ResolvedControl
from maskserve_common.contracts.semantics import REFERENCE
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest, Refused, TemplateNotFound
from maskserve_common.imaging.images import to_base64
from maskserve_common.imaging.provenance import GENERATED_TYPE, SOURCE_TYPE, make_mark
from maskserve_common.imaging.whole import (
    _PREFERRED,
    PictureFit,
    check_answer_size,
    fit_of,
    middle,
    native_size,
)
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import finish_edit
from maskserve_triton.preprocess import PreparedEdit, pixels_of, prepare_edit
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import encode, scene
from tests.fakes.profiles import rgb_profile
from tests.support.certificates import write_signer
from tests.support.draws import fresh_rng

SPEC = replace(
    FILL_SPEC,
    semantics=REFERENCE,
    native_resolution=64,
    edit_size="preferred",
    edit_kinds=frozenset({"inpaint", "edit", "generate"}),
)
"""A small FLUX.1 Kontext that also makes pictures."""
SIZE = (40, 56)


def prepare(
    kind: EditKind,
    image: bytes = b"",
    config: Config | None = None,
    spec: ModelSpec = SPEC,
    control: tuple[bytes, ...] = (),
    references: tuple[bytes, ...] = (),
    templates: Mapping[str, bytes] = {},
    **settings: Any,
) -> PreparedEdit:
    config = config or Config()
    accepted = accept_edit(EditSettings(**settings), b"a red star", spec, config, kind=kind)
    controls = tuple(
        ResolvedControl(name=f"net-{index}", image=index) for index in range(len(control))
    )
    accepted = replace(accepted, controls=controls)
    find = lambda name, scope: templates.get(name)  # noqa: E731
    return prepare_edit(
        image, b"", accepted, spec, config, find, control=control, references=references
    )


def drawn_sizes(count: int, low: int, high: int) -> list[tuple[int, int]]:
    rng = fresh_rng()
    return [(int(h), int(w)) for h, w in rng.integers(low, high, (count, 2))]


# Sizes, beside diffusers'


def test_kontexts_size_is_the_pipelines() -> None:
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    assert list(_PREFERRED) == PREFERRED_KONTEXT_RESOLUTIONS
    for height, width in drawn_sizes(200, 64, 5000):
        ratio = width / height
        _, wide, high = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        assert fit_of((height, width), "preferred", 1024, 16) == PictureFit(
            (high, wide), (high, wide)
        )


def test_qwens_size_is_the_pipelines() -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    for height, width in drawn_sizes(200, 64, 5000):
        wide, high, _ = calculate_dimensions(1024 * 1024, width / height)
        assert fit_of((height, width), "area", 1024, 32) == PictureFit((high, wide), (high, wide))


def test_longcats_size_is_the_pipelines() -> None:
    from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import calculate_dimensions

    for height, width in [*drawn_sizes(200, 64, 5000), (512, 512), (400, 1600)]:
        wide, high = calculate_dimensions(1024 * 1024, width / height)
        fit = fit_of((height, width), "covering", 1024, 16)
        assert fit == PictureFit((high, wide), (high, wide))


def test_kleins_picture_is_the_pipelines() -> None:
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

    processor = Flux2ImageProcessor(vae_scale_factor=16)
    for height, width in drawn_sizes(12, 64, 1400):
        source = Image.fromarray(scene(height, width))
        expected = source
        if width * height > 1024 * 1024:
            expected = processor._resize_to_target_area(source, 1024 * 1024)
        wide, high = (side // 16 * 16 for side in expected.size)
        expected = processor._resize_and_crop(expected, wide, high)
        fit = fit_of((height, width), "cut", 1024, 16)
        np.testing.assert_array_equal(fit.of(source), expected)
        assert fit.size == (high, wide)


@pytest.mark.parametrize("native", [1024, 320])
def test_a_padded_picture_is_flux3s(native: int) -> None:
    from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor

    processor, sizes = Flux3ImageProcessor(), drawn_sizes(10, 1, 700)
    for height, width in [*sizes, (1, 1), (9, 400), (320, 320), (64, 80), (3, 2500)]:
        source = Image.fromarray(scene(height, width))
        scaled = processor._resize_if_canvas_exceeds_area(source, native**2)
        high, wide = processor._get_canvas_height_width(scaled.height, scaled.width)
        expected = processor._resize_and_fill(scaled, wide, high)
        fit = fit_of((height, width), "padded", native, 16)
        np.testing.assert_array_equal(fit.of(source), expected)
        left, top, right, bottom = processor._get_fill_region(scaled, high, wide)
        answer = middle(np.asarray(expected), fit.answer_size)
        np.testing.assert_array_equal(answer, np.asarray(expected)[top:bottom, left:right])


def test_the_answer_has_no_padding() -> None:
    spec = replace(SPEC, edit_size="padded")
    edit = prepare("edit", encode(scene(50, 57)), spec=spec)
    assert (edit.request.source_size, edit.request.model_size) == ((50, 57), (64, 64))
    pixels = drawn((64, 64))
    answer = Image.open(io.BytesIO(finish_edit(pixels, edit.context)))
    np.testing.assert_array_equal(answer, pixels[7:57, 3:60])


@pytest.mark.parametrize("rule", ["bounded", "preferred", "area", "covering", "cut", "padded"])
def test_every_size_is_on_the_grid_of_a_model_of_any_size(rule: Any) -> None:
    rng = fresh_rng()
    sizes = [(1, 3000), (3000, 1), (1, 1), *drawn_sizes(200, 1, 3000)]
    for number, (height, width) in enumerate(sizes):
        multiple = int(rng.choice([8, 16, 32]))
        native = multiple * int(rng.integers(1, 65))
        fit = fit_of((height, width), rule, native, multiple)
        assert all(side % multiple == 0 < side for side in fit.size)
        sides = (fit.scaled, fit.size) if rule == "padded" else (fit.size, fit.scaled)
        assert all(part <= whole for part, whole in zip(*sides, strict=True))
        if number < 12:  # a picture takes a thousand times as long
            picture = fit.of(Image.fromarray(np.zeros((height, width, 3), np.uint8)))
            assert (picture.height, picture.width) == fit.size


def test_references_have_the_size_of_one_of_several() -> None:
    pictures = [scene(*size) for size in (SIZE, (40, 72), (200, 90))]
    image, *references = map(encode, pictures)
    prepared = prepare("edit", image, references=tuple(references))
    edit, begin = prepared.request, 0
    for reference, picture in zip(edit.references, pictures[1:], strict=True):
        fit = fit_of(picture.shape[:2], "cut", 64, SPEC.size_multiple)
        height, width = reference.size
        pixels = prepared.references[begin : begin + 3 * height * width]
        reference_pixels = pixels.reshape(height, width, 3)
        np.testing.assert_array_equal(reference_pixels, fit.of(Image.fromarray(picture)))
        assert reference.pixels_id == template_id(reference_pixels)
        begin += pixels.size
    assert begin == prepared.references.size
    assert EditRequest.from_json(edit.to_json()).references == edit.references
    assert edit.source_size == fit_of(SIZE, "cut", 64, SPEC.size_multiple).size


def test_named_references_follow_those_that_are_sent() -> None:
    image, *further = (encode(scene(*size)) for size in (SIZE, (40, 72), (200, 90)))
    names = {f"{number:016x}": picture for number, picture in enumerate(further)}
    sent = prepare("edit", image, references=tuple(further))
    for count in range(3):
        edit = prepare(
            "edit",
            image,
            references=tuple(further[:count]),
            templates=names,
            reference_ids=tuple(names)[count:],
        )
        assert edit.request.references == sent.request.references
        np.testing.assert_array_equal(edit.references, sent.references)
    with pytest.raises(TemplateNotFound, match=r"SETTINGS\.reference_ids\[1\]: f{16} is not"):
        prepare("edit", image, templates=names, reference_ids=("0" * 16, "f" * 16))
    accepted = accept_edit(
        EditSettings(reference_ids=tuple(names)), b"", SPEC, Config(), kind="edit"
    )
    pixels = pixels_of([image, b""], accepted, Config(), lambda name, _: names.get(name))
    assert pixels == 40 * 56 + 40 * 72 + 200 * 90


def test_several_pictures_are_bounded_together_and_a_bad_one_is_named() -> None:
    image, other = encode(scene(*SIZE)), encode(scene(40, 72))
    pixels, size = 40 * 56 + 40 * 72, len(image) + len(other)
    for limits, message in (
        (LimitsConfig(max_pixels=pixels - 1), f"IMAGE: has pictures of {pixels} pixels together"),
        (LimitsConfig(max_image_bytes=size - 1), f"IMAGE: has pictures of {size} bytes together"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            prepare("edit", image, Config(limits=limits), references=(other,))
        assert refused.value.message.startswith(message)
    fits = LimitsConfig(max_pixels=pixels, max_image_bytes=size)
    assert prepare("edit", image, Config(limits=fits), references=(other,)).request.references
    for broken in (b"no picture", other[:60]):
        with pytest.raises(InvalidRequest, match=r"^\[INVALID_REQUEST\] IMAGE\[2\]: "):
            prepare("edit", image, references=(other, broken))


def test_a_refused_size_names_one_that_is_accepted() -> None:
    limits, rng = Config().limits, fresh_rng()
    assert native_size(1000, 16) == (992, 992)
    for height, width in drawn_sizes(300, 1, 3000):
        multiple = int(rng.choice([8, 16, 32]))
        native = multiple * int(rng.integers(8, 65))
        fits = height % multiple == width % multiple == 0 and height * width <= native**2
        try:
            check_answer_size((height, width), native, multiple, limits)
            assert fits
        except InvalidRequest as error:
            assert not fits
            wide, high = map(int, error.message.rsplit(" ", 1)[1].split("x"))
            check_answer_size((high, wide), native, multiple, limits)


# Arrays of the model


def test_an_edit_without_a_mask_is_the_whole_source_at_the_models_size() -> None:
    source = scene(*SIZE)
    spec = replace(SPEC, edit_size="cut")
    edit = prepare("edit", encode(source), spec=spec, seed=7)
    np.testing.assert_array_equal(edit.pixels, source)
    assert edit.edit_mask.shape == SIZE
    assert (edit.edit_mask == 255).all()
    request = edit.request
    assert (request.kind, request.source_size, request.model_size) == ("edit", SIZE, SIZE)
    assert (request.window, request.edit_boxes, request.alpha) == (None, (), False)
    assert request.template_id == template_id(source)
    assert request.pixels_id
    assert EditRequest.from_json(edit.context.request) == request
    assert not edit.context.source


def test_an_edits_size_is_the_clients_or_the_models() -> None:
    image = encode(scene(*SIZE))
    assert prepare("edit", image).request.model_size == fit_of(SIZE, "preferred", 64, 8).size
    sized = prepare("edit", image, size="32x64")
    assert (sized.pixels.shape, sized.request.source_size) == ((64, 32, 3), (64, 32))
    unscaled = prepare("edit", image, size="56x40")
    np.testing.assert_array_equal(unscaled.pixels, scene(*SIZE))


def test_a_source_of_other_colours_is_seen_in_srgb() -> None:
    source = encode(scene(*SIZE), "PNG", icc_profile=rgb_profile())
    edit = prepare("edit", source, size="56x40")
    assert not np.array_equal(edit.pixels, scene(*SIZE))


def test_a_picture_without_a_source_has_its_size_alone() -> None:
    edit = prepare("generate", size="48x32")
    assert edit.pixels.shape == (0, 0, 3)
    assert edit.edit_mask.shape == (32, 48)
    assert (edit.edit_mask == 255).all()
    request = edit.request
    assert (request.kind, request.template_id, request.pixels_id) == ("generate", "", "")
    assert (request.source_size, request.model_size) == ((32, 48), (32, 48))
    assert prepare("generate").request.model_size == (64, 64)
    accepted = accept_edit(EditSettings(), b"", SPEC, Config(), kind="generate")
    assert pixels_of([b"", b""], accepted, Config(), lambda *_: None) == 0


def test_control_pictures_are_fitted_as_the_source_is() -> None:
    outline = scene(*SIZE)
    spec = replace(SPEC, edit_size="cut", native_resolution=40)
    edit = prepare("edit", encode(outline), spec=spec, control=(encode(outline),))
    np.testing.assert_array_equal(edit.controls[0], edit.pixels)
    picture = prepare("generate", size="56x40", control=(encode(outline),))
    np.testing.assert_array_equal(picture.controls[0], outline)
    with pytest.raises(InvalidRequest, match=r"CONTROL\[0\]: is 56x40 pixels"):
        prepare("generate", size="48x40", control=(encode(outline),))


# Answers


def drawn(size: tuple[int, int], channels: int = 3) -> np.ndarray:
    return fresh_rng().integers(0, 256, (*size, channels), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["edit", "generate"])
@pytest.mark.parametrize("output_format", ["png", "webp", "jpeg"])
def test_the_answer_is_the_models_picture(kind: EditKind, output_format: Any) -> None:
    image = encode(scene(*SIZE)) if kind == "edit" else b""
    edit = prepare(kind, image, output_format=output_format)
    pixels = drawn(edit.request.model_size)
    answer = Image.open(io.BytesIO(finish_edit(pixels, edit.context)))
    assert (answer.mode, answer.format) == ("RGB", output_format.upper())
    if output_format != "jpeg":
        np.testing.assert_array_equal(answer, pixels)


def test_a_model_with_alpha_answers_as_it_draws() -> None:
    spec = replace(SPEC, latents=replace(SPEC.latents, alpha=True))
    for settings, channels in (
        ({}, 4),
        ({"background": "transparent"}, 4),
        ({"background": "opaque"}, 3),
        ({"output_format": "jpeg"}, 3),
    ):
        edit = prepare("generate", spec=spec, **settings)
        pixels = drawn(edit.request.model_size, 4)
        answer = Image.open(io.BytesIO(finish_edit(pixels, edit.context)))
        assert len(answer.getbands()) == channels
        if settings.get("output_format") != "jpeg":
            np.testing.assert_array_equal(answer, pixels[..., :channels])


def test_the_answer_is_text_where_the_source_came_as_text() -> None:
    edit = prepare("edit", to_base64(encode(scene(*SIZE))))
    assert edit.request.settings.output_encoding == "base64"
    answer = finish_edit(drawn(edit.request.model_size), edit.context)
    assert answer.startswith(b"iVBOR")
    assert prepare("generate").request.settings.output_encoding == "raw"


def test_the_mark_tells_pictures_without_a_source_from_edits() -> None:
    for kind, term in (("edit", SOURCE_TYPE), ("generate", GENERATED_TYPE)):
        image = encode(scene(*SIZE)) if kind == "edit" else b""
        edit = prepare(kind, image)  # type: ignore[arg-type]
        pixels = drawn(edit.request.model_size)
        answer = finish_edit(pixels, edit.context, make_mark(Config()))
        assert f'DigitalSourceType="{term}"'.encode() in answer


def test_a_signature_names_the_source_of_an_edit_and_none_of_others(tmp_path: Any) -> None:
    chain, key = write_signer(tmp_path)
    provenance = ProvenanceConfig(certificate=str(chain), private_key=str(key))
    config = Config(provenance=provenance)
    mark = make_mark(config)

    def store(edit: PreparedEdit) -> tuple[bytes, dict[str, Any]]:
        answer = finish_edit(drawn(edit.request.model_size), edit.context, mark)
        store = json.loads(c2pa.Reader("image/png", io.BytesIO(answer)).json())
        assert store["validation_state"] == "Valid"
        return answer, store

    picture, first = store(prepare("generate", config=config))
    [manifest] = first["manifests"].values()
    [action] = manifest["assertions"][0]["data"]["actions"]
    assert (action["action"], action["digitalSourceType"]) == ("c2pa.created", GENERATED_TYPE)
    _, second = store(prepare("edit", picture, config=config))
    assert len(second["manifests"]) == 2


@pytest.mark.parametrize("kind", ["edit", "generate"])
def test_the_check_sees_the_source_or_black(kind: EditKind) -> None:
    config = Config(safety=SafetyConfig(check="json:dumps"))
    image = encode(scene(*SIZE)) if kind == "edit" else b""
    edit = prepare(kind, image, config=config, size="56x40")
    pixels, calls = drawn(SIZE), []

    def check(source: Image.Image, prompt: str, picture: Image.Image) -> str | None:
        calls.append((np.asarray(source), prompt, np.asarray(picture)))
        return None if len(calls) == 1 else "no"

    finish_edit(pixels, edit.context, check=check)
    ((source, prompt, picture),) = calls
    np.testing.assert_array_equal(source, scene(*SIZE) if kind == "edit" else np.zeros((*SIZE, 3)))
    assert prompt == "a red star"
    np.testing.assert_array_equal(picture, pixels)
    with pytest.raises(Refused, match="no"):
        finish_edit(pixels, edit.context, check=check)
