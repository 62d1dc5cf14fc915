"""The committed ControlNets are small, name no place of their making, and are served beside the
demo model that they are for and no other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.specs import load_spec
from maskserve_engine.spec.control_nets import ControlNets
from maskserve_studies.training.control import FOLDERS, NETS
from tests.fakes.jobs import config_of

MODELS: dict[str, Path] = {"flux": DEMO_MODEL, "unet": DEMO_MODEL.with_name("demo-unet")}


@pytest.mark.parametrize("base", MODELS)
def test_the_folder_is_small_and_names_no_place_of_its_making(base: str) -> None:
    files = list(FOLDERS[base].iterdir())
    assert sum(file.stat().st_size for file in files) <= 6_000_000
    assert "_name_or_path" not in (FOLDERS[base] / "config.json").read_text()


@pytest.mark.parametrize("base", MODELS)
def test_it_is_served_beside_its_own_model_alone(base: str) -> None:
    model = MODELS[base]
    nets = ControlNets(config_of(model, controls={"folder": str(NETS)}), load_spec(model))
    assert not nets.find(FOLDERS[base].name, "controls").problem
    [other_model] = [folder.name for name, folder in FOLDERS.items() if name != base]
    with pytest.raises(InvalidRequest, match="the served model takes"):
        nets.find(other_model, "controls")
