"""FLUX.1 rows with IP-Adapters against diffusers' own pipelines, alone and in any mix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from maskserve_common.contracts.request import EditKind
from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch import forward
from maskserve_engine.batch.picture_tokens import picture_keys_of
from maskserve_engine.families.mmdit import adapter
from tests.fakes.control_nets import random_net
from tests.fakes.ip_adapters import load_into
from tests.fakes.jobs import Case, guided, random_case, tolerance, without_mask
from tests.fakes.loras import of_model, write
from tests.fakes.pipelines import diffusers_latents, whole_picture
from tests.support import refresh_rows
from tests.support.cached_rows import (
    Primed,
    assert_equal,
    cached,
    check_all_active,
    check_mixed_batch,
    run,
)
from tests.support.draws import fresh_rng
from tests.support.ip_models import LORA, IpModel, Pixels, picture_of

pytestmark = pytest.mark.spread("model")

_PIPELINES: dict[str, dict[EditKind, str]] = {
    "inpaint": {
        "inpaint": "FluxInpaintPipeline",
        "edit": "FluxImg2ImgPipeline",
        "generate": "FluxPipeline",
    },
    "reference": {
        "inpaint": "FluxKontextInpaintPipeline",
        "edit": "FluxKontextPipeline",
        "generate": "FluxKontextPipeline",
    },
}


class Model(IpModel):
    def __init__(self, name: str, folder: Path, ip_folder: Path) -> None:
        super().__init__(folder, ip_folder)
        self.name = name

    def pipeline(self, case: Case, name: str = "", **parts: Any) -> Any:
        import diffusers

        cls = getattr(diffusers, name or _PIPELINES[self.name][case.kind])
        pipeline = cls.from_pretrained(self.folder, **parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def oracle(self, case: Case, picture: Pixels, scale: float) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline of the edit's kind."""
        pipeline = self.pipeline(case)
        load_into(pipeline, self.ip_folder / "plain.safetensors", scale)
        return self.latents(pipeline, case, ip_adapter_image=Image.fromarray(picture))

    def latents(self, pipeline: Any, case: Case, **inputs: Any) -> NDArray[np.float32]:
        if case.kind == "inpaint":
            return diffusers_latents(pipeline, case, **inputs)
        further = {"max_sequence_length": 16, "_auto_resize": False, "max_area": case.mask.size}
        tokens = whole_picture(pipeline, case, **further, **inputs)
        [latents] = pipeline._unpack_latents(tokens, *case.mask.shape, pipeline.vae_scale_factor)
        return np.asarray(latents.float().numpy())


@pytest.fixture(scope="module")
def make_model(
    tiny_flux: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Model]:
    return lambda name: Model(name, tiny_flux[name], tmp_path_factory.mktemp("ip"))


@pytest.fixture(scope="module", params=list(_PIPELINES))
def model(request: pytest.FixtureRequest, make_model: Callable[[str], Model]) -> Model:
    return make_model(request.param)


@pytest.fixture(scope="module")
def inpaint(make_model: Callable[[str], Model]) -> Model:
    return make_model("inpaint")


def edit(rng: np.random.Generator, **settings: Any) -> Case:
    """A random edit whose mask is whole tokens, as a base model's grows to."""
    case = random_case(rng, **{"num_inference_steps": 4, "strength": 1.0, **settings})
    mask = np.zeros_like(case.mask)
    mask[8:24, 8:24] = 255
    return replace(case, mask=mask)


def test_a_dense_row_equals_the_pipeline(model: Model) -> None:
    rng = fresh_rng()
    case, picture, scale = edit(rng), picture_of(rng), float(rng.uniform(0.4, 1.2))
    expected = model.oracle(case, picture, scale)
    assert_equal(model.alone(model.job(case, picture, scale=scale)), expected)
    for other in (
        model.job(case),
        model.job(case, picture_of(rng), scale=scale),
        model.job(case, picture, scale=-scale),
    ):
        assert np.abs(model.alone(other) - expected).max() > 10 * tolerance(expected)


@pytest.mark.parametrize("kind", ["inpaint", "edit", "generate"])
def test_a_guided_row_equals_the_pipeline(inpaint: Model, kind: EditKind) -> None:
    """The negative prompt stands beside a black picture."""
    rng = fresh_rng()
    case = edit(rng, strength=0.7 if kind == "edit" else 1.0, **guided(rng))
    case = case if kind == "inpaint" else without_mask(case, kind)
    picture = picture_of(rng)
    expected = inpaint.oracle(case, picture, 0.8)
    job = inpaint.job(case, picture, scale=0.8)
    assert_equal(inpaint.alone(job), expected)
    assert job.negative is not None
    away = replace(job, negative=job.negative | {"picture_keys": job.conditioning["picture_keys"]})
    assert np.abs(inpaint.alone(away) - expected).max() > 10 * tolerance(expected)


@pytest.mark.parametrize("kind", ["edit", "generate"])
def test_a_row_without_a_mask_equals_the_pipeline(model: Model, kind: EditKind) -> None:
    rng = fresh_rng()
    begins_later = kind == "edit" and model.name == "inpaint"
    case = without_mask(edit(rng, strength=0.7 if begins_later else 1.0), kind)
    picture = picture_of(rng)
    expected = model.oracle(case, picture, 0.8)
    assert_equal(model.alone(model.job(case, picture, scale=0.8)), expected)


@pytest.mark.parametrize("rival", ["scale ignored", "queries with positions", "single blocks too"])
def test_a_rival_differs_from_the_pipeline(
    inpaint: Model, rival: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = fresh_rng()
    case, picture = edit(rng), picture_of(rng)
    expected = inpaint.oracle(case, picture, 0.5)
    if rival == "scale ignored":
        monkeypatch.setattr(
            adapter,
            "picture_keys_of",
            lambda packed, widths, scale: picture_keys_of(packed, widths, 1.0),
        )
    elif rival == "queries with positions":
        monkeypatch.setattr(forward, "rotate", lambda x, cis, dtype: x.to(dtype))
    else:
        _let_single_blocks_read(monkeypatch)
    job = inpaint.job(case, picture, scale=0.5)
    assert np.abs(inpaint.alone(job) - expected).max() > 10 * tolerance(expected)


def _let_single_blocks_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add what a single block's image tokens read of the last double block's keys and values."""
    run_block = forward.State._block

    def block(state: Any, number: int, *, continues: bool) -> tuple[Tensor, Tensor]:
        text, image = run_block(state, number, continues=False)
        if number >= state.model.two_streams and state.joined:
            (begin, end), words = state.packing.row_stream.spans[0], state.packing.text[0]
            query = image[begin + words : end].unflatten(1, (state.model.weights.head_dim, -1))
            query = query.transpose(1, 2)
            last = state.model.two_streams - 1
            pictures = state.packed.pictures
            for _, read in () if pictures is None else pictures.read(last, lambda _: query):
                image[begin + words : end] += read.flatten(1)
        return text, image

    monkeypatch.setattr(forward.State, "_block", block)


def test_a_scale_of_0_is_as_without_bit_for_bit(inpaint: Model) -> None:
    rng = fresh_rng()
    case = edit(rng)
    without = inpaint.alone(inpaint.job(case))
    assert np.array_equal(inpaint.alone(inpaint.job(case, picture_of(rng), scale=0.0)), without)


def test_a_picture_a_lora_and_a_controlnet_together_equal_the_pipeline(
    inpaint: Model, tmp_path: Path
) -> None:
    """Alone, and in a batch with edits that have none, or some, of them."""
    rng, lora, net = fresh_rng(), tmp_path / "lora.safetensors", random_net(1, 1, 1)
    case, picture = without_mask(edit(rng), "generate"), picture_of(rng)
    hint = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
    pipeline = inpaint.pipeline(case, "FluxControlNetPipeline", controlnet=net)
    write(lora, of_model(pipeline.transformer, 3))
    pipeline.load_lora_weights(str(lora), adapter_name="x")
    pipeline.set_adapters("x", LORA)
    load_into(pipeline, inpaint.ip_folder / "plain.safetensors", 0.7)
    expected = inpaint.latents(
        pipeline,
        case,
        control_image=Image.fromarray(hint),
        controlnet_conditioning_scale=0.8,
        ip_adapter_image=Image.fromarray(picture),
    )

    moments = inpaint.encoder.encode(hint, case.mask, "").moments
    controls = (ControlInput("net", hint, 0.8, moments=moments),)
    plain, adapted = inpaint.job(case), inpaint.job(case, picture, scale=0.7)
    nets = {"net": inpaint.adapter.control_net(net)}
    inpaint.check_together(adapted, plain, controls, lora, nets, expected)


def test_a_cached_row_that_computes_all_tokens_equals_the_dense_row(inpaint: Model) -> None:
    rng = fresh_rng()
    job = inpaint.job(edit(rng), picture_of(rng), scale=0.9)
    check_all_active(inpaint.replay, inpaint.encoder, job, "dense", "project", "kv")


@pytest.mark.parametrize("kind", ["dense", "project", "kv"])
def test_rows_with_and_without_pictures_do_not_change_each_other(inpaint: Model, kind: str) -> None:
    rng, jobs = fresh_rng(), []
    for number in range(6):
        case = edit(rng, **(guided(rng) if number % 2 else {}))
        picture = picture_of(rng) if number % 3 else None
        jobs.append(inpaint.job(case, picture, scale=float(rng.uniform(0.3, 1.2))))
    primed = [Primed(inpaint.adapter, inpaint.encoder, job) for job in jobs]
    check_mixed_batch(inpaint.replay, jobs, primed, kind)


def test_refresh_steps_are_dense_steps(inpaint: Model) -> None:
    rng = fresh_rng()
    case = edit(rng, num_inference_steps=6, mask_ring=1, **guided(rng))
    job = inpaint.job(case, picture_of(rng), scale=0.9)
    refresh_rows.check_dense_refresh_steps(inpaint.adapter, job)


def test_rows_with_predicted_steps_share_a_batch_with_pictures(inpaint: Model) -> None:
    rng = fresh_rng()
    predicts = {"num_inference_steps": 12, "step_interval": 2}
    jobs = [
        inpaint.job(edit(rng, **settings), picture)
        for settings in (predicts, {"num_inference_steps": 7})
        for picture in (picture_of(rng), None)
    ]
    rows = [inpaint.adapter.dense_row(job) for job in jobs]
    run(inpaint.replay, rows, "dense")
    assert len({row.steps for row in rows}) == 1
    for row, job in zip(rows, jobs, strict=True):
        assert_equal(row.result().array(), inpaint.alone(job))


def test_only_computed_tokens_read_the_picture(inpaint: Model) -> None:
    """In a cached row's `kv` blocks the picture is read by as many tokens as the mask has."""
    rng = fresh_rng()
    job = inpaint.job(edit(rng), picture_of(rng), scale=0.9)
    row = cached(inpaint.replay, job, Primed(inpaint.adapter, inpaint.encoder, job))
    counted = list[int]()
    read = forward.State._read_pictures

    def reads(state: Any, number: int, qk: Tensor) -> Any:
        for span, answer in read(state, number, qk):
            counted.append(len(answer))
            yield span, answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward.State, "_read_pictures", reads)
        run(inpaint.replay, [row], "kv")
    assert set(counted) == {inpaint.adapter.tokens(job).active}
