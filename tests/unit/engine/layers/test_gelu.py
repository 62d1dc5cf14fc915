import pytest
import torch
import torch.nn.functional as F

from maskserve_engine.layers.linear import gelu
from tests.support.draws import fresh_rng


def values(dtype: torch.dtype) -> torch.Tensor:
    """[64, 96] of every size that activations have, and some that they have not."""
    rng = fresh_rng()
    drawn = rng.standard_normal((64, 96)) * 10.0 ** rng.uniform(-3, 2, (64, 96))
    drawn[0, :4] = 0.0, -0.0, 6e4, -6e4
    return torch.from_numpy(drawn).to(dtype)


def test_it_is_gelu_by_the_tanh_formula() -> None:
    x = values(torch.float32)
    expected = F.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(gelu(x), expected, atol=1e-5, rtol=1e-6)
    huge = torch.tensor([1e30, -1e30])
    torch.testing.assert_close(gelu(huge), F.gelu(huge, approximate="tanh"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_torch_s_own(dtype: torch.dtype) -> None:
    x = values(dtype)
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_writes_in_place_of_a_part_of_wider_rows(dtype: torch.dtype) -> None:
    x = values(dtype)
    expected, copy = gelu(x[:, 32:].clone()), x[:, :32].clone()
    part = x[:, 32:]
    gelu(part, out=part)
    torch.testing.assert_close(x, torch.cat((copy, expected), 1), rtol=0, atol=0)
