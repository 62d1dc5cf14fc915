"""A soak before it has a worker, and visitors that cannot visit."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.soak.ledger import Ledger
from maskserve_benchmarks.soak.load import Load
from maskserve_benchmarks.soak.run import SoakOptions, soak, template_bytes, write_config
from maskserve_common.config_file import config_of
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.stages.loader import dtype_of
from maskserve_serving.errors import ServeError

DEMO = DEMO_MODEL


def test_it_can_be_stopped_while_its_worker_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "tritonserver"
    server.write_text("#!/bin/sh\nexec sleep 60\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    stop = threading.Event()
    options = SoakOptions(DEMO, minutes=1.0, out=tmp_path / "out", say=lambda line: None)
    soaking = threading.Timer(1.0, stop.set)
    soaking.start()
    with pytest.raises(ServeError, match="stopped before its worker was ready"):
        soak(options, stop)
    soaking.join()


def test_the_model_is_that_of_the_configured_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = []

    def fetch(model: str, revision: str | None, **_: object) -> str:
        downloads.append((model, revision))
        return str(DEMO)

    config = tmp_path / "maskserve.toml"
    config.write_text('[model]\nrevision = "v2"\n')
    write_config(SoakOptions(Path("owner/name"), minutes=1.0, out=tmp_path, config=config), fetch)
    assert downloads == [("owner/name", "v2")]


def test_the_cache_is_sized_for_the_dtype_that_the_engine_takes() -> None:
    def bytes_of(**model: Any) -> int:
        tables = {"model": {"path": str(DEMO), **model}, "cache": {"entry_format": "model"}}
        return template_bytes(config_of(tables))

    assert bytes_of(device="cpu") == bytes_of(dtype="float32") == 2 * bytes_of(dtype="bfloat16")

    on_gpu = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    assert dtype_of(config_of({"model": {"path": str(DEMO)}}), on_gpu) == torch.bfloat16


@pytest.mark.parametrize("stride", [1, 6, 7, 1000])
def test_the_cache_is_sized_for_the_anchors_that_the_engine_takes(stride: int) -> None:
    config = config_of({"model": {"path": str(DEMO)}, "cache": {"stride": stride}})
    adapter = load_adapter(config)
    tokens = (adapter.spec.native_resolution // adapter.spec.token_pixels) ** 2
    anchors = adapter.anchors(tokens, config.model.num_inference_steps, stride)
    single_anchor_config = config_of({"model": {"path": str(DEMO)}, "cache": {"stride": 1000}})
    assert template_bytes(config) == len(anchors) * template_bytes(single_anchor_config)


class Guest:
    """A client that cannot connect."""

    rng = random.Random(0)

    def open(self) -> None:
        raise OSError("no more sockets")

    def close(self) -> None:
        raise AssertionError("it never came")


def test_a_visitor_that_cannot_come_is_complained_of() -> None:
    ledger = Ledger()
    load = Load([Guest(), Guest()], {lambda _: "done": 1}, ledger)
    load.start()
    load.stop(10.0)
    why = "the visitor broke: OSError('no more sockets')"
    assert sorted(ledger.problems()) == [f"visitor-0: {why}", f"visitor-1: {why}"]
