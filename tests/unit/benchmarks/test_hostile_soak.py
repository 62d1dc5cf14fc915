"""The verdict of a soak under attack, and the attacks themselves."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from maskserve_benchmarks.soak import attacks
from maskserve_benchmarks.soak.hostile import (
    MISSED,
    NOT_JUDGED,
    Book,
    CpuTime,
    internal_errors,
    least_often,
    passed,
    verdict,
)
from maskserve_router.messages.edit_call import parse_request

FINE: dict[str, Any] = {
    "lost": 0,
    "wrong": 0,
    "p95_ratio": 1.4,
    "router_mib": 300,
    "page_mib": 200,
    "least_often": 3,
    "restarts": 0,
    "ejections": 0,
    "internal_errors": 0,
    "attackers_cpu_share": 0.2,
    "others_cpu_share": 0.01,
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
        {"internal_errors": 1},
        {"others_cpu_share": 0.5},
    ],
    ids=str,
)
def test_a_run_in_which_somebody_was_hurt_has_not_passed(hurt: dict[str, Any]) -> None:
    assert passed(FINE)
    assert not passed({**FINE, **hurt})


@pytest.mark.parametrize(
    ("changed", "judgement"),
    [
        ({}, NOT_JUDGED),
        ({"p95_ratio": 9.0}, NOT_JUDGED),
        ({"least_often": 0}, NOT_JUDGED),
        ({"lost": 1}, NOT_JUDGED),
        ({"restarts": 1}, NOT_JUDGED),
        ({"wrong": 1}, MISSED),
        ({"internal_errors": 1}, MISSED),
        ({"router_mib": 1025}, MISSED),
    ],
    ids=str,
)
def test_a_busy_machine_judges_what_is_so_on_any_machine(
    changed: dict[str, Any], judgement: str
) -> None:
    assert verdict({**FINE, "others_cpu_share": 0.5, **changed}) == judgement


def test_processor_time_is_told_apart() -> None:
    cpu = CpuTime({"me": os.getpid()})
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    cpu.book("busy")
    assert cpu.seconds["busy"]["me"] >= 0.2
    assert 0 < cpu.share("busy", "me") <= 1
    assert 0 <= cpu.others_share["busy"] <= 1


def test_internal_errors_are_lines_with_a_trace(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    assert internal_errors(log) == 0
    log.write_text('{"message": "a"}\n{"message": "b", "exc": "IndexError"}\nTraceback (most\n')
    assert internal_errors(log) == 2


def test_a_book_tells_the_95th_percentile_of_what_was_right() -> None:
    book = Book()
    assert book.p95() == 0.0
    for seconds in range(101):
        book.add(float(seconds))
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
