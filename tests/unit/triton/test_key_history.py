"""META tells a key of its own history alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from msgspec import structs

from maskserve_common.contracts.meta import meta_for_client
from maskserve_common.contracts.request import Reference
from maskserve_triton.key_history import KeyHistory
from tests.fakes.scripted_engine import EDIT

HIT = {
    "event": "final", "steps": 4, "total_tokens": 64, "computed_tokens": 80, "cache": "hit",
    "cache_tier": "device", "cache_bytes": {"device": 10}, "kinds": {"kv": 30, "dense": 10},
    "decoded": 0.25, "dense_steps": 1, "steps_skipped": 0,
    "encoded": {"prompt": "kept", "template": "kept", "masked": "pieces", "batch": 1},
}  # fmt: skip


def meta_of(new: list[str], *, insists: bool = False) -> dict[str, Any]:
    values = {**HIT, "new": new} if new else HIT
    meta: dict[str, Any] = json.loads(
        meta_for_client(json.dumps(values).encode(), values, insists=insists)
    )
    return meta


def test_what_another_key_has_done_is_not_told():
    """`cache: hit` and `encoded: kept` on a key's first edit told it of another's."""
    history = KeyHistory()
    news = []
    for key in ("other", "other", "other", "mine", "mine", "mine", ""):
        name = f"{key}!x" if key else "x"
        news.append(history.new_of(replace(EDIT, request_id=name)))
    first = ["prompt", "template", "cache"]
    assert news == [first, ["cache"], [], first, ["cache"], [], []]
    assert meta_of(first) == {
        **{key: value for key, value in HIT.items() if key != "dense_steps"},
        "cache": "miss",
        "cache_tier": "",
        "cache_bytes": {},
        "kinds": {"dense": 40},
        "computed_tokens": 256,
        "decoded": 1.0,
        "encoded": {"prompt": "made", "template": "made", "masked": "whole", "batch": 1},
    }
    assert meta_of([]) == HIT
    assert meta_of(["cache"], insists=True)["cache"] == "hit"


def test_a_reference_of_another_key_is_not_told():
    history = KeyHistory()
    one, two = (Reference((8, 8), digit * 32) for digit in "12")
    news = [
        history.new_of(replace(EDIT, request_id=f"{key}!x", references=references))
        for key, references in (
            ("other", (one, two)), ("mine", (one,)), ("mine", (one,)), ("mine", (two, one)),
            ("mine", (one, two)), ("mine", ()),
        )
    ]  # fmt: skip
    assert ["references" in new for new in news] == [True, True, False, True, False, False]


def test_a_template_that_is_named_is_ones_own():
    history = KeyHistory()
    named = structs.replace(EDIT.settings, template_id="0" * 32)
    assert history.new_of(replace(EDIT, request_id="mine!x", settings=named)) == ["prompt"]
