"""The ControlNet service's process: what it and its workers are told, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from maskserve_core.config import cores
from maskserve_serving.errors import ServeError
from maskserve_serving.files import WorkerFiles, checked
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import Ports, free_base_port
from maskserve_serving.service import ControlNetProcess
from maskserve_serving.spec import Spec


def spec(folder: Path, **asked: Any) -> Spec:
    options = ServeOptions(
        "m", base_port=free_base_port(), log_dir=folder, say=lambda line: None, **asked
    )
    files = WorkerFiles(folder / "memory" / "worker-0", folder / "disk" / "worker-0")
    return Spec(0, options, cast(Any, None), {}, files)


def test_workers_are_told_where_the_service_is(tmp_path: Path) -> None:
    own = spec(tmp_path, controlnets=str(tmp_path / "nets"), controlnet_device="cuda:1")
    controls = checked(own.with_controlnets({})).controls
    ports = Ports.of_controlnet(own.options.base_port)
    assert controls.service == f"127.0.0.1:{ports.grpc}"
    assert controls.folder == str(tmp_path / "nets")
    worker = Ports.of_worker(own.options.base_port, 0)
    assert not set(ports.all().values()) & set(worker.all().values())
    assert spec(tmp_path).with_controlnets({}) == {}


def test_cores_are_shared_with_the_service(tmp_path: Path) -> None:
    alone, shared = spec(tmp_path), spec(tmp_path, controlnet_device="cpu")
    assert alone.threads(checked({})) == cores()
    assert shared.threads(checked({})) == max(1, cores() // 2)
    assert shared.threads(checked({"model": {"torch_threads": 5}})) == 5


def test_a_service_without_controlnets_is_refused_before_anything_runs(tmp_path: Path) -> None:
    process = ControlNetProcess(spec(tmp_path, controlnet_device="cpu"))
    with pytest.raises(ServeError, match="--controlnets DIR"):
        process.start()
    assert process.pid is None
