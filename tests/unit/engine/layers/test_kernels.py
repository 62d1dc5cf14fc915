"""Where kernels in the Triton language cannot be launched, plain operations do their work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from maskserve_engine.batch.stepping import Stepping
from maskserve_engine.layers import kernels


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """With all that is needed, until a test takes a part away."""
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_the_compiler_and_the_headers_are_all_it_needs(folder: Path) -> None:
    assert kernels.missing_for_launches(folder) is None


def test_what_is_missing_is_named(folder: Path) -> None:
    (folder / "Python.h").unlink()
    assert kernels.missing_for_launches(folder) == f"there is no {folder}/Python.h"
    (folder / "gcc").unlink()
    assert "no C compiler" in str(kernels.missing_for_launches(folder))
    assert "no C compiler" in str(kernels.missing_triton.__wrapped__())
    missing = kernels.missing_triton.__wrapped__("no_such_triton")
    assert missing == "the package no_such_triton is not installed"


def test_they_go_to_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton language launches on the current device, which is `cuda:0` unless said."""
    current = [0]

    def exchange(device: int) -> int:
        current.append(device)
        return current[-2]

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    stepping: Stepping[Any, Any] = Stepping(Any, None)  # type: ignore[arg-type]
    stepping.device = torch.device("cuda", 1)
    with stepping.session():
        assert current[-1] == 1
        assert torch.is_inference_mode_enabled()
    assert current[-1] == 0
