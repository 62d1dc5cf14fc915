"""docs/operate.md quotes what the programs say, and names settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
SOURCES = [
    path
    for folder in ("engine", "router", "client", "serving")
    for path in (ROOT / folder).rglob("*.py")
]
# Adjacent pieces of one string are joined, and what is put in between braces is left out.
SAID = "\n".join(
    re.sub(r"\{[^{}]*\}", "…", re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")))
    for path in SOURCES
)


def quoted() -> list[str]:
    table = PAGE.split("| it says |")[1].split("\n\n")[0]
    return [row.split("|")[1].split("`")[1] for row in table.splitlines()[2:]]


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_that_is_said(message: str) -> None:
    pieces = [piece.strip() for piece in message.split("…") if piece.strip()]
    assert pieces
    for piece in pieces:
        assert piece in SAID, piece


def test_settings_are_those_of_the_configuration() -> None:
    documentation = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    named = re.findall(r"`\[(\w+)\] (\w+)`", PAGE)
    assert len(named) > 5
    for table, key in named:
        assert f"[{table}]" in documentation, table
        assert f"`{key}`" in documentation or f"{key} =" in documentation, key
