"""Headers of LoRA files, read in the test's own process. A separate process takes a second to
start.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest

from maskserve_lora import catalogue
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.header_process import Bounds, HeaderDescription, describe_header


class HeadersHere:
    """`HeaderProcess` without a process."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    @cached_property
    def _base(self) -> BaseLayers:
        return BaseLayers.of_folder(self._bounds.model, self._bounds.gguf)

    def describe(self, head: bytes, nbytes: int, config: bytes) -> HeaderDescription:
        return describe_header(head, nbytes, config, self._bounds, self._base)

    def close(self) -> None:
        """Close nothing: there is no process."""


@pytest.fixture(autouse=True)
def headers_here(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(catalogue, "HeaderProcess", HeadersHere)
