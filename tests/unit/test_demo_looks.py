"""The demo LoRAs, and the judge of what they change."""

from __future__ import annotations

import pytest

from maskserve_harness.demo_model.looks import LOOKS, edits_with, followed
from maskserve_harness.demo_model.scenes import held_out_edits
from maskserve_harness.training.lora import ADAPTERS, share_followed
from maskserve_harness.training.lora_bases import FluxBase


@pytest.mark.parametrize("look", LOOKS)
def test_the_judge_tells_right_answers_from_others(look: str) -> None:
    edits = edits_with(look, 48)
    assert all(followed(look, edit.target, edit) for edit in edits)
    assert not any(followed(look, edit.source, edit) for edit in edits)


def test_a_solid_object_is_not_hollow() -> None:
    assert not any(followed("hollow", edit.target, edit) for edit in held_out_edits(48))


@pytest.mark.parametrize("look", LOOKS)
def test_a_lora_changes_what_diffusers_paints_as_it_was_taught(look: str) -> None:
    adapter = ADAPTERS / f"{look}.safetensors"
    assert adapter.stat().st_size < 2 * 2**20
    assert share_followed(FluxBase(), look, 8, adapter) >= 0.75
    assert share_followed(FluxBase(), look, 8, None) == 0.0
