"""What a soak under attack says of a run, and that its attacks are what they are meant to be."""

from __future__ import annotations

from typing import Any

import pytest

from maskserve_harness.soaking import attacks
from maskserve_harness.soaking.hostile import Book, least_often, passed
from maskserve_router.edit_call import parse_request

FINE: dict[str, Any] = {
    "lost": 0,
    "wrong": 0,
    "p95_ratio": 1.4,
    "router_mib": 300,
    "page_mib": 200,
    "least_often": 3,
    "restarts": 0,
    "ejections": 0,
}


@pytest.mark.parametrize(
    "hurt",
    [
        {"lost": 1},
        {"wrong": 1},
        {"p95_ratio": 2.1},
        {"p95_ratio": 0.0},
        {"router_mib": 1025},
        {"router_mib": 0},
        {"page_mib": 1025},
        {"least_often": 0},
        {"restarts": 1},
        {"ejections": 2},
    ],
    ids=str,
)
def test_a_run_in_which_somebody_was_hurt_has_not_passed(hurt: dict[str, Any]) -> None:
    assert passed(FINE)
    assert not passed({**FINE, **hurt})


def test_a_book_tells_the_95th_percentile_of_what_was_right() -> None:
    book = Book()
    assert book.p95() == 0.0
    for taken in range(101):
        book.add(float(taken))
    book.add(lost="no answer")
    book.add(wrong="other pixels")
    assert book.p95() == pytest.approx(95.0)
    assert (len(book.lost), len(book.wrong)) == (1, 1)


def test_attacks_that_were_not_answered_have_not_attacked() -> None:
    """An attacker that got no processor time hurt nobody, and the soak passed."""
    assert least_often({"one": {"OK": 3, "429": 4}, "other": {"TimeoutError": 2, "400": 1}}) == 1
    assert least_often({"one": {"OK": 3}, "other": {"TimeoutError": 2}}) == 0
    assert least_often({}) == 0


def test_attacks_are_requests_that_reach_what_they_attack() -> None:
    """One that is refused for another reason would attack nothing."""
    assert parse_request(attacks.edit()).head.model_name == "edit"
    stream = attacks.edit("edit_stream", progress=True)
    assert parse_request(stream).head.model_name == "edit_stream"
    assert parse_request(attacks.operation("register", image="A")).head.model_name == "control"
    names = [attack.__name__ for attack in attacks.ATTACKS]
    assert len(set(names)) == len(names) > 0
