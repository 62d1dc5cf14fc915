"""Ways to cache models that see the source as reference, on a tiny one: what each may see, and what
it would cost at klein's size. (`eval_quality --model assets/models/demo-edit` measures them.)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from maskserve_core.models.facts import ALL_STEPS
from maskserve_harness.demo_model.reference_edits import NAMED_CLASSES, named_class
from maskserve_harness.quality.choices import CacheChoice, default, first_looks, published
from maskserve_harness.quality.command import Run, flux_facts
from maskserve_harness.quality.systems import Rig
from tests.fakes.tiny_flux2 import build_tiny_flux2


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(build_tiny_flux2(tmp_path_factory.mktemp("models") / "klein"), steps=4)


def test_all_first_looks_are_made_and_a_worker_serves_one_of_them(rig: Rig) -> None:
    classes = {name: named_class(name, 1, (64, 96)) for name in NAMED_CLASSES[:2]}
    run, looks = Run(rig, classes), first_looks(default(rig.adapter.facts, 4), rig.adapter.facts, 4)
    run.make(looks)
    assert {look.name for look in looks} < run.pictures.keys()
    exact = replace(looks[0], format="model", ring=64, dense_steps=4)
    for name, edits in classes.items():
        dense = run.pictures["dense"][name]
        jobs = rig.jobs(edits)
        [same] = rig.cached(edits, jobs, rig.entries(jobs), exact)
        assert np.abs(same.astype(int) - dense[0]).max() <= 1
        for other in ("masked_tokens_alone", replace(looks[0], references_alone=True).name):
            assert not np.array_equal(run.pictures[other][name][0], dense[0]), other


def test_anchors_come_from_the_schedule_that_a_model_is_made_for(rig: Rig) -> None:
    assert Rig(rig.folder, steps=20).schedule == 4
    chosen = default(rig.adapter.facts, 20)
    assert chosen.stride == 1


def test_bytes_and_flops_are_counted_at_kleins_size(rig: Rig) -> None:
    work, one = published(rig.adapter.facts), CacheChoice("kv", "int4", ALL_STEPS)
    assert one.flux_bytes(4, work) / 2**30 == pytest.approx(0.66, abs=0.005)
    assert replace(one, stride=1).flux_bytes(4, work) == 4 * one.flux_bytes(4, work)
    alone = replace(one, references_alone=True)
    assert 2 * alone.flux_bytes(4, work) == one.flux_bytes(4, work)
    assert flux_facts(one, work)["flux_flop_speedup"] == pytest.approx(9.0, rel=0.05)
    assert alone.flux_flops(work=work) < one.flux_flops(work=work)
