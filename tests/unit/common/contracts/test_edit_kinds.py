"""An edit's kind follows from its pictures; what its model or kind lacks is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import fields

from maskserve_common.config import Config, EngineConfig, LimitsConfig
from maskserve_common.contracts.edit_kinds import (
    check_references,
    check_settings_of,
    edit_kind,
    settings_for,
)
from maskserve_common.contracts.request import AcceptedEdit, EditKind
from maskserve_common.contracts.semantics import INPAINT, REFERENCE
from maskserve_common.contracts.settings import (
    EditSettings,
    IpAdapterSetting,
    MaskFrom,
    parse_settings,
)
from maskserve_common.errors import InvalidRequest
from maskserve_engine.planning.regions import RegionRule
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_triton.accept import accept_edit
from tests.fakes.model_specs import FILL_SPEC

EVERY: frozenset[EditKind] = frozenset({"inpaint", "edit", "generate"})
BASE = replace(FILL_SPEC, semantics=INPAINT, edit_kinds=EVERY)
"""A base model, which sees no references."""
KONTEXT = replace(BASE, semantics=REFERENCE)


def accept(kind: EditKind, spec: ModelSpec = BASE, **settings: Any) -> AcceptedEdit:
    return accept_edit(EditSettings(**settings), b"x", spec, Config(), kind=kind)


def test_the_pictures_decide_the_kind() -> None:
    masks = ({}, {"expand": (1, 0, 0, 0)}, {"mask_from": MaskFrom(text="a cat")})
    for image, template, mask, setting in product(
        (True, False), (True, False), (True, False), masks
    ):
        named = {"template_id": "0" * 32} if template else {}
        settings = EditSettings(**named, **setting)
        has_source, has_mask = image or template, mask or bool(setting)
        if has_mask and not has_source:
            [name] = ["MASK"] if mask else [f"SETTINGS.{key}" for key in setting]
            with pytest.raises(InvalidRequest, match=rf"IMAGE: is missing, and {name} needs"):
                edit_kind(settings, image=image, mask=mask)
            continue
        expected = "inpaint" if has_mask else "edit" if has_source else "generate"
        assert edit_kind(settings, image=image, mask=mask) == expected


@pytest.mark.parametrize(
    ("pictures", "most", "message"),
    [
        ([b"a", b"b"], 1, "IMAGE: has 2 pictures; accepted: one with this model"),
        ([b"a", b"b", b"c"], 2, "IMAGE: has 3 pictures; accepted: up to 2 with this model"),
        ([b"a", b"", b"c"], 3, "IMAGE[1]: is empty; accepted: a picture"),
        ([b"", b"b"], 3, "IMAGE[0]: is empty, and further pictures follow"),
    ],
)
def test_pictures_that_a_model_does_not_take_are_refused(
    pictures: list[bytes], most: int, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_references(pictures, EditSettings(), most)
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    ("pictures", "most", "accepted"),
    [([b"a"], 2, "up to 2 with this model"), ([b"a", b"b"], 1, "one with this model")],
)
def test_named_references_count_beside_the_pictures(
    pictures: list[bytes], most: int, accepted: str
) -> None:
    settings = EditSettings(reference_ids=("0" * 16, "1" * 16))
    check_references(pictures, settings, len(pictures) + 2)
    problem = f"make {len(pictures) + 2} pictures with those of IMAGE"
    with pytest.raises(InvalidRequest) as refused:
        check_references(pictures, settings, most)
    assert refused.value.message == f"SETTINGS.reference_ids: {problem}; accepted: {accepted}"


def test_a_template_may_have_references() -> None:
    check_references([b"", b"b", b"c"], EditSettings(template_id="0" * 32), 3)
    for pictures in ([], [b""], [b"a"], [b"a", b"b"]):
        check_references(pictures, EditSettings(), 2)


def test_a_kind_that_a_model_lacks_is_refused_and_the_others_are_named() -> None:
    every: tuple[EditKind, ...] = ("inpaint", "edit", "generate")
    pictures = {
        "inpaint": "IMAGE with MASK",
        "edit": "IMAGE alone",
        "generate": "neither IMAGE nor MASK",
    }
    for chosen in product((True, False), repeat=3):
        served = {kind for kind, is_served in zip(every, chosen, strict=True) if is_served}
        spec = replace(BASE, edit_kinds=frozenset(served))
        for kind in every:
            strength = {"strength": 0.5} if kind == "edit" else {}
            if kind in served:
                assert accept(kind, spec, **strength).kind == kind
                continue
            with pytest.raises(InvalidRequest) as caught:
                accept(kind, spec, **strength)
            assert caught.value.field == ("IMAGE" if kind == "generate" else "MASK")
            for other in every:
                assert (pictures[other] in caught.value.message) == (other in served)
    only = replace(BASE, edit_kinds=frozenset({"inpaint"}))
    with pytest.raises(InvalidRequest, match="MASK: is missing: this model repaints masks only"):
        accept("edit", only)


@pytest.mark.parametrize("kind", ["edit", "generate"])
@pytest.mark.parametrize(
    "setting",
    [
        {"mask_mode": "white"},
        {"mask_dilate": 3},
        {"mask_feather": 3},
        {"mask_ring": 0},
        {"crop_to_mask": "off"},
        {"crop_padding": 0.5},
        {"cache": "own"},
        {"cache": "require"},
        {"background": "transparent"},
    ],
)
def test_settings_without_effect_are_refused(kind: EditKind, setting: dict[str, Any]) -> None:
    [name] = setting
    with pytest.raises(InvalidRequest, match=rf"SETTINGS\.{name}: "):
        accept(kind, KONTEXT, **setting)
    config = Config()
    accept_edit(EditSettings(**setting), b"x", KONTEXT, config)
    default = {field.name: field.default for field in fields(EditSettings)}[name]
    accept(kind, KONTEXT, **{name: default})


@pytest.mark.parametrize("kind", sorted(EVERY))
def test_settings_of_several_edits_fit_each_kind(kind: EditKind) -> None:
    """Settings without effect in a kind, or that would change it, are dropped; all others stay."""
    shared = EditSettings(
        size="64x64", mask_dilate=3, mask_mode="white", expand=(8, 0, 0, 0), strength=0.5,
        mask_from=MaskFrom(text="a cat"), template_id="0" * 16, cache="require", seed=7,
        guidance_scale=3.0, region="auto",
    )  # fmt: skip
    settings = settings_for(shared, kind)
    check_settings_of(settings, kind)
    assert (settings.seed, settings.guidance_scale) == (7, 3.0)
    changed = {field.name for field in fields(EditSettings)
               if getattr(settings, field.name) != getattr(shared, field.name)}  # fmt: skip
    whole = {"mask_dilate", "mask_mode", "expand", "mask_from", "cache"}
    dropped: dict[EditKind, set[str]] = {
        "inpaint": {"size", "region"},
        "edit": whole,
        "generate": whole | {"strength", "template_id", "region"},
    }
    assert changed == dropped[kind]


def test_edits_without_a_mask_find_regions_where_that_was_measured() -> None:
    measured = replace(KONTEXT, region=RegionRule(2, 0.2))
    assert accept("edit", measured, region="auto").settings.region == "auto"
    pair = Config(engine=EngineConfig(devices=2))
    for spec, config in ((KONTEXT, Config()), (measured, pair)):
        with pytest.raises(InvalidRequest, match=r"SETTINGS\.region: .* find no regions"):
            accept_edit(EditSettings(region="auto"), b"x", spec, config, kind="edit")
    other_kinds: tuple[EditKind, ...] = ("inpaint", "generate")
    for kind in other_kinds:
        with pytest.raises(
            InvalidRequest, match=r"SETTINGS\.region: has an effect only with IMAGE"
        ):
            accept(kind, measured, region="auto")


def test_a_model_with_alpha_may_draw_transparency() -> None:
    spec = replace(KONTEXT, latents=replace(KONTEXT.latents, alpha=True))
    accept("generate", spec, background="transparent")


def test_strength_is_for_sources_that_are_noised() -> None:
    accept("edit", BASE, strength=0.5)
    accept("edit", KONTEXT)
    accept("generate", BASE)
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.strength: is 1, .*; accepted: below 1"):
        accept("edit", BASE)
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.strength: .* sees IMAGE at every step"):
        accept("edit", KONTEXT, strength=0.5)
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.strength: has no effect without IMAGE"):
        accept("generate", BASE, strength=0.5)


def test_a_size_stands_without_a_mask_alone() -> None:
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.size: has no effect with MASK"):
        accept("inpaint", size="64x64")
    assert accept("generate", size="64x48").settings.answer_size == (48, 64)
    assert EditSettings().answer_size is None


def test_a_size_off_the_grid_or_too_large_is_refused_with_one_that_fits() -> None:
    spec = replace(BASE, native_resolution=1024, size_multiple=16)
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.size: is 1001x700, .* 1008x704"):
        accept("generate", spec, size="1001x700")
    with pytest.raises(InvalidRequest, match=r"up to 1048576 pixels, the model's native area"):
        accept("generate", spec, size="1040x1024")
    for size in ("1024x1024", "2048x512", "16x16"):
        accept("generate", spec, size=size)
    config = Config(limits=LimitsConfig(max_side=512))
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.size: .* sides of up to 512 pixels"):
        accept_edit(EditSettings(size="1024x16"), b"x", spec, config, kind="generate")


@pytest.mark.parametrize(
    "size",
    ["", "1024", "1024x", "x1024", "0x64", "64x0", "-64x64", "64X64", "64x64 ", "1e3x64", 64],
)
def test_a_size_of_another_form_is_refused(size: object) -> None:
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.size: "):
        parse_settings(json.dumps({"size": size}).encode())


def test_an_empty_prompt_is_accepted_in_every_kind() -> None:
    """No served pipeline needs one."""
    for kind in ("inpaint", "edit", "generate"):
        edit = accept_edit(EditSettings(), b"", KONTEXT, Config(), kind=kind)  # type: ignore[arg-type]
        assert AcceptedEdit.from_json(edit.to_json()) == edit


_ADAPTS = EditSettings(ip_adapter=IpAdapterSetting(name="style"))


@pytest.mark.parametrize(
    ("pictures", "settings"),
    [
        ([b"source", b"style"], _ADAPTS),
        ([b"", b"style"], _ADAPTS),  # a picture without a source
        ([b"", b"style"], structs.replace(_ADAPTS, template_id="0" * 32)),
        ([b"source"], structs.replace(_ADAPTS, reference_ids=("0" * 32,))),
    ],
)
def test_an_ip_adapter_has_one_picture_more_than_the_model_sees(
    pictures: list[bytes], settings: EditSettings
) -> None:
    check_references(pictures, settings, 1)


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ([b"source"], "SETTINGS.ip_adapter: is given, and no picture for it"),
        ([b""], "SETTINGS.ip_adapter: is given, and no picture for it"),
        ([b"source", b""], r"IMAGE\[1\]: is empty"),
        ([b"source", b"a", b"b"], "IMAGE: has 3 pictures"),
        ([b"", b"a", b"b"], r"IMAGE\[0\]: is empty"),
    ],
)
def test_an_ip_adapter_without_its_picture_is_refused(pictures: list[bytes], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_references(pictures, _ADAPTS, 1)
