"""Samplers that remember their steps, of models of flow matching: rows against diffusers' pipeline
with the same sampler.

Its inpainting pipelines noise the source by `scale_noise`, which these samplers have not; here they
are given it, as their `add_noise` of a flow is the same sum.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler
from numpy.typing import NDArray
from torch import Tensor

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config import ConfigError
from maskserve_engine.families.mmdit.schedule import make_schedule
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import Case, config_of, encode_case, random_case
from tests.fakes.pipelines import diffusers_edit, diffusers_latents
from tests.fakes.tiny_chroma import build_tiny_chroma
from tests.fakes.tiny_families import FAMILIES
from tests.fakes.tiny_model import build_tiny_model
from tests.fakes.tiny_qwen_image import build_tiny_qwen_image
from tests.fakes.tiny_sd3 import build_tiny_sd3
from tests.fakes.tiny_z_image import build_tiny_z_image
from tests.support import cached_rows
from tests.support.cached_rows import assert_equal
from tests.support.family_cases import CASES as FAMILY_CASES
from tests.support.family_cases import FamilyModel

FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


class _Noises:
    def scale_noise(self: Any, sample: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        add_noise: Tensor = self.add_noise(sample, noise, timestep)
        return add_noise


class UniPC(_Noises, UniPCMultistepScheduler):  # type: ignore[misc]
    def set_timesteps(
        self, steps: Any = None, device: Any = None, sigmas: Any = None, mu: Any = None
    ) -> None:
        """It takes no list, which is what Z-Image's pipeline has."""
        super().set_timesteps(steps, device, None if sigmas is None else np.asarray(sigmas), mu)


class Dpm(_Noises, DPMSolverMultistepScheduler):  # type: ignore[misc]
    pass


SAMPLERS: dict[str, Callable[[], Any]] = {
    "unipc": partial(UniPC, **FLOW, flow_shift=3.0),
    "unipc-3": partial(UniPC, **FLOW, solver_order=3, disable_corrector=[1]),
    "unipc-shifts": partial(UniPC, **FLOW, use_dynamic_shifting=True),
    "dpm": partial(Dpm, **FLOW, flow_shift=3.0),
    "dpm-3": partial(Dpm, **FLOW, solver_order=3),
}
MODELS: dict[str, Callable[[Path], Path]] = {
    "fill": partial(build_tiny_model, semantics="fill"),
    "flux": partial(build_tiny_model, semantics="inpaint"),
    "qwen": build_tiny_qwen_image,
    "z-image": build_tiny_z_image,
    "chroma": build_tiny_chroma,
    "sd3": build_tiny_sd3,
}
CASES = [
    ("fill", "unipc"), ("fill", "unipc-shifts"), ("flux", "unipc-3"), ("flux", "unipc-shifts"),
    ("qwen", "unipc"), ("z-image", "unipc"), ("chroma", "unipc"),
    ("sd3", "unipc"), ("sd3", "unipc-3"), ("sd3", "dpm"), ("sd3", "dpm-3"),
]  # fmt: skip


def _save_sampler(sampler: Any, folder: Path) -> None:
    """Put diffusers' own class of a sampler into a model folder, in place of the one there."""
    real: Any = type(sampler).__mro__[2]
    shutil.rmtree(folder / "scheduler")
    real.from_config(sampler.config).save_pretrained(folder / "scheduler")


class Served:
    """Diffusers' pipeline and our parts over a folder with another sampler."""

    def __init__(self, name: str, plain: Path, folder: Path, sampler: Any) -> None:
        from diffusers import DiffusionPipeline

        self.name, self.folder = name, Path(shutil.copytree(plain, folder))
        _save_sampler(sampler, folder)
        self.pipeline: Any = DiffusionPipeline.from_pretrained(plain)
        self.pipeline.set_progress_bar_config(disable=True)
        self.pipeline.scheduler = sampler
        if name == "chroma":  # as `test_chroma` has it
            self.pipeline.transformer.register_to_config(guidance_embeds=False)
            mask = self.pipeline._prepare_attention_mask
            self.pipeline._prepare_attention_mask = lambda **inputs: mask(**inputs) > 0
        config = config_of(folder, model={"max_sequence_length": self.length})
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.replay = Replay(self.adapter)

    @property
    def length(self) -> int:
        return 320 if self.name in ("qwen", "z-image") else 16

    def case(self, seed: int, **settings: Any) -> Case:
        rng = np.random.default_rng(seed)
        defaults: dict[str, Any] = {"num_inference_steps": 6, "strength": 1.0 if seed % 2 else 0.7}
        if self.name in ("z-image", "chroma", "sd3"):
            defaults |= {"guidance_scale": 3.0, "negative_prompt": "a blue circle"}
        elif self.name == "qwen":
            defaults |= {"guidance_scale": None}
        case = random_case(rng, **{"cache": "off"} | defaults | settings)
        return replace(case, mask=mask_for_model(case.mask, self.adapter.spec))

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline."""
        if self.name in ("fill", "flux"):
            return diffusers_latents(self.pipeline, case)
        tokens = diffusers_edit(
            self.pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            max_sequence_length=self.length, output_type="latent",
        )  # fmt: skip
        if self.name in ("qwen", "chroma"):
            factor = self.pipeline.vae_scale_factor
            tokens = self.pipeline._unpack_latents(tokens, *case.mask.shape, factor)
        latents: NDArray[np.float32] = tokens[0].float().numpy()
        return latents[:, 0] if self.name == "qwen" else latents


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in built:
            built[name] = tmp_path_factory.mktemp("models") / name
            MODELS[name](built[name])
        return built[name]

    return folder


@pytest.mark.parametrize(("model", "sampler"), CASES, ids=map("-".join, CASES))
def test_rows_are_the_pipeline_s(
    model: str, sampler: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """In one batch, begun at different steps; and cached with all tokens active."""
    served = Served(model, plain(model), tmp_path / "m", SAMPLERS[sampler]())
    cases = [served.case(seed) for seed in (1, 2)]
    cases.append(served.case(3, num_inference_steps=4))
    jobs = [encode_case(served.encoder, case, str(i)) for i, case in enumerate(cases)]
    rows: list[Any] = [served.adapter.dense_row(job) for job in jobs]
    cached_rows.run(served.replay, rows, "dense")
    for case, row in zip(cases, rows, strict=True):
        assert_equal(row.result().array(), served.oracle(case))
    cached_rows.check_all_active(served.replay, served.encoder, jobs[0], "kv")


WHOLES = [
    ("flux-base", "unipc"), ("flux-base", "unipc-shifts"), ("klein-base", "unipc-shifts"),
    ("qwen-image", "unipc"), ("z-image", "unipc"), ("chroma", "unipc"),
    ("sd3-large", "unipc"), ("sd3-large", "dpm-3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sampler"), WHOLES, ids=map("-".join, WHOLES))
def test_rows_of_each_kind_are_the_pipeline_s(name: str, sampler: str, tmp_path: Path) -> None:
    """Some pipelines list sigmas for such samplers, others leave them the choice."""
    folder, chosen = FAMILIES[name](tmp_path / "m"), SAMPLERS[sampler]()
    _save_sampler(chosen, folder)
    model = FamilyModel(FAMILY_CASES[name], folder)
    model.pipeline.scheduler = chosen
    edits = [model.edit(seed, kind) for kind in ("inpaint", *model.case.wholes) for seed in (1, 2)]
    rows: list[Any] = [model.adapter.dense_row(model.encoded(edit)) for edit in edits]
    cached_rows.run(model.replay, rows, "dense")
    for edit, row in zip(edits, rows, strict=True):
        assert_equal(row.result().array(), model.oracle(edit))


def test_a_row_that_moves_on_takes_along_what_its_sampler_remembers(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """To another process, say."""
    served = Served("flux", plain("flux"), tmp_path / "m", SAMPLERS["unipc"]())
    job = encode_case(served.encoder, served.case(1), "r")
    whole, moved, twin = (served.adapter.dense_row(job) for _ in range(3))
    cached_rows.run(served.replay, [whole], "dense")
    adapter: Any = served.adapter
    for _ in range(3):
        adapter.step([moved], None)
    carried = adapter.carried(moved)
    adapter.follow(twin, carried, 3)
    cached_rows.run(served.replay, [twin], "dense")
    np.testing.assert_array_equal(twin.result().array(), whole.result().array())


REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "no flow": ("flux", UniPCMultistepScheduler, "use_flow_sigmas False is not served"),
    "epsilon": (
        "flux",
        partial(UniPCMultistepScheduler, use_flow_sigmas=True),
        "prediction_type epsilon is not served",
    ),
    "an end above 0": (
        "flux",
        partial(UniPCMultistepScheduler, **FLOW, final_sigmas_type="sigma_min"),
        "final_sigmas_type sigma_min",
    ),
    "stochastic": (
        "sd3",
        partial(DPMSolverMultistepScheduler, **FLOW, algorithm_type="sde-dpmsolver++"),
        "draws noise",
    ),
    "clipped": (
        "sd3", partial(DPMSolverMultistepScheduler, **FLOW, thresholding=True), "thresholding True",
    ),
    "one that cannot be told sigmas": (
        "flux",
        partial(DPMSolverMultistepScheduler, **FLOW),
        "served: FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_samplers_that_are_no_flow_s_are_refused_by_name(
    name: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    model, sampler, message = REFUSED[name]
    folder = Path(shutil.copytree(plain(model), tmp_path / "m"))
    shutil.rmtree(folder / "scheduler")
    sampler().save_pretrained(folder / "scheduler")
    with pytest.raises(ConfigError, match=message):
        load_adapter(config_of(folder))


def test_a_schedule_is_taken_apart_once(plain: Callable[[str], Path], tmp_path: Path) -> None:
    sampler = SAMPLERS["unipc"]()
    first = make_schedule(sampler, 6, 64)
    assert make_schedule(sampler, 6, 64) is first
    assert len(first.moves) == 6
    assert sampler.timesteps is None or len(sampler.timesteps) != 6
