"""Prints a draw, for test_seed.py, which runs this file in processes of its own."""

from __future__ import annotations

from tests.support.draws import fresh_seed


def test_print_a_draw() -> None:
    print("drawn", fresh_seed())
