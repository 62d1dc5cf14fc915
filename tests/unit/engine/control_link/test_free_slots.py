"""Where residuals that a row asks for lie, and which of them a step adds."""

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


def never(_: int) -> bool:
    return False


def test_a_step_adds_what_was_asked_for_it_or_by_the_step_before() -> None:
    """The tokens and scales are the same, and the answer has not failed."""
    reuse = Reuse([(1.0,), (1.0,), (1.0,), (0.5,), (0.5,), (0.0,)], fast=True)
    first = ask(1, 0, 0)
    reuse.keep(first)
    assert reuse.at(1, 8, never) is first  # the first step cannot extrapolate
    assert reuse.at(1, 4, never) is None
    assert reuse.at(1, 8, lambda number: number == 1) is None
    second = ask(2, 2, 1)
    reuse.keep(second)
    assert reuse.at(2, 8, never) is second
    assert reuse.numbers == {2}  # the first request is forgotten
    assert reuse.at(3, 8, never) is None  # another scale
    reuse.keep(ask(3, 5, 0))
    assert reuse.at(5, 8, never) is None  # no net acts
    assert Reuse([(1.0,)] * 3, fast=False).at(1, 8, never) is None


def test_residuals_are_asked_for_ahead_where_a_net_acts_and_none_lie_ready() -> None:
    reuse = Reuse([(1.0,), (1.0,), (0.0,), (1.0,)], fast=True)
    assert reuse.needs_extrapolated(0, 8)
    reuse.keep(ask(1, 1, 0))
    assert not reuse.needs_extrapolated(0, 8)
    assert reuse.needs_extrapolated(0, 4)  # other tokens
    assert [reuse.needs_extrapolated(step, 8) for step in (1, 2, 3)] == [False, True, False]
    assert not Reuse([(1.0,)] * 3, fast=False).needs_extrapolated(0, 8)
