"""Documents that must follow the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maskserve_benchmarks.documents.module_index import code_lines, modules, packages
from maskserve_benchmarks.steps.bytes_table import table, unet_table
from maskserve_common.contracts.operations import OPERATIONS
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import CODES
from maskserve_router.api.openai.form import Fields
from maskserve_studies.workflow_plans.tables import gains_table, rates_table

ROOT = Path(__file__).resolve().parents[2]
TEXTS = sorted(
    p
    for folder in ("*.md", "docs/**/*.md", "assets/**/*.md", "studies/**/*.md")
    for p in ROOT.glob(folder)
    if ".venv" not in p.parts
)


@pytest.mark.parametrize("package", packages(), ids=lambda p: p.name)
def test_every_module_says_what_it_is(package: Path) -> None:
    """`scripts/bench module_index` prints it."""
    assert [name for name, says in modules(package).items() if not says] == []


def test_lines_of_code_are_those_that_do_something() -> None:
    text = '"""What it is."""\n\n# why\na = [\n    1,  # one\n]\nb = """of\ntwo"""\n"""Of b."""\n'
    assert code_lines(text) == 5


@pytest.mark.parametrize("folder", ["engine", "router", "serving", "client"])
def test_what_one_version_of_triton_needs_is_marked(folder: str) -> None:
    """CONTRIBUTING.md says how the marks are used."""
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("2.51") == text.count("TRITON-2.51: "), path


@pytest.mark.parametrize("text", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(text: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://", "#", "mailto:")):
            target = text.parent / link.split("#")[0]
            assert target.exists(), f"{text.name}: {link}"


DECISIONS = sorted(ROOT.glob("docs/adr/**/0*.md"))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda p: p.name)
def test_each_decision_says_whether_it_is_in_force(page: Path) -> None:
    """docs/adr/README.md says what each status means; superseded ones lie in the archive."""
    title, _, status, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith(f"# {page.name[:4]} ")
    word = re.match(r"\*\*Status\.\*\* (living|record|superseded by \[\d{4}\]\(.*\))", status)
    assert word is not None, status
    assert word[1].startswith("superseded") == (page.parent.name == "archive")


FOLDERS = (
    "assets|benchmarks|client|docs|engine|ensemble|model_repository|router|scripts|serving|studies"
    "|tests"
)
OUTPUT = "(?<!--json )"
FILE = re.compile(
    rf"(?<![\w/.-]){OUTPUT}(?:{FOLDERS})/[\w./-]+\.(?:json|md|npz|pbtxt|png|py|toml|yaml)\b"
)


@pytest.mark.parametrize("text", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_documents_name_are_there(text: Path) -> None:
    """By their path from the root, or from the document."""
    named = set(FILE.findall(text.read_text(encoding="utf-8")))
    places = ROOT, text.parent
    there = {name for name in named if any((place / name).exists() for place in places)}
    assert sorted(named - there) == []


def test_the_table_of_bytes_is_what_the_engine_takes() -> None:
    """Printed by `scripts/bench bytes_table`."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert table(1024, 28, (1, 2, 4, 7, 14, 28)) in text
    assert unet_table(28) in text


def test_the_tables_of_simulated_workflows_are_those_of_the_run() -> None:
    """Printed by `scripts/bench simulate_cluster --workflows`."""
    text = (ROOT / "docs" / "decisions" / "simulator.md").read_text(encoding="utf-8")
    report = json.loads((ROOT / "docs" / "benchmarks" / "workflows-simulated.json").read_text())
    assert rates_table(report) in text
    assert gains_table(report) in text


def test_the_tables_of_keys_and_settings_are_those_of_the_code() -> None:
    """Written by `python scripts/bench config_reference`."""
    command = [sys.executable, "scripts/bench", "config_reference", "--check"]
    subprocess.run(command, cwd=ROOT, check=True)


def test_the_page_of_the_apis_names_every_setting_and_field() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = {*EditSettings.__struct_fields__, *Fields.__struct_fields__, *OPERATIONS, *CODES}
    shown = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", text))))
    assert sorted(names - shown) == []


@pytest.mark.parametrize(
    "script", sorted(filter(Path.is_file, (ROOT / "scripts").iterdir())), ids=lambda p: p.name
)
def test_scripts_are_entry_points_of_a_screen(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 50
    assert script.stat().st_mode & 0o111, "it is started by its name"


def test_nothing_says_to_install_what_no_index_has() -> None:
    """There is no maskserve but in a checkout."""
    folders = ("client", "clients", "engine", "router", "serving", "docs")
    files = [ROOT / "README.md", *(f for name in folders for f in (ROOT / name).rglob("*"))]
    by_name = re.compile(r"pip install [\"']?maskserve")
    texts = {f: f.read_text("utf-8") for f in files if f.suffix in (".py", ".md", ".toml")}
    assert [file for file, text in texts.items() if by_name.search(text)] == []
