"""Messages between the engine's process and a rank's come out as they went in."""

from __future__ import annotations

import pickle

import pytest
import torch

from maskserve_engine.gangs.messages import pack


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5)])
def test_tensors_come_out_as_they_went_in(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    [copy] = pickle.loads(pack((sent,)))
    assert (copy.dtype, copy.shape) == (sent.dtype, sent.shape)
    assert torch.equal(copy.to(torch.complex64), sent.to(torch.complex64))
    copy.zero_()  # it is the receiver's own


def test_of_a_view_what_it_shows_is_sent() -> None:
    whole = torch.zeros(1000, 100)
    assert len(pack({"view": whole[3:5]})) < 2000
