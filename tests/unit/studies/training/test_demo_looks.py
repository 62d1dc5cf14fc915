"""The demo LoRAs, and the judge of what they change."""

from __future__ import annotations

import pytest

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import Edit, Picture, fill, held_out_edits, place
from maskserve_studies.demo_model.looks import LOOKS, edits_with, shows_look
from maskserve_studies.quality.adapters import AdapterRig, adapter_edits, judge_adapter
from maskserve_studies.quality.systems import Rig
from maskserve_studies.training.bases import FluxBase
from maskserve_studies.training.lora import ADAPTERS, share_followed
from tests.support.examples import number


@pytest.mark.parametrize("look", LOOKS)
def test_the_judge_tells_right_answers_from_others(look: str) -> None:
    edits = edits_with(look, number(48))
    assert all(shows_look(look, edit.target, edit) for edit in edits)
    assert not any(shows_look(look, edit.source, edit) for edit in edits)


def test_a_solid_object_is_not_hollow() -> None:
    assert not any(shows_look("hollow", edit.target, edit) for edit in held_out_edits(number(48)))


@pytest.mark.slow  # test_readme.py sees that the shipped LoRA shows
@pytest.mark.parametrize("look", ["ninth-colour", "hollow"])
def test_a_lora_changes_what_diffusers_paints_as_it_was_taught(look: str) -> None:
    adapter = ADAPTERS / f"{look}.safetensors"
    assert adapter.stat().st_size < 2 * 2**20
    assert share_followed(FluxBase(), look, 8, adapter) >= 0.75
    assert share_followed(FluxBase(), look, 4, None) == 0.0


def test_a_gap_of_two_pixels_leaves_a_hollow_object_s_line_whole() -> None:
    edits = edits_with("hollow", number(48))
    assert all(shows_look("hollow", _cut(edit, 2), edit) for edit in edits)
    assert not all(shows_look("hollow", _cut(edit, 8), edit) for edit in edits)


def _cut(edit: Edit, gap: int) -> Picture:
    """The right answer with its line broken, `gap` pixels wide, above the middle."""
    (x, y), radius = place(edit.mask)
    begin = round(x - gap / 2)
    gap_slices = (slice(0, round(y - 0.1 * radius)), slice(begin, begin + gap))
    picture = edit.target.copy()
    picture[gap_slices] = fill(edit.source, edit.mask)[gap_slices]
    return picture


@pytest.mark.parametrize("name", ["hollow", pytest.param("outline", marks=pytest.mark.slow)])
def test_a_run_that_ignores_its_adapter_fails(name: str) -> None:
    without = Rig(DEMO_MODEL, 4)

    class Ignoring(AdapterRig):
        def __init__(self) -> None:
            vars(self).update(vars(without))
            self.lora = self.net = None

        def attach(self, row: object, job: object) -> None:
            pass

    judgement = judge_adapter(Ignoring(), without, adapter_edits(name, 6))
    assert not judgement["held"]["followed"]
    assert judgement["followed"]["dense"] == judgement["followed"]["without"]


def test_an_adapter_that_nobody_can_judge_is_refused() -> None:
    with pytest.raises(ValueError, match="no judge for 'x'; accepted"):
        adapter_edits("x", 1)
