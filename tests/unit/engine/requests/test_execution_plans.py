"""The execution plan of an edit: none is more work than computing all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_benchmarks.edits import admission
from maskserve_benchmarks.edits.direct import request_of
from maskserve_common.config import Config
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.execution_plan import DENSE, ControlWork
from maskserve_engine.requests.state import RequestState
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.start.assembly import assemble
from tests.fakes import tiny_families
from tests.fakes.jobs import config_of
from tests.support.draws import fresh_rng
from tests.support.examples import number
from tests.support.sink import Sink

MODELS = Path(__file__).parents[4] / "assets/models"
SHAPES = sorted(path.name for path in MODELS.iterdir() if (path / "model_index.json").exists())
"""Folders of models; weights are not read."""
FAMILIES = (
    *SHAPES, "chroma", "flux-base", "flux3-klein", "flux3-base", "klein-base",
    "joyimage-edit", "longcat-image", "longcat-image-edit", "sd3-large", "sdxl-fill",
    "z-image-turbo",
)  # fmt: skip
"""Those, and tiny ones of the families and variants that have none there."""
STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 28, 37, 50)
RATIOS = (0.02, 0.2, 0.4, 0.5, 0.56, 0.6, 0.65, 0.69, 0.75, 0.81, 0.88, 0.95, 1.0)
SIZES = ((1.0, 1.0), (0.75, 1.25), (1.5, 0.5), (0.5, 0.5))
CONTROLLED = ("flux", "unet")
"""Families whose ControlNets are served."""
CACHE: dict[str, Any] = {"budget_bytes": 2**38, "dense_above_ratio": 1.0}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model's folder by its name."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def build(name: str) -> Path:
        return MODELS / name if name in SHAPES else tiny_families.FAMILIES[name](folder / name)

    return build


@cache
def engine_of(folder: Path, **cache: Any) -> Engine:
    """One of a model without weights that was not started: the test does what its thread does."""
    tiny = {} if folder.name in SHAPES else {"native_resolution": 256}
    config: Config = config_of(
        folder,
        model={"device": "meta", "dtype": "float32", **tiny},
        engine={"warm_up": False},
        cache={**CACHE, **cache},
    )
    adapter = load_adapter(config)
    return assemble(config, adapter, lambda: adapter.blank_prompt(8))


def job(
    engine: Engine,
    ratio: float,
    steps: int,
    name: str = "edit",
    shape: tuple[float, float] = (1.0, 1.0),
    **options: Any,
) -> EditJob:
    """An edit of the upper share of a picture, whose last row of tokens ends where it may; `shape`:
    its height and width, or those of a window on a larger one, as shares of the model's side.
    """
    adapter, spec = engine.adapter, engine.adapter.spec
    side, multiple = min(spec.native_resolution, 256), spec.size_multiple
    height, width = (max(1, round(share * side / multiple)) * multiple for share in shape)
    mask = np.zeros((height, width), np.uint8)
    latents = tuple(length // spec.vae_scale_factor for length in mask.shape)
    mask[: max(1, round(ratio * height))] = 255
    words = spec.text_tokens(engine.config.model.max_sequence_length)
    prompt = adapter.blank_prompt(spec.encoder_picture_tokens(*latents) + words)
    moments = np.zeros((2 * spec.latent_channels, *latents), np.float32)
    settings = EditSettings(
        **{
            "num_inference_steps": len(spec.sigmas) or max(steps, spec.least_steps),
            "guidance_scale": spec.guidance_default(0.0),
            "mask_ring": 1,
            **options,
        }
    )
    return EditJob(
        request_of(np.zeros((height, width, 3), np.uint8), "a red star", settings, 0, name),
        mask,
        moments,
        moments if spec.semantics.masked_picture else np.zeros((0, 0, 0), np.float32),
        prompt,
        prompt if spec.guidance == "cfg" else None,
    )


def prime(engine: Engine, edit_job: EditJob) -> None:
    """Have the job's template count as primed: its entries are never read."""
    if engine.cache.priming_state(edit_job) != "primed":
        admission.prime(engine, edit_job)


class Nets:
    """Knows one ControlNet: a part of the base's blocks."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def config(self, control: ResolvedControl) -> dict[str, Any]:
        config = dict(self.spec.denoiser)
        if "num_single_layers" in config:
            config |= {"num_layers": 1, "num_single_layers": 1}
        return config


def controlled(engine: Engine, edit: RequestState, rng: np.random.Generator) -> None:
    """Have a ControlNet that is here act in some of the edit's steps."""
    begin, end = sorted(rng.uniform(0, 1, 2).round(2))
    control = ResolvedControl(name="net", scale=0.7, start=begin, end=end, version="net")
    pixels = np.zeros((*edit.job.edit_mask.shape, 3), np.uint8)
    request = replace(edit.job.request, controls=(control,))
    edit.job = replace(edit.job, request=request, controls=(ControlInput("net", pixels),))
    spec, steps, nets = engine.adapter.spec, edit.work.steps, Nets(engine.adapter.spec)
    schedule = engine.adapter.net_schedule(edit.job, (control,))
    work = ControlWork.of(edit.job, spec, edit.work.totals, steps, nets, schedule)  # type: ignore[arg-type]
    edit.work = replace(edit.work, controls=work)


def adapted(engine: Engine, edit: RequestState, loras: int) -> None:
    """Have so many LoRAs of all layers that are here."""
    work = engine.adapter.work(*edit.job.moments.shape[1:])
    one, _ = work.typical_lora()
    edit.work = edit.work.with_loras([one] * loras)


def accepted(
    engine: Engine, edit_job: EditJob, rng: np.random.Generator | None = None
) -> RequestState:
    """The edit, queued by the engine's manager, with adapters that `rng` draws."""
    sink = Sink()
    edit = RequestState.of(edit_job, sink, engine.adapter)
    if rng is not None and engine.adapter.spec.family in CONTROLLED and rng.random() < 0.5:
        controlled(engine, edit, rng)
    if rng is not None and rng.random() < 0.5:
        adapted(engine, edit, int(rng.integers(1, 4)))
    engine.manager.accept(edit)
    assert engine.manager.holds(edit), sink.events
    engine.manager.cancel(edit.request_id)
    return edit


def check(engine: Engine, edit: RequestState) -> None:
    """Its ticket can be, and no step of it is more work than a dense one."""
    ticket = edit.make_ticket()
    dense = edit.step_flops(DENSE, engine.adapter)
    assert 0 < ticket.cost <= dense * (1 + 1e-12), edit.plan
    if edit.plan.schedule is not None:
        assert ticket.cost < dense
    for level in edit.levels:
        again = replace(edit)
        again.step_down(level, None, engine.adapter)
        assert 0 < again.make_ticket().cost <= dense * (1 + 1e-12), level
        again.status()


@pytest.mark.parametrize("primed", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_edit_of_any_size_and_steps_is_more_work_than_a_dense_one(
    built: Callable[[str], Path], name: str, primed: bool
) -> None:
    engine, rng = engine_of(built(name)), fresh_rng()
    settings: list[dict[str, Any]] = [
        {},
        {"cache": "own"},
        {"cache": "require"} if primed else {"negative_prompt": None},
        {"reuse": "elastic", "reuse_floor": 0.0},
        {"reuse_floor": 30.0},
    ]
    cases = list(product(STEPS, RATIOS))
    drawn = rng.permutation(len(cases))[: number(60)]
    # The first two, and more than those, count more tokens than a dense step has.
    for steps, ratio in [(4, 0.75), (6, 0.95), *(cases[at] for at in drawn)]:
        shape = SIZES[int(rng.integers(len(SIZES)))]
        if primed:
            prime(engine, job(engine, ratio, steps, shape=shape))
        for setting in settings:
            check(engine, accepted(engine, job(engine, ratio, steps, shape=shape, **setting), rng))
