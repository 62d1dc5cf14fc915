"""Documents that must follow the code."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from maskserve_benchmarks import bench
from maskserve_benchmarks.documents.module_index import code_lines, modules, packages
from maskserve_common.contracts.operations import OPERATIONS
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import CODES
from maskserve_router.api.openai.form import Fields
from maskserve_studies.deadlines.tetriserve import tables as tetriserve_tables
from maskserve_studies.model_counts.entry_bytes import table
from maskserve_studies.workflow_plans.inputs import tables as input_tables
from maskserve_studies.workflow_plans.tables import gains_table, rates_table

ROOT = Path(__file__).resolve().parents[2]
TEXTS = sorted(
    p
    for folder in ("*.md", "docs/**/*.md", "assets/**/*.md", "studies/**/*.md", "*/README.md")
    for p in ROOT.glob(folder)
    if ".venv" not in p.parts
)


@pytest.mark.parametrize("package", packages(), ids=lambda p: p.name)
def test_every_module_says_what_it_is(package: Path) -> None:
    """`scripts/bench module_index` prints it."""
    assert [name for name, docstring in modules(package).items() if not docstring] == []


def test_lines_of_code_are_those_that_do_something() -> None:
    text = '"""What it is."""\n\n# why\na = [\n    1,  # one\n]\nb = """of\ntwo"""\n"""Of b."""\n'
    assert code_lines(text) == 5


@pytest.mark.parametrize("folder", ["engine", "router", "serving", "client"])
def test_what_one_version_of_triton_needs_is_marked(folder: str) -> None:
    """CONTRIBUTING.md says how the marks are used."""
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("2.51") == text.count("TRITON-2.51: "), path


@cache
def anchors(page: Path) -> set[str]:
    """The names by which GitHub links to a page's headings; equal ones are numbered."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    names: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "", heading).strip().lower()
        names.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    numbered = {f"{name}-{k}" for name in names for k in range(1, names.count(name))}
    return {*names, *numbered}


def broken_links(page: Path) -> list[str]:
    """Links of a page to files that are not there, or to headings that their page has not."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            broken.append(link)
    return broken


def test_links_between_documents_lead_somewhere() -> None:
    broken = {path: links for path in TEXTS if (links := broken_links(path))}
    assert broken == {}


def test_a_link_to_a_heading_that_is_not_there_is_found(tmp_path: Path) -> None:
    other = "# LoRAs: `a`, b\n```\n# no heading\n```\n## Same\n## Same\n"
    (tmp_path / "other.md").write_text(other)
    page = tmp_path / "page.md"
    links = "#here other.md#loras-a-b other.md#same-1 #there other.md#no-heading none.md"
    page.write_text("# Here\n" + "".join(f"[x]({link})\n" for link in links.split()))
    assert broken_links(page) == ["#there", "other.md#no-heading", "none.md"]


PLACES = ("benchmarks", "client", "clients", "deploy", "engine", "router", "serving", "studies")
LINKED = re.compile(r"docs/([\w/-]+\.md)#([\w-]+)")


@pytest.mark.parametrize("folder", PLACES)
def test_headings_that_code_names_are_there(folder: str) -> None:
    suffixes = (".py", ".toml", ".yaml", ".yml")
    files = [f for f in (ROOT / folder).rglob("*") if f.suffix in suffixes]
    named = {m for f in files for m in LINKED.findall(f.read_text(encoding="utf-8"))}
    assert [m for m in named if m[1] not in anchors(ROOT / "docs" / m[0])] == []


DECISIONS = sorted(ROOT.glob("docs/adr/0*.md"))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda p: p.name)
def test_each_decision_says_whether_it_is_in_force(page: Path) -> None:
    """docs/adr/README.md says what each status means."""
    title, _, status, *_ = page.read_text(encoding="utf-8").splitlines()
    assert title.startswith(f"# {page.name[:4]} ")
    assert re.match(r"\*\*Status\.\*\* (living|record)\b", status), status


def test_decisions_that_code_cites_by_number_are_there() -> None:
    cited = {
        number
        for folder in (*PLACES, "tests")
        for file in (ROOT / folder).rglob("*.py")
        for number in re.findall(r"(?:adr/|ADR )(0\d{3})", file.read_text(encoding="utf-8"))
    }
    assert cited
    assert cited - {page.name[:4] for page in DECISIONS} == set()


FOLDERS = (
    "assets|benchmarks|client|docs|engine|ensemble|model_repository|router|scripts|serving|studies"
    "|tests"
)
OUTPUT = "(?<!--json )"
FILE = re.compile(
    rf"(?<![\w/.-]){OUTPUT}(?:{FOLDERS})/[\w./-]+\.(?:json|md|npz|pbtxt|png|py|toml|yaml)\b"
)


def test_files_that_documents_name_are_there() -> None:
    """By their path from the root, or from the document."""
    missing = [
        (str(path), name)
        for path in TEXTS
        for name in sorted(set(FILE.findall(path.read_text(encoding="utf-8"))))
        if not any((place / name).exists() for place in (ROOT, path.parent))
    ]
    assert missing == []


def test_the_table_of_bytes_is_what_the_engine_takes() -> None:
    """Printed by `scripts/bench bytes_table`."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert table() in text


RUNS = {
    "tetriserve.md": [("tetriserve.json", tetriserve_tables)],
    "workflow-inputs.md": [
        ("workflow-inputs.json", input_tables),
        ("workflows-simulated.json", lambda report: [rates_table(report), gains_table(report)]),
    ],
}
"""Pages of simulated results, with the files and tables that `scripts/bench simulate_cluster` makes
of them (`--tetriserve`, `--workflow-inputs`, `--workflows`).
"""


@pytest.mark.parametrize("page", RUNS)
def test_tables_of_simulated_results_are_those_of_the_run(page: str) -> None:
    folder = ROOT / "docs" / "benchmarks"
    text = (folder / page).read_text(encoding="utf-8")
    printed = {
        table.strip()
        for file, tables in RUNS[page]
        for table in tables(json.loads((folder / file).read_text(encoding="utf-8")))
    }
    page_tables = [match.strip() for match in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert page_tables
    assert [table for table in page_tables if table not in printed] == []


@pytest.mark.parametrize("command", ["config_reference", "openapi"])
def test_the_tables_of_keys_and_settings_are_those_of_the_code(command: str) -> None:
    """Written by `python scripts/bench`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench", command, "--check"])
        assert bench.main() == 0


def test_the_page_of_the_apis_names_every_field_operation_and_code() -> None:
    """The settings of an edit are listed by docs/configuration.md, which is generated."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    fields = {*Fields.__struct_fields__} - {*EditSettings.__struct_fields__}
    page_words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", text))))
    assert sorted({*fields, *OPERATIONS, *CODES} - page_words) == []


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
