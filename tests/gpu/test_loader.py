"""Entries on their way from host memory to the device: every byte arrives, over CUDA's link too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maskserve_core.config import ENTRY_FORMATS
from maskserve_engine.cache.entries import encode
from maskserve_engine.cache.loader import CudaMover, HostMover, Mover


@pytest.mark.parametrize("format", ENTRY_FORMATS)
@pytest.mark.parametrize("tokens", [None, 700])
def test_what_arrives_is_what_was_sent(
    device: torch.device, format: str, tokens: int | None
) -> None:
    """Through buffers that hold a part of it, so that the ring goes round."""
    mover: Mover = CudaMover(device, 2**16) if device.type == "cuda" else HostMover()
    sent = [encode(torch.randn(1000, 96).bfloat16(), format) for _ in range(4)]
    rng = np.random.default_rng(0)
    ids = None if tokens is None else np.sort(rng.permutation(1000)[:tokens])
    arrived = [mover.move((coded,), ids) for coded in sent]
    for coded, arrival in zip(sent, arrived, strict=True):
        (there,) = arrival.get()
        wanted = coded if ids is None else coded.take(torch.from_numpy(ids))
        for one, other in zip(there.tensors(), wanted.tensors(), strict=True):
            assert one.device.type == device.type
            assert torch.equal(one.cpu(), other)
    assert all(arrival.ready() for arrival in arrived)
