"""docs/papers.md is made of its table, and the table has every part of the papers."""

from __future__ import annotations

import re

import msgspec
import pytest

from maskserve_benchmarks.documents.papers import DOCUMENT, Paper, Part, document, papers

PAPERS = papers()
KINDS = {"figures": "Fig", "tables": "Table", "algorithms": "Algorithm"}


def test_the_page_is_that_of_the_table() -> None:
    """`python scripts/bench papers` writes it."""
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_the_papers_are_the_four_that_this_stands_on() -> None:
    assert [paper.name for paper in PAPERS] == ["FlashPS", "TetriServe", "Katz", "LegoDiffusion"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_each_figure_table_and_algorithm_is_in_the_table(paper: Paper, kind: str) -> None:
    numbers = {
        int(number)
        for part in paper.parts
        for number in re.findall(rf"\b{KINDS[kind]}\.? (\d+)", part.part)
    }
    assert numbers == set(range(1, getattr(paper, kind) + 1))


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_what_is_simulated_says_from_which_inputs(paper: Paper) -> None:
    simulated = [part for part in paper.parts if part.status == "simulated"]
    without = [
        part.part
        for part in simulated
        if not re.search(r"\bfrom\b|assumed|counted|as published|published shares", part.support)
    ]
    assert not without


@pytest.mark.parametrize(
    "changed",
    [
        {"status": "deviates"},
        {"decision": "decisions/adapters.md"},
        {"support": ""},
        {"status": "illustration"},
        {"status": "works"},
        {"note": "x"},
    ],
)
def test_a_part_that_is_not_whole_is_refused(changed: dict[str, str]) -> None:
    part = {"part": "Fig. 1", "content": "a thing", "status": "default", "support": "a setting"}
    assert msgspec.convert(part, Part).status == "default"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(part | changed, Part)
