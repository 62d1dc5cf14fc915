"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def inference() -> Iterator[None]:
    """Run a test as the engine runs: without gradients."""
    import torch

    with torch.inference_mode():
        yield
