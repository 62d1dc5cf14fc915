"""The libraries that a worker's process imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maskserve_common.config import Config, ModelConfig, NodesConfig
from maskserve_engine.stages.unused_libraries import unused_libraries
from tests.fakes.tiny_flux2 import build_tiny_flux2
from tests.fakes.tiny_qwen_image import build_tiny_qwen_image
from tests.fakes.tiny_z_image import build_tiny_z_image

ALL = {"peft", "torchao", "bitsandbytes", "gguf", "scipy"}


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, set()),
        ({"weights": "int8"}, {"torchao"}),
        ({"weights": "int8-dynamic"}, {"torchao"}),
        ({"weights": "fp8"}, {"torchao"}),
        ({"weights": "nf4"}, {"bitsandbytes"}),
        ({"t5_weights": "int8"}, {"torchao"}),
        ({"weights": "nf4", "t5_weights": "int8"}, {"bitsandbytes", "torchao"}),
        ({"gguf": "/models/f.gguf"}, {"gguf"}),
    ],
)
def test_what_is_asked_for_is_left(options: dict[str, str], used: set[str], tmp_path: Path) -> None:
    config = Config(model=ModelConfig(path=str(tmp_path), **options))
    assert set(unused_libraries(config)) == ALL - used
    hides_text = "transformers" in unused_libraries(config, text=False)
    assert hides_text == (options.keys().isdisjoint({"weights", "gguf"}))


def test_a_folder_that_is_quantised_may_want_any(tmp_path: Path) -> None:
    for part, settings in (("vae", {}), ("transformer", {"quantization_config": {"bits": 4}})):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(settings))
    assert unused_libraries(Config(model=ModelConfig(path=str(tmp_path)))) == []


def test_so_may_a_node_servers(tmp_path: Path) -> None:
    config = Config(nodes=NodesConfig(models={"find": str(tmp_path)}))
    for settings, hidden in (({}, ALL), ({"quantization_config": {"bits": 4}}, set())):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        assert set(unused_libraries(config)) == hidden


def test_a_sampler_with_beta_sigmas_has_scipy(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(path=str(tmp_path)))
    (tmp_path / "scheduler").mkdir()
    for uses_beta, hidden in ((False, True), (True, False)):
        dumps = json.dumps({"_class_name": "EulerDiscreteScheduler", "use_beta_sigmas": uses_beta})
        (tmp_path / "scheduler" / "scheduler_config.json").write_text(dumps)
        assert ("scipy" in unused_libraries(config)) is hidden


def test_a_process_does_without_the_others(tiny_fill: Path, tmp_path: Path) -> None:
    """So it is for each family; anchors, as rows, follow from the schedule."""
    builds = [
        build(tmp_path / build.__name__)
        for build in (build_tiny_flux2, build_tiny_qwen_image, build_tiny_z_image)
    ]
    folders = [str(folder) for folder in (tiny_fill, *builds)]
    program = f"""
import sys
from maskserve_common.config import Config, ModelConfig
from maskserve_engine.families.registry import load_adapter, load_decoder
from maskserve_engine.stages.unused_libraries import hide_unused_libraries
configs = [Config(model=ModelConfig(path=path)) for path in {folders!r}]
assert "diffusers" not in sys.modules
hide_unused_libraries(configs[0], text=False)
for config in configs:
    load_decoder(config)
    load_adapter(config).anchors(64, 4, 1)
from diffusers import ControlNetModel, FluxControlNetModel
print(sorted(name for name in {sorted({*ALL, "transformers", "torch._dynamo"})}
             if sys.modules.get(name)))
import torch._dynamo  # whoever needs it has it
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[]\n"
    assert "torchao" not in result.stderr
    assert "bitsandbytes" not in result.stderr
