"""Samplers of model folders: stepped as diffusers' pipeline steps them, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from diffusers import StableDiffusionInpaintPipeline, StableDiffusionXLInpaintPipeline

from maskserve_common.config import ConfigError
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.families.specs import load_spec
from maskserve_triton.accept import check_settings
from tests.fakes.jobs import config_of

REPO = Path(__file__).parents[4]
TIMESTEPS = 7


def copy(folder: Path, to: Path, **sampler: Any) -> Path:
    """A model folder whose sampler has other options."""
    model_folder = Path(shutil.copytree(folder, to / "model"))
    path = model_folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **sampler}))
    if "_class_name" in sampler:
        index = json.loads((model_folder / "model_index.json").read_text())
        index["scheduler"] = ["diffusers", sampler["_class_name"]]
        (model_folder / "model_index.json").write_text(json.dumps(index))
    return model_folder


@pytest.mark.parametrize(
    "name",
    [
        "FlowMatchLCMScheduler",
        "FlowMatchHeunDiscreteScheduler",
        "DPMSolverMultistepScheduler",
    ],
)
def test_flux_refuses_by_name_what_is_not_flow_match_euler(
    tiny_fill: Path, tmp_path: Path, name: str
) -> None:
    folder = copy(tiny_fill, tmp_path, _class_name=name)
    with pytest.raises(ConfigError, match=f"{name} is not served.*FlowMatchEuler"):
        load_adapter(config_of(folder))


@pytest.mark.parametrize("steps", [0, 1])
def test_one_step_to_a_terminal_sigma_is_refused_at_load(
    tiny_fill: Path, tmp_path: Path, steps: int
) -> None:
    """The stretch divides 0 by 0: the only sigma is 1. With two steps it is served."""
    folder = copy(tiny_fill, tmp_path, shift_terminal=0.02)
    config = config_of(folder, model={"num_inference_steps": steps or 2})
    if steps == 1:
        with pytest.raises(ConfigError, match=r"num_inference_steps: 1.*shift_terminal"):
            load_adapter(config)
    else:
        load_adapter(config)


@pytest.mark.parametrize("name", ["fill", "klein"])
def test_an_edit_of_one_step_to_a_terminal_sigma_is_refused(
    tiny_fill: Path, tmp_path: Path, name: str
) -> None:
    whole = tiny_fill if name == "fill" else REPO / "assets/models/flux2-klein-4b-shapes"
    folder = copy(whole, tmp_path, shift_terminal=0.02)
    spec, config = load_spec(folder), config_of(folder)
    check_settings(EditSettings(num_inference_steps=2), spec, config)
    with pytest.raises(InvalidRequest, match=r"num_inference_steps.*is 1.*2 to"):
        check_settings(EditSettings(num_inference_steps=1), spec, config)


@pytest.mark.parametrize("kind", ["learned", "learned_range"])
def test_a_sampler_that_wants_a_learned_variance_is_refused(
    tiny_unets: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    changed = {"_class_name": "DPMSolverMultistepScheduler", "variance_type": kind}
    folder = copy(tiny_unets["sd-fill"], tmp_path, **changed)
    with pytest.raises(ConfigError, match=f"variance_type {kind}"):
        load_adapter(config_of(folder))


@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("sd-fill", StableDiffusionInpaintPipeline),
        ("sdxl-fill", StableDiffusionXLInpaintPipeline),
    ],
)
@pytest.mark.parametrize("sampler", ["DDIMScheduler", "PNDMScheduler", "EulerDiscreteScheduler"])
def test_the_steps_offset_is_the_pipelines(
    tiny_unets: dict[str, Path], tmp_path: Path, name: str, pipeline: Any, sampler: str
) -> None:
    """Stable Diffusion's pipelines step from offset 1 whatever the folder says; SDXL's do not."""
    changed = {"_class_name": sampler, "timestep_spacing": "leading", "steps_offset": 0}
    folder = copy(tiny_unets[name], tmp_path, skip_prk_steps=True, **changed)
    scheduler = pipeline.from_pretrained(folder).scheduler
    scheduler.set_timesteps(TIMESTEPS)
    loaded_sampler = load_adapter(config_of(folder)).sampler  # type: ignore[attr-defined]
    loaded_sampler.set_timesteps(TIMESTEPS)
    assert loaded_sampler.timesteps.tolist() == scheduler.timesteps.tolist()
