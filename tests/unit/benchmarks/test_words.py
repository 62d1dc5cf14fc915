"""Names and docstrings that a reader has to guess at are found, with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskserve_benchmarks.documents import words
from maskserve_benchmarks.documents.words import findings, main

RIDDLES = '''"""Of the batch."""


def told(own, rows):
    """Return the rows.

    Args:
        rows: as of `batch`.
    """
    for each in rows:
        rows.held = each
'''
PLAIN = '''"""Rows of a batch."""


def longest(rows):
    """Return the row with most tokens.

    Args:
        rows: rows of one batch.
    """
    return max(rows, key=lambda row: row.tokens)
'''


def test_riddles_are_found(tmp_path: Path) -> None:
    path = tmp_path / "riddles.py"
    path.write_text(RIDDLES, encoding="utf-8")
    assert sorted(findings(path)) == [
        (1, "a docstring opens with 'Of'"),
        (4, "the name `own` does not say what it holds"),
        (4, "the name `told` does not say what it holds"),
        (8, "an argument points elsewhere: rows: as of `batch`."),
        (10, "the name `each` does not say what it holds"),
        (11, "the name `held` does not say what it holds"),
    ]


def test_plain_words_pass(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN, encoding="utf-8")
    assert list(findings(path)) == []


def test_the_command_fails_on_a_riddle_in_any_folder_that_lint_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(words, "CHECKOUT", tmp_path)
    for name in words.FOLDERS:
        folder = tmp_path / name / "package"
        folder.mkdir(parents=True)
        (folder / "plain.py").write_text(PLAIN, encoding="utf-8")
    assert main([]) == 0
    assert capsys.readouterr().out == ""
    for name in words.FOLDERS:
        path = tmp_path / name / "package" / "riddles.py"
        path.write_text("told = 1\n", encoding="utf-8")
        assert main([]) == 1
        assert capsys.readouterr().out.startswith(f"{name}/package/riddles.py:1: the name `told`")
        path.unlink()


def test_lint_checks_all_code() -> None:
    assert {"engine", "router", "client", "serving"} < set(words.FOLDERS)
    assert {"benchmarks", "studies", "scripts", "tests"} < set(words.FOLDERS)
