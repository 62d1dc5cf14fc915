"""Verdicts on mutations: killed, survived or broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from maskserve_benchmarks import mutants
from maskserve_benchmarks.mutants import MUTATIONS, Mutation

ADDS = Mutation(
    "adds", "engine/added.py", "return a + b", "return a - b", "tests/test_added.py::test_it"
)


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the tests
    folder = tmp_path_factory.mktemp("checkout")
    for name in mutants._COPIED:
        (folder / name).mkdir()
    (folder / "pyproject.toml").write_text("")
    (folder / "engine/added.py").write_text("def add(a, b):\n    return a + b\n")
    test = "import sys\nsys.path.insert(0, 'engine')\nfrom added import add\n\n"
    (folder / "tests/test_added.py").write_text(
        test + "def test_it():\n    assert add(2, 1) == 3\n"
    )
    weak = "import sys\nsys.path.insert(0, 'engine')\nimport added\n\ndef test_it():\n    pass\n"
    (folder / "tests/test_weak.py").write_text(weak)
    return folder


def test_what_becomes_of_a_mutation(tree: Path) -> None:
    weak = replace(ADDS, name="weak", test="tests/test_weak.py::test_it")
    missing_line = replace(ADDS, name="gone", line="return a * b")
    unread = replace(ADDS, name="unread", wrong="return (")
    assert mutants.run([ADDS, weak, missing_line, unread], tree) == {
        "adds": "killed",
        "weak": "survived",
        "gone": "broken",
        "unread": "broken",
    }
    assert "a + b" in (tree / "engine/added.py").read_text()  # the tree is as it was


def test_a_test_that_fails_by_itself_kills_nothing(tree: Path) -> None:
    (tree / "tests/test_added.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(RuntimeError, match="do not pass as they are"):
        mutants.run([ADDS], tree)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_mutation_is_killed() -> None:
    verdicts = mutants.run(MUTATIONS)
    assert {name: verdict for name, verdict in verdicts.items() if verdict != "killed"} == {}
