"""Where kernels in the Triton language cannot be launched, plain operations do their work."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maskserve_engine.batch.stepping import Stepping
from maskserve_engine.layers import kernels


@pytest.fixture
def reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], str | None]:
    """With all that is needed, until a test takes a part away."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(shutil, "which", {"gcc": "/usr/bin/gcc"}.get)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return kernels.missing_triton.__wrapped__


def test_the_package_the_compiler_and_the_headers_are_all_it_needs(
    reason: Callable[[], str | None],
) -> None:
    assert reason() is None


def test_what_is_missing_is_named(
    reason: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").unlink()
    assert reason() == f"there is no {tmp_path}/Python.h"
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "no C compiler" in str(reason())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert reason() == "the package triton is not installed"


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
