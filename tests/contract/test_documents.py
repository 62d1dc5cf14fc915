"""Documents that must follow the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from faults.table import client_table, worker_table
from measure_faults import missed_bars

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "engine/maskserve_core",
    "engine/maskserve_engine",
    "client/maskserve_client",
    "scripts",
)
TEXTS = sorted(
    p
    for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("assets/**/*.md")]
    if ".venv" not in p.parts
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_listed_once_and_none_that_is_gone(package: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split(f"### {package}\n")[1].split("\n### ")[0]
    listed = re.findall(r"^\| `([^`]+\.py)` \|", section, flags=re.MULTILINE)
    there = {
        str(p.relative_to(ROOT / package))
        for p in (ROOT / package).rglob("*.py")
        if p.name != "__init__.py" and "__pycache__" not in p.parts
    }
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize("text", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(text: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://", "#", "mailto:")):
            target = text.parent / link.split("#")[0]
            assert target.exists(), f"{text.name}: {link}"


def test_every_setting_is_in_the_readme() -> None:
    from maskserve_core.contracts.settings import setting_names

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in setting_names() if f"`{name}`" not in readme] == []


def test_the_tables_of_reliability_are_those_that_were_measured() -> None:
    """Printed by `scripts/measure_faults.py --show`."""
    report = json.loads((ROOT / "docs" / "benchmarks" / "faults.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert worker_table(report["worker_faults"]) in text
    assert client_table(report["client_faults"]) in text
    assert report["date"] in text
    assert missed_bars(report) == []
