"""References beside the source on their way from the client's files to the engine: each is encoded
once for all edits that share it, and prompts are about all of them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from maskserve_common.config import Config, ValuesConfig
from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.files.values import Values
from maskserve_engine.stages.encoded import pack_references, unpack_references
from maskserve_triton.accept import accept_edit
from maskserve_triton.encoder import EditEncoder
from maskserve_triton.encoder_input import EncoderInput
from maskserve_triton.preprocess import PreparedEdit, prepare_edit
from maskserve_triton.run_encodings import RunEncodings
from tests.fakes.jobs import tolerance
from tests.fakes.pictures import encode, scene
from tests.support.cached_rows import assert_equal
from tests.support.draws import fresh_rng, fresh_seed
from tests.support.engines import edit, make_engine
from tests.support.family_cases import FamilyModel
from tests.support.refresh_rows import result, schedule_by_errors
from tests.support.sink import Sink

PIXELS = [scene(64, 64), scene(64, 96), scene(96, 64)]
_LOW_FIDELITY = 14.0
"""dB at which models with random weights refresh neither at each step nor once."""


@pytest.fixture
def model(request: Any, family_model: Callable[[str], FamilyModel]) -> FamilyModel:
    return family_model(request.param)


@pytest.fixture
def encoder(model: FamilyModel, tmp_path: Path) -> Iterator[EditEncoder]:
    encoder = EditEncoder(model.encoder, structs.replace(model.config, runtime_dir=str(tmp_path)))
    yield encoder
    encoder.close()


def prepared(
    model: FamilyModel, pictures: list[NDArray[np.uint8]], kind: EditKind = "edit"
) -> PreparedEdit:
    spec, config = model.adapter.spec, Config()
    settings = EditSettings(seed=1, num_inference_steps=2)
    accepted = accept_edit(settings, b"a red star", spec, config, kind=kind)
    image, *references = map(encode, pictures)
    return prepare_edit(image, b"", accepted, spec, config, references=references)


def to_encode(ready: PreparedEdit) -> EncoderInput:
    arrays = ready.pixels, ready.edit_mask
    return EncoderInput(ready.request, *arrays, references=ready.references)


@pytest.fixture
def encoded_shapes(model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the pictures that the model's encoder encodes, as they come."""
    shapes: list[tuple[int, ...]] = []
    real = model.encoder.template

    def template(pixels: NDArray[np.uint8]) -> Any:
        shapes.append(pixels.shape)
        return real(pixels)

    monkeypatch.setattr(model.encoder, "template", template)
    return shapes


@pytest.mark.parametrize("model", ["klein"], indirect=True)
def test_a_reference_that_edits_share_is_encoded_once(
    model: FamilyModel, encoder: EditEncoder, encoded_shapes: list[tuple[int, ...]]
) -> None:
    first, second, third = PIXELS
    ready = prepared(model, [first, second, third])
    [answer] = encoder.encode_all([to_encode(ready)])
    assert not isinstance(answer, Exception)
    assert len(encoded_shapes) == 3
    pictures = [ready.pixels, *to_encode(ready).pictures[1:]]
    encoded, _ = answer
    for moments, pixels in zip((encoded.moments, *encoded.references), pictures, strict=True):
        assert np.array_equal(moments, model.encoder.moments(pixels))
    # As a source, and behind another one.
    list(encoder.encode_all([to_encode(prepared(model, [second, third]))]))
    assert len(encoded_shapes) == 3


@pytest.mark.parametrize("model", ["klein"], indirect=True)
def test_a_reference_that_edits_of_a_run_share_is_encoded_by_one_worker(
    model: FamilyModel, tmp_path: Path, encoded_shapes: list[tuple[int, ...]]
) -> None:
    values = Values(ValuesConfig(folder=str(tmp_path / "values"), least_bytes=1))
    values.begin("", "run")
    maker, taker, stranger = (
        EditEncoder(
            model.encoder,
            structs.replace(model.config, runtime_dir=str(tmp_path / name)),
            run_encodings=RunEncodings(values, lambda: "of these stages"),
        )
        for name in ("maker", "taker", "stranger")
    )
    first, second, style = PIXELS
    shared = to_encode(prepared(model, [style, style]))  # as the router sends a reference alone
    [answer] = maker.encode_all([shared._replace(run="run", makes=True)])
    assert not isinstance(answer, Exception)
    assert (len(encoded_shapes), answer[1].references) == (1, "kept")
    edits = [to_encode(prepared(model, [source, style])) for source in (first, second)]
    for encoder, run, how in ((taker, "run", "kept"), (stranger, "", "made")):
        [answer] = encoder.encode_all([edits[run == ""]._replace(run=run)])
        assert not isinstance(answer, Exception)
        encoded, report = answer
        assert (report.template, report.references) == ("made", how)
        [moments] = encoded.references
        assert np.array_equal(moments, model.encoder.moments(edits[0].pictures[1]))
        encoder.close()
    maker.close()
    assert len(encoded_shapes) == 1 + 1 + 2


@pytest.mark.parametrize("model", ["qwen-image-edit-2511", "qwen-image-21"], indirect=True)
def test_prompts_are_about_all_pictures_in_order(model: FamilyModel, encoder: EditEncoder) -> None:
    first, second, third = PIXELS
    lists = ([first], [first, second], [first, third], [first, second, third])
    embeds = []
    for pictures in (*lists, *lists):
        [answer] = encoder.encode_all([to_encode(prepared(model, pictures))])
        assert not isinstance(answer, Exception)
        encoded, report = answer
        embeds.append(encoded.conditioning["prompt_embeds"])
        assert report.prompt == ("made" if len(embeds) <= len(lists) else "kept")
    for first, again in zip(embeds[:4], embeds[4:], strict=True):
        assert first is again
    assert len({array.tobytes() for array in embeds[:4]}) == 4


def test_moments_are_unpacked_as_they_were_packed() -> None:
    rng = fresh_rng()
    for count in range(4):
        sizes = [(int(h), int(w)) for h, w in rng.integers(1, 6, (count, 2))]
        moments = [rng.standard_normal((8, *size)).astype(np.float32) for size in sizes]
        unpacked = unpack_references(pack_references(moments), sizes, 8)
        assert len(unpacked) == count
        for packed, array in zip(unpacked, moments, strict=True):
            assert np.array_equal(packed, array)


@pytest.mark.parametrize(
    ("model", "cache", "dense_for"),
    [
        ("klein", "own", None),
        ("qwen-image-edit-2511", "off", "references"),
        ("klein-kv", "off", "references"),
    ],
    indirect=["model"],
)
def test_an_edit_with_references_reads_no_template(
    model: FamilyModel, cache: str, dense_for: str | None
) -> None:
    """Even one whose source is primed: its entries have not seen the references."""
    anchors = 0.5 if cache == "own" else 0.0
    sections = {**model.case.sections.get("model", {}), "outside_noise": "edit"}
    engine = make_engine(model.folder, model.encoder, sections, own_anchors=anchors)
    try:
        case = model.edit(2, several=True, num_inference_steps=6, strength=1.0, cache="auto")
        case = replace(case, mask=np.zeros_like(case.mask))
        case.mask[:16, :16] = 255
        plain = model.encoded(replace(case, references=()), "plain")
        for _ in range(3):
            edit(engine, plain)
        final = edit(engine, model.encoded(case, "several"))
        assert final.meta["cache"] == cache
        assert final.meta.get("dense_for") == dense_for
        if cache != "own":
            assert_equal(final.latents, model.oracle(case))
    finally:
        engine.close(5.0)


@pytest.mark.parametrize("model", ["qwen-image-edit-2511", "klein-kv"], indirect=True)
def test_errors_place_the_refresh_steps_of_edits_with_references(model: FamilyModel) -> None:
    """Also beside others, with other numbers of pictures and steps."""
    sections = {**model.case.sections.get("model", {}), "outside_noise": "edit"}
    engine = make_engine(
        model.folder, model.encoder, sections, own_anchors=-1.0, fidelity=_LOW_FIDELITY
    )
    seed = fresh_seed()
    try:
        jobs = []
        for number in range(3):
            case = model.edit(
                2 * (seed + number), several=True, num_inference_steps=12 + number, strength=1.0,
                cache="auto",
            )  # fmt: skip
            case = replace(case, mask=np.zeros_like(case.mask))
            case.mask[:16, :16] = 255
            jobs.append(model.encoded(case, f"edit-{number}"))
        alone = [edit(engine, job) for job in jobs]
        for job, final in zip(jobs, alone, strict=True):
            schedule = schedule_by_errors(engine.config, engine.adapter, job, final.meta)
            assert final.meta["cache"] == "own"
            assert final.meta["anchors"] == sorted(schedule.computed_at)
            expected = result(engine.adapter, job, schedule)
            np.testing.assert_allclose(final.latents, expected, atol=tolerance(expected))
        sinks = [Sink() for _ in jobs]
        for job, sink in zip(jobs, sinks, strict=True):
            request = replace(job.request, request_id=f"{job.request.request_id}-again")
            engine.submit(replace(job, request=request), sink)
        for sink, before in zip(sinks, alone, strict=True):
            final = sink.final()
            assert final.meta["anchors"] == before.meta["anchors"]
            np.testing.assert_allclose(
                final.latents, before.latents, atol=tolerance(before.latents)
            )
    finally:
        engine.close(5.0)
