"""Records of what a worker answers: what counts as a difference."""

from __future__ import annotations

import base64
import copy
from typing import Any

import numpy as np
import pytest
import tomllib

from maskserve_benchmarks.recording.comparison import differences
from maskserve_benchmarks.recording.edits import SITES, TEMPLATES, cases
from maskserve_benchmarks.recording.record import answer_digest
from maskserve_common.config import Config
from maskserve_common.config_file import config_of
from tests.fakes.pictures import encode, scene

META: dict[str, Any] = {"event": "final", "cache": "hit", "kinds": {"kv": 24}, "worker": "worker-0"}


def answer(pixels: Any, **meta: Any) -> dict[str, Any]:
    return answer_digest((encode(pixels), {**META, **meta}))


def test_there_are_sixty_edits_always_the_same() -> None:
    names = ["a" * 32, "b" * 32]
    first, second = cases(names), cases(names)
    assert first == second
    assert len({case.name for case in first}) == len(first) == 60
    assert {case.protocol for case in first} == {"grpc", "http", "stream"}
    assert len(TEMPLATES) == len(names)


@pytest.mark.parametrize(("site", "count"), [("demo", 66), ("unet", 14), ("ranks", 8)])
def test_each_worker_is_asked_the_same_again(site: str, count: int) -> None:
    recorded_site = SITES[site]
    cases = recorded_site.cases(["a" * 32, "b" * 32])
    assert cases == recorded_site.cases(["a" * 32, "b" * 32])
    assert len({case.name for case in cases}) == len(cases) == count
    assert config_of(tomllib.loads(recorded_site.config)).engine.policy == (
        "deadline" if site == "ranks" else Config().engine.policy
    )
    for case in cases:
        if "CONTROL" in case.inputs:
            assert b"controls" in case.inputs["SETTINGS"]


def test_a_record_is_equal_to_itself() -> None:
    record = {"edit": answer(scene(8, 8)), "refused": {"error": "[INVALID_REQUEST] IMAGE"}}
    assert differences(record, copy.deepcopy(record)) == []


def test_one_byte_of_one_pixel_is_a_difference() -> None:
    pixels = scene(8, 8)
    changed = pixels.copy()
    changed[3, 4, 1] ^= 1
    report_lines = differences({"edit": answer(pixels)}, {"edit": answer(changed)})
    assert [line.split(": ")[:2] for line in report_lines] == [
        ["edit", "image"],
        ["edit", "pixels"],
    ]
    assert report_lines[1] == "edit: pixels: 1 of 192 samples differ, by up to 1 of 255"


def test_other_bytes_of_the_same_pixels_are_a_difference_of_the_image_alone() -> None:
    pixels = scene(8, 8)
    tight = answer_digest((encode(pixels, compress_level=9), META))
    loose = answer_digest((encode(pixels, compress_level=0), META))
    (line,) = differences({"edit": tight}, {"edit": loose})
    assert line.startswith("edit: image: ")


@pytest.mark.parametrize("changed", [{"cache": "miss"}, {"kinds": {"kv": 23}}, {"new": 1}])
def test_what_meta_says_counts(changed: dict[str, Any]) -> None:
    pixels = scene(4, 4)
    before, after = {"edit": answer(pixels)}, {"edit": answer(pixels, **changed)}
    assert len(differences(before, after)) == 1


def test_times_and_the_workers_name_do_not_count() -> None:
    pixels = scene(4, 4)
    second_answer = answer(pixels, timings_ms={"queue": 3.5}, worker="worker-1")
    assert differences({"edit": answer(pixels)}, {"edit": second_answer}) == []


def test_an_edit_that_only_one_record_has_is_a_difference() -> None:
    record = {"edit": answer(scene(4, 4))}
    assert len(differences(record, {})) == len(differences({}, record)) == 1


def test_an_error_is_a_difference_from_a_picture_and_from_another_error() -> None:
    record = {"edit": {"error": "[INVALID_REQUEST] MASK"}}
    assert differences(record, {"edit": {"error": "[INVALID_REQUEST] IMAGE"}})
    assert differences(record, {"edit": answer(scene(4, 4))})


def test_base64_is_read_as_the_picture_it_holds() -> None:
    pixels = scene(5, 6)
    text = answer_digest((base64.b64encode(encode(pixels)), META))
    assert text["pixels"] == answer(pixels)["pixels"]
    assert text["image"] != answer(pixels)["image"]


def test_events_that_a_slow_client_missed_are_no_difference_but_others_are() -> None:
    shades = [np.full((2, 2, 3), value, np.uint8) for value in (10, 20, 30)]
    events = {f"preview {i}": answer(shade) for i, shade in enumerate(shades)}
    record = {"edit": {"events": events}}
    fewer = {name: events[name] for name in ("preview 0", "preview 2")}
    assert differences(record, {"edit": {"events": fewer}}) == []
    wrong = {**fewer, "preview 2": answer(shades[1])}
    assert len(differences(record, {"edit": {"events": wrong}})) == 2  # its image and its pixels
    none: dict[str, Any] = {"progress 1": {}}
    assert len(differences(record, {"edit": {"events": none}})) == 2  # no shared kind
