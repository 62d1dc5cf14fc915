"""Edits whose latents are not all numbers: they end with an error, and others go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.errors import EngineFailed
from maskserve_engine.base.job import EditJob, PreviewEvent
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.loop.engine import Engine
from tests.fakes.jobs import config_of, tolerance
from tests.support.engines import accept, edit, job, make_engine
from tests.support.sink import Sink

STEPS = 6


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


@pytest.fixture(scope="module")
def engine(tiny_fill: Path, encoder: Encoder) -> Iterator[Engine]:
    engine = make_engine(tiny_fill, encoder, own_anchors=0.35)
    yield engine
    engine.close(10.0)


def overflowing(edit_job: EditJob) -> EditJob:
    """The edit with a prompt that no step can compute with."""
    prompt = {name: np.full_like(array, 1e38) for name, array in edit_job.conditioning.items()}
    return replace(edit_job, conditioning=prompt)


@pytest.mark.parametrize("cache", ["off", "own"])
def test_one_ends_with_an_error_that_names_the_step_and_its_mates_go_on(
    engine: Engine, encoder: Encoder, cache: str
) -> None:
    settings: dict[str, Any] = {"num_inference_steps": STEPS, "cache": cache}
    latents = edit(engine, job(encoder, 1, "alone", **settings)).latents
    broken, mate = Sink(), Sink()
    jobs = (
        (engine.prepared(overflowing(job(encoder, 2, "broken", **settings))), broken),
        (engine.prepared(job(encoder, 1, "mate", **settings)), mate),
    )
    engine.ask(lambda: [accept(engine, *pair) for pair in jobs]).result()
    error = broken.error()
    assert isinstance(error, EngineFailed)
    assert f"after step {STEPS} its latents are not all finite" in str(error)
    assert np.abs(mate.final().latents - latents).max() <= tolerance(latents)


def test_a_preview_ends_it_before_its_last_step(engine: Engine, encoder: Encoder) -> None:
    sink, steps = Sink(), 200
    edit_job = job(encoder, 3, "seen", num_inference_steps=steps, cache="off", preview_every=1)
    engine.submit(overflowing(edit_job), sink)
    assert "after step 1 its latents are not all finite" in str(sink.error())
    assert not any(isinstance(event, PreviewEvent) for event in sink.events)
    assert not engine.manager.edits
