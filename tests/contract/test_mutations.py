"""The table of mutations names lines and tests that are in the tree."""

from __future__ import annotations

import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.mutants import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_line_occurs_once_and_its_test_exists(mutation: Mutation) -> None:
    text = (CHECKOUT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.line) == 1
    assert "\n" not in mutation.line
    path, _, name = mutation.test.partition("[")[0].partition("::")
    assert f"def {name}(" in (CHECKOUT / path).read_text(encoding="utf-8")


def test_names_differ() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
