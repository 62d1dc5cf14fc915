"""The index resolves all requirements together, and each alone only where that fails."""

from __future__ import annotations

from pathlib import Path

from maskserve_benchmarks.documents.install_check import PYTHONS, conflicts

ASKED = {"plain": ["a"], "extra": ["a", "b"], "other": ["a", "c"]}


class Index:
    """Says of which requirements no versions fit together."""

    def __init__(self, *unfit: set[str], python: str = "") -> None:
        self.unfit, self.python = unfit, python
        self.resolved: list[list[str]] = []

    def __call__(self, requirements: list[str], constraints: Path, python: str) -> str:
        self.resolved.append(requirements)
        bad = [
            requirement_set
            for requirement_set in self.unfit
            if requirement_set <= set(requirements)
        ]
        return f"{sorted(bad[0])} do not fit" if bad and python.startswith(self.python) else ""


def test_what_fits_together_is_asked_for_once_per_python() -> None:
    index = Index()
    assert conflicts(ASKED, Path(), index) == []
    assert index.resolved == [["a", "b", "c"]] * len(PYTHONS)


def test_extras_that_fit_only_apart_are_no_conflict() -> None:
    index = Index({"b", "c"})
    assert conflicts(ASKED, Path(), index) == []
    assert len(index.resolved) == len(PYTHONS) * (1 + len(ASKED))


def test_what_does_not_fit_is_named_with_its_python() -> None:
    index = Index({"a", "b"}, python=PYTHONS[0])
    assert conflicts(ASKED, Path(), index) == [
        f"extra cannot be installed on Python {PYTHONS[0]}:\n['a', 'b'] do not fit"
    ]
