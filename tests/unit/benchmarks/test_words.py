"""Names and docstrings that a reader has to guess at are found, with their lines."""

from __future__ import annotations

from pathlib import Path

from maskserve_benchmarks.documents.words import findings

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
