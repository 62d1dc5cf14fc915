"""Each study is a folder whose README.md says in few words what it showed, and its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maskserve_benchmarks.bench import COMMANDS, module_of

STUDIES = Path(__file__).resolve().parents[2] / "studies" / "maskserve_studies"
FOLDERS = sorted(path.parent for path in STUDIES.glob("*/__init__.py"))
MAX_WORDS = 150


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_study_says_in_few_words_what_it_showed(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= MAX_WORDS
    named = set(re.findall(r"scripts/bench ([a-z_]+)", text))
    assert named
    prefix = f"maskserve_studies.{folder.name}."
    assert {name for name in COMMANDS if module_of(name).startswith(prefix)} <= named
    assert "ardware and date" in text


def test_studies_lie_in_folders_that_one_page_lists() -> None:
    assert FOLDERS
    page = (STUDIES.parent / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\(maskserve_studies/(\w+)/README.md\)", page)
    assert listed == [folder.name for folder in FOLDERS]
    assert [path.name for path in STUDIES.glob("*.py")] == ["__init__.py"]
