"""Where residuals that are asked for may lie."""

from __future__ import annotations

from maskserve_engine.control_link.reuse import Reuse, SentRequest


def ask(number: int, step: int, slot: int) -> SentRequest:
    return SentRequest(number, step, 8, slot, extrapolated=True)


def test_no_slot_is_handed_out_that_a_step_still_reads() -> None:
    reuse = Reuse([(1.0,)] * 8, fast=True)
    adds, later = ask(1, 4, 0), ask(2, 5, 1)
    reuse.keep(adds)
    assert reuse.free_slot(5, adds) == 1  # the step that begins reads the other
    reuse.keep(later)
    assert reuse.free_slot(5, adds) == 1  # asked again: what it had is read by nobody
    assert reuse.free_slot(6, later) == 0


def test_no_slot_is_handed_out_that_a_later_step_will_read() -> None:
    reuse = Reuse([(1.0,)] * 8, fast=True)
    reuse.keep(ask(1, 5, 1))
    reuse.keep(ask(2, 4, 0))
    assert reuse.free_slot(4, None) == 0
