"""The encoder of a worker gives an edit the same bits whatever it has kept from others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from maskserve_core.config import Config
from maskserve_core.contracts.request import EditRequest
from maskserve_core.contracts.settings import EditSettings
from maskserve_engine.cache.priming_prompt import PromptFile
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.stages.encoded import Encoded
from maskserve_engine.triton.encoder import EditEncoder
from maskserve_harness.benchmarks.direct import request_of
from tests.fakes.jobs import WORDS, Case, config_of, random_case
from tests.support.text_loras import of_text, served

Make = Callable[..., EditEncoder]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes the encoder of a worker that serves a model."""
    made = []

    def make(encoder: Encoder, config: Config, **stages: int) -> EditEncoder:
        kept = structs.replace(config.stages, **stages)
        asked = structs.replace(config, stages=kept, runtime_dir=str(tmp_path))
        made.append(EditEncoder(encoder, asked))
        return made[-1]

    yield make
    for each in made:
        each.close()


def edit_of(case: Case, prompt: str | None = None) -> EditRequest:
    text = case.prompt if prompt is None else prompt
    return request_of(case.pixels, text, case.settings, case.seed, "edit")


def same(found: Encoded, expected: Encoded) -> None:
    np.testing.assert_array_equal(found.moments, expected.moments)
    np.testing.assert_array_equal(found.masked_moments, expected.masked_moments)
    same_arrays(found.conditioning, expected.conditioning)
    assert (found.negative is None) == (expected.negative is None)
    same_arrays(found.negative or {}, expected.negative or {})


def same_arrays(found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("budget", [0, 40_000, 2**30], ids=["none", "few", "all"])
@pytest.mark.parametrize("model", ["fill", "inpaint", "sdxl-base"])
def test_what_is_kept_is_what_would_be_made(
    model: str,
    budget: int,
    make: Make,
    tiny_fill: Path,
    tiny_inpaint: Path,
    tiny_unets: dict[str, Path],
) -> None:
    folder = {"fill": tiny_fill, "inpaint": tiny_inpaint, **tiny_unets}[model]
    config, rng = config_of(folder), np.random.default_rng()
    encoder = load_encoder(config)
    kept = make(encoder, config, prompt_bytes=budget, template_bytes=budget)
    pictures = [random_case(rng).pixels for _ in range(3)]
    seen_prompts, seen_pictures = set(), set()
    for _ in range(24):
        pixels = pictures[rng.integers(3)]
        mask = (rng.random(pixels.shape[:2]) < 0.5).astype(np.uint8) * 255
        negative = str(rng.choice(WORDS)) if model != "fill" and rng.random() < 0.5 else None
        settings = EditSettings(negative_prompt=negative)
        case = Case(pixels, mask, str(rng.choice(WORDS)), settings, 1)
        edit = edit_of(case)
        found, report = kept.encode(edit, pixels, mask)
        same(found, encoder.encode(pixels, mask, case.prompt, negative))
        texts = {(case.prompt, False), *([(negative, True)] if negative is not None else [])}
        if budget == 2**30:
            assert report.prompt == ("kept" if texts <= seen_prompts else "made")
            assert report.template == ("kept" if edit.pixels_id in seen_pictures else "made")
        if budget == 0:
            assert (report.prompt, report.template) == ("made", "made")
        seen_prompts |= texts
        seen_pictures.add(edit.pixels_id)
        assert kept._prompts.held_bytes <= budget
        assert kept._moments.held_bytes <= budget


def test_what_an_edit_still_reads_outlives_its_eviction(make: Make, tiny_fill: Path) -> None:
    config, rng = config_of(tiny_fill), np.random.default_rng()
    encoder = load_encoder(config)
    one, other = random_case(rng), random_case(rng)
    size = encoder.moments(one.pixels).nbytes
    kept = make(encoder, config, template_bytes=size)
    reading, _ = kept.encode(edit_of(one), one.pixels, one.mask)
    kept.encode(edit_of(other), other.pixels, other.mask)
    kept.encode(edit_of(other), other.pixels, other.mask)
    same(reading, encoder.encode(one.pixels, one.mask, one.prompt))
    _, again = kept.encode(edit_of(one), one.pixels, one.mask)
    assert again.template == ("made" if encoder.moments(other.pixels).nbytes <= size else "kept")


def test_equal_prompts_of_different_lengths_never_share(make: Make, tiny_fill: Path) -> None:
    short = config_of(tiny_fill, model={"max_sequence_length": 16})
    long = config_of(tiny_fill, model={"max_sequence_length": 32})
    one, other = (make(load_encoder(config), config) for config in (short, long))
    assert one._key("a red star") != other._key("a red star")
    other._prompts = one._prompts  # as if one process kept those of both
    case = random_case(np.random.default_rng())
    for kept, length in ((one, 16), (other, 32), (one, 16)):
        found, _ = kept.encode(edit_of(case, "a red star"), case.pixels, case.mask)
        assert found.conditioning["prompt_embeds"].shape[0] == length


def test_prompts_with_loras_are_kept_apart(tmp_path: Path, make: Make, tiny_fill: Path) -> None:
    files = {name: of_text("text_encoder", rank=rank) for name, rank in (("one", 2), ("two", 4))}
    config, [one, two] = served(tmp_path, tiny_fill, files)
    encoder = load_encoder(config)
    kept, fresh = make(encoder, config), make(encoder, config, prompt_bytes=0)
    case = random_case(np.random.default_rng())
    plain = replace(case, settings=EditSettings())
    mixes = [(), (one,), (two,), (one, two), (structs.replace(one, scale=0.5),)]
    pooled = []
    for loras in mixes:
        edit = replace(edit_of(plain, "a red star"), loras=loras)
        found, first = kept.encode(edit, case.pixels, case.mask)
        again, second = kept.encode(edit, case.pixels, case.mask)
        expected, _ = fresh.encode(edit, case.pixels, case.mask)
        same(found, expected)
        same(again, expected)
        assert (first.prompt, second.prompt) == ("made", "kept")
        pooled.append(expected.conditioning["pooled"].tobytes())
    assert len(set(pooled)) == len(mixes)
    for nothing in (structs.replace(one, scale=0.0), structs.replace(one, text=False)):
        edit = replace(edit_of(plain, "a red star"), loras=(nothing,))
        found, report = kept.encode(edit, case.pixels, case.mask)
        assert report.prompt == "kept"
        assert found.conditioning["pooled"].tobytes() == pooled[0]


def test_the_empty_prompt_is_one_of_them(tmp_path: Path, tiny_fill: Path) -> None:
    encoder = EditEncoder.load(structs.replace(config_of(tiny_fill), runtime_dir=str(tmp_path)))
    case = random_case(np.random.default_rng())
    found, report = encoder.encode(edit_of(case, ""), case.pixels, case.mask)
    assert report.prompt == "kept"
    written = PromptFile(tmp_path).read()
    assert written is not None
    same_arrays(written, found.conditioning)
    encoder.close()


def test_a_template_without_an_edit_is_encoded_once(make: Make, tiny_fill: Path) -> None:
    """So is one that is primed: its masked picture is the picture itself."""
    config = config_of(tiny_fill)
    encoder = load_encoder(config)
    case = random_case(np.random.default_rng())
    nothing = np.zeros_like(case.mask)
    found, _ = make(encoder, config).encode(edit_of(case, ""), case.pixels, nothing)
    same(found, encoder.encode(case.pixels, nothing, ""))
