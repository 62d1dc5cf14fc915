"""Cached rows through a real Triton: registered, primed, hit, disclosed."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_engine.families.specs import load_spec
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.calls import Grpc, edit_inputs, pixels, plain_edit
from tests.support.eventually import eventually


def register(grpc: Grpc, image: bytes) -> str:
    answer = grpc.control(op="register", image=base64.b64encode(image).decode())
    name = str(answer["template_id"])
    eventually(
        "it is primed",
        lambda: grpc.control(op="prime", template_id=name)["state"] == "primed",
        60.0,
    )
    return name


def test_a_registered_template_is_edited_by_name_from_its_cache(model: Path, grpc: Grpc) -> None:
    source, mask = scene(64, 64), np.zeros((64, 64), np.uint8)
    mask[8:30, 20:44] = 255
    name = register(grpc, encode(source))
    image, meta = grpc.edit(edit_inputs(b"", mask, template_id=name, cache="auto"))
    assert meta["cache"] == "hit"
    # Nothing but K and V is kept: a plan may compute blocks before it loads the rest, and none
    # that a step ran is left out or lost.
    sizes = load_spec(model).denoiser
    blocks = sizes["num_layers"] + sizes["num_single_layers"]
    assert sum(meta["kinds"].values()) == blocks * meta["steps"]
    assert set(meta["kinds"]) <= {"kv", "dense"}
    assert meta["kinds"]["kv"] > 0
    assert meta["active_tokens"] < meta["total_tokens"]
    assert meta["template_id"] == name
    # Its picture was encoded as it was registered, and what is not pasted is not decoded.
    assert meta["encoded"]["template"] == "kept"
    assert meta["decoded"] < 1.0
    assert np.array_equal(pixels(image)[mask == 0], source[mask == 0])
    listed = {t["template_id"]: t for t in grpc.control(op="templates")["templates"]}
    assert listed[name]["registered"]
    assert listed[name]["entries"][0]["bytes"] > 0
    assert grpc.control(op="pin", template_id=name)["pinned"]
    assert not grpc.control(op="unpin", template_id=name)["pinned"]
    assert grpc.control(op="evict", template_id=name)["freed_bytes"] > 0


def test_reproducible_edits_are_equal_at_any_load(grpc: Grpc) -> None:
    inputs = plain_edit(72, 56, reproducible=True, cache="auto", num_inference_steps=6)
    single_image, meta = grpc.edit(inputs)
    assert meta["cache"] == "hit"
    assert set(meta["kinds"]) == {"kv"}  # one fixed plan: every block takes its entry
    other_edits = [
        grpc.begin(plain_edit(40 + 8 * i, 64, reproducible=i % 2 == 0, num_inference_steps=9))
        for i in range(5)
    ]
    repeated_edit = grpc.begin(inputs)
    busy, busy_meta = repeated_edit.wait()
    for other_edit in other_edits:
        other_edit.wait()
    assert busy_meta["cache"] == "hit"
    assert np.array_equal(pixels(busy), pixels(single_image))


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (9, 200)], ids=str)
def test_images_smaller_than_a_token_are_edited(grpc: Grpc, size: tuple[int, int]) -> None:
    """Cached, or dense where the mask leaves too little outside."""
    source, mask = scene(*size), blob_mask(*size)
    image, meta = grpc.edit(edit_inputs(source, mask, cache="require"))
    assert (meta["cache"], meta.get("dense_for")) in (("hit", None), ("off", "mask_ratio"))
    assert np.array_equal(pixels(image)[mask == 0], source[mask == 0])


def test_a_mask_over_everything_runs_dense_however_much_it_insists(grpc: Grpc) -> None:
    source, mask = scene(48, 64), np.full((48, 64), 255, np.uint8)
    dense, _ = grpc.edit(edit_inputs(source, mask))
    required, meta = grpc.edit(edit_inputs(source, mask, cache="require"))
    assert (meta["cache"], meta["dense_for"]) == ("off", "mask_ratio")
    assert required == dense


def test_the_second_lookup_primes_and_a_later_one_hits(grpc: Grpc) -> None:
    inputs = edit_inputs(scene(56, 40), blob_mask(56, 40), cache="auto")
    cache_results = []
    end = time.monotonic() + 60
    while "hit" not in cache_results:
        assert time.monotonic() < end, cache_results
        cache_results.append(grpc.edit(inputs)[1]["cache"])
        time.sleep(0.05)
    assert cache_results[:2] == ["miss", "miss"]


def test_an_edit_keeps_the_fidelity_that_it_asks_for(grpc: Grpc) -> None:
    """With random weights lookaheads are always off: few dB need few refresh steps, and many dB
    nearly all steps.
    """

    def promised(**settings: float | str) -> dict[str, Any]:
        return grpc.edit(plain_edit(64, 64, num_inference_steps=20, **settings))[1]

    dense = promised(cache="off")
    low, high, whole = (promised(cache="auto", reuse_floor=floor) for floor in (1.0, 60.0, 100.0))
    for floor, meta in ((1.0, low), (60.0, high)):
        assert (meta["cache"], meta["reuse_floor"]) == ("own", floor)
        errors = meta["refresh_errors"].values()
        assert meta["refresh_error"] == pytest.approx(np.mean(list(errors)), abs=1e-5)
        assert all(error > 0 for error in errors)
    assert low["computed_tokens"] < high["computed_tokens"] < dense["computed_tokens"]
    assert (whole["cache"], whole["computed_tokens"]) == ("miss", dense["computed_tokens"])
