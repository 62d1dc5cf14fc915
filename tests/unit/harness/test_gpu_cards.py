"""What is estimated of GPUs follows from what was counted."""

from __future__ import annotations

from argparse import Namespace

import pytest

from maskserve_harness.benchmarks.gpu_cards import CARDS, FORMS, Counted, offered, step_ms

GIVEN = Namespace(flops_reached=0.5, bytes_reached=0.7, launch_us=6.0)
BF16, FP8, INT8, NF4 = FORMS
H100, _, RTX_4090 = CARDS


def test_a_step_takes_its_flops_its_bytes_or_its_host() -> None:
    computes = Counted(1e14, 0.0, 1e9, 1e9, 0.0, 100)
    assert step_ms(H100, computes, BF16, "FA2", GIVEN) == pytest.approx(1e3 * 1e14 / 494.5e12)
    assert step_ms(H100, computes, FP8, "FA2", GIVEN) == pytest.approx(1e3 * 1e14 / 989.5e12)
    reads = Counted(1e9, 0.0, 18e9, 5e9, 4e9, 100)
    bandwidth = 0.7 * 3.35e12
    assert step_ms(H100, reads, BF16, "FA2", GIVEN) == pytest.approx(1e3 * 27e9 / bandwidth)
    unpacks = 27e9 + 9e9 * 3
    assert step_ms(H100, reads, INT8, "FA2", GIVEN) == pytest.approx(1e3 * unpacks / bandwidth)
    waits = reads._replace(launches=10**5)
    assert step_ms(H100, waits, BF16, "FA2", GIVEN) == pytest.approx(600.0)
    attends = Counted(0.0, 1e14, 0.0, 0.0, 0.0, 0)
    assert step_ms(H100, attends, BF16, "FA3", GIVEN) < step_ms(H100, attends, BF16, "FA2", GIVEN)


def test_a_card_is_offered_what_it_holds() -> None:
    assert {each.form for each in offered(RTX_4090) if each.model == "FLUX.1"} == {FP8, INT8, NF4}
    assert {each.attention for each in offered(RTX_4090)} == {"FA2"}
    assert {(e.form, e.attention) for e in offered(H100) if e.model == "FLUX.1"} == {
        (form, kernel) for form in FORMS for kernel in ("FA2", "FA3")
    }
