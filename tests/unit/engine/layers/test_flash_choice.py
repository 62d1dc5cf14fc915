"""Which FlashAttention torch is told to use on which GPU, and what the log says of it."""

from __future__ import annotations

import pytest
import torch

from maskserve_engine.layers import attention
from maskserve_engine.layers.attention import choose_flash, segments


@pytest.mark.parametrize(
    ("major", "installed", "chosen"),
    [
        (8, ("FA3", "FA4"), None),
        (9, (), None),
        (9, ("FA3",), "FA3"),
        (9, ("FA4",), "FA4"),
        (9, ("FA3", "FA4"), "FA3"),
        (10, ("FA3",), None),
        (10, ("FA3", "FA4"), "FA4"),
        (12, ("FA3", "FA4"), None),
    ],
)
def test_the_first_one_made_for_the_device_is_used(
    major: int, installed: tuple[str, ...], chosen: str | None
) -> None:
    active: list[str] = []

    def activate(name: str) -> None:
        if name not in installed:
            raise ModuleNotFoundError(f"No module named {name!r}")
        active.append(name)

    choice = choose_flash(major, activate)
    assert active == ([] if chosen is None else [chosen])
    assert choice.startswith(chosen or "torch's own")


def test_torch_knows_them_by_these_names() -> None:
    """Without the packages, that they are missing is all that goes wrong."""
    choice = choose_flash(9)
    assert "no FA3: No module named" in choice
    assert "no FA4: No module named" in choice


@pytest.mark.parametrize(
    ("queries", "heads", "cudnn", "together"),
    [
        ([480], 24, True, False),
        ([480], 24, False, True),
        ([480] * 8, 24, True, False),  # one call, of cuDNN
        ([480, 448], 24, True, False),  # one after the other
        ([224, 208], 24, True, True),  # too few to keep a device busy by themselves
        ([4608, 448], 24, False, True),
        ([4608, 4608], 24, False, False),  # all tokens: torch's own choice, whatever it is
    ],
)
def test_rows_that_fill_a_device_are_cudnns_where_that_is_sooner(
    queries: list[int],
    heads: int,
    cudnn: bool,
    together: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "missing_varlen", lambda *_: None)
    monkeypatch.setattr(attention, "cudnn_is_sooner", lambda _: cudnn)
    rows = segments(queries, [4608] * len(queries))
    query = torch.empty(sum(queries), heads, 128, device="meta")
    assert attention._together(query, rows, alike=len(set(queries)) == 1) is together
