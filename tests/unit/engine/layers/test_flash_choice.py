"""Which FlashAttention torch is told to use on which GPU, and what the log says of it."""

from __future__ import annotations

import pytest

from maskserve_engine.layers.attention import choose_flash


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

    told = choose_flash(major, activate)
    assert active == ([] if chosen is None else [chosen])
    assert told.startswith(chosen or "torch's own")


def test_torch_knows_them_by_these_names() -> None:
    """Without the packages, that they are missing is all that goes wrong."""
    told = choose_flash(9)
    assert "no FA3: No module named" in told
    assert "no FA4: No module named" in told
