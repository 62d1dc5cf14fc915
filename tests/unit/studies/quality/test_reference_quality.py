"""Ways to cache models that see the source as reference, on a tiny one: what each may see, and what
it would cost at klein's size. (`eval_quality --model assets/models/demo-edit` measures them.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from maskserve_benchmarks.demo_model.scenes import PHOTOS
from maskserve_engine.spec.model_spec import ALL_STEPS
from maskserve_studies.demo_model.edit_classes import CLASSES, edits_of
from maskserve_studies.demo_model.reference_edits import (
    NAMED_CLASSES,
    named_class,
    package_photographs,
)
from maskserve_studies.quality.choices import CacheChoice, default, default_choices, published
from maskserve_studies.quality.command import Run, flux_costs
from maskserve_studies.quality.refresh_steps import table as own_table
from maskserve_studies.quality.systems import Rig
from tests.fakes.tiny_flux2 import build_tiny_flux2
from tests.fakes.tiny_qwen_image import EDIT, build_tiny_qwen_image
from tests.fakes.tiny_qwen_image21 import build_tiny_qwen_image21
from tests.fakes.tiny_z_image import build_tiny_z_image


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(build_tiny_flux2(tmp_path_factory.mktemp("models") / "klein"), steps=4)


@pytest.mark.parametrize("name", NAMED_CLASSES)
def test_scenes_on_photographs_are_none_that_training_draws(name: str) -> None:
    photographs = package_photographs()
    assert not {file.stem for file in photographs} & {file.stem for file in PHOTOS.iterdir()}
    size = (64, 96)
    for photo in photographs:
        [edit] = named_class(name, 1, size, [photo])
        [second_edit] = named_class(name, 1, size, [photo])
        [bare] = named_class(name, 1, size, [photo], bare=True)
        assert bare.prompt == edit.prompt
        assert not np.array_equal(bare.source[edit.mask], edit.source[edit.mask])
        [drawn] = named_class(name, 1, size)
        assert edit.source.shape == (*size, 3)
        assert np.array_equal(edit.source, second_edit.source)
        assert not np.array_equal(edit.source, drawn.source)
        assert np.array_equal(edit.source[~edit.mask], edit.target[~edit.mask])


def test_all_first_looks_are_made_and_a_worker_serves_one_of_them(rig: Rig) -> None:
    classes = {name: named_class(name, 1, (64, 96)) for name in NAMED_CLASSES[:2]}
    run, looks = (
        Run(rig, classes),
        default_choices(default(rig.adapter.spec, 4), rig.adapter.spec, 4),
    )
    run.make(looks)
    assert {look.name for look in looks} < run.pictures.keys()
    exact = replace(looks[0], format="model", ring=64, dense_steps=4)
    for name, edits in classes.items():
        dense = run.pictures["dense"][name]
        jobs = rig.jobs(edits)
        [exact_picture] = rig.cached(edits, jobs, rig.entries(jobs), exact)
        assert np.abs(exact_picture.astype(int) - dense[0]).max() <= 1
        for look_name in ("masked_tokens_alone", replace(looks[0], references_alone=True).name):
            assert not np.array_equal(run.pictures[look_name][name][0], dense[0]), look_name


def test_where_all_is_masked_and_references_are_computed_nothing_is_read(rig: Rig) -> None:
    """Any entries will do; without that they are what the reference is known by."""
    [edit] = named_class(NAMED_CLASSES[0], 1, (64, 96))
    edits = [replace(edit, mask=np.ones_like(edit.mask))]
    jobs = rig.jobs(edits)
    other_entries = rig.entries(
        rig.jobs([replace(edits[0], prompt="turn it", source=255 - edit.source)])
    )
    [dense] = rig.dense(edits, jobs)
    differing_shares = []
    for computed in (True, False):
        choice = CacheChoice("kv", "int4", ALL_STEPS, references_computed=computed)
        [picture] = rig.cached(edits, jobs, other_entries, choice)
        differing_shares.append(float(np.mean(picture != dense)))
    assert differing_shares[0] < 0.001 < 0.005 < differing_shares[1]


@pytest.mark.parametrize(
    "build",
    [partial(build_tiny_qwen_image, edits=EDIT), build_tiny_qwen_image21],
    ids=["Qwen-Image-Edit", "Qwen-Image-2.1"],
)
def test_models_of_any_family_are_judged(build: Callable[[Path], Path], tmp_path: Path) -> None:
    """By all systems; what they repaint is what is masked."""
    rig = Rig(build(tmp_path / "model"), steps=2)
    [name] = NAMED_CLASSES[:1]
    edits = named_class(name, 1, (64, 96))
    run = Run(rig, {name: edits})
    run.make(default_choices(run.default, rig.adapter.spec, 2)[:1])
    assert {"dense", "masked_tokens_alone", "crop_and_stitch", "served"} < run.pictures.keys()
    outside = ~edits[0].mask
    for pictures_by_name in run.pictures.values():
        assert np.array_equal(pictures_by_name[name][0][outside], edits[0].source[outside])


def test_own_anchors_of_a_model_whose_text_is_computed_between_them(tmp_path: Path) -> None:
    rig = Rig(build_tiny_z_image(tmp_path / "model"), steps=4)
    [name, *_] = CLASSES
    edits = edits_of(name, 1)
    rows = list(own_table(rig, {name: edits}, {name: rig.jobs(edits)}))
    assert all("text computed" in row["choice"] for row in rows)
    assert len({row["choice"] for row in rows}) == len(rows)


def test_a_model_with_a_schedule_of_its_own_is_judged_by_it(tmp_path: Path) -> None:
    folder = build_tiny_qwen_image21(tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    (folder / "model_index.json").write_text(json.dumps({**index, "sample_sigmas": [1.0, 0.5]}))
    with pytest.raises(SystemExit, match="--steps: this model has 2 of its own"):
        Rig(folder, steps=20)


def test_templates_may_be_primed_without_a_word(rig: Rig) -> None:
    """Then any prompt makes the same."""
    edits = named_class(NAMED_CLASSES[0], 1, (64, 96))
    edits += [replace(edits[0], prompt="remove it")]
    for wordless in (True, False):
        wordless_rig = Rig(rig.folder, steps=4, wordless=wordless)
        first, second_keys = (
            entries[0].blocks[-1].keys for entries in wordless_rig.entries(wordless_rig.jobs(edits))
        )
        assert first is not None
        assert second_keys is not None
        assert torch.equal(first.data, second_keys.data) == wordless


def test_anchors_come_from_the_schedule_that_a_model_is_made_for(rig: Rig) -> None:
    assert Rig(rig.folder, steps=20).schedule == 4
    chosen = default(rig.adapter.spec, 20)
    assert chosen.stride == 1


def test_bytes_and_flops_are_counted_at_kleins_size(rig: Rig) -> None:
    work, choice = published(rig.adapter.spec), CacheChoice("kv", "int4", ALL_STEPS)
    assert choice.flux_bytes(4, work) / 2**30 == pytest.approx(0.66, abs=0.005)
    assert replace(choice, stride=1).flux_bytes(4, work) == 4 * choice.flux_bytes(4, work)
    alone_choice = replace(choice, references_alone=True)
    assert 2 * alone_choice.flux_bytes(4, work) == choice.flux_bytes(4, work)
    assert flux_costs(choice, work)["flux_flop_speedup"] == pytest.approx(9.0, rel=0.05)
    assert alone_choice.flux_flops(work=work) < choice.flux_flops(work=work)
    renewed = replace(choice, references_computed=True)
    assert flux_costs(renewed, work)["flux_flop_speedup"] == pytest.approx(6.2, rel=0.05)
