"""The folders of tests/unit are named like rooms of the product, of benchmarks or of studies."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "unit"


def room_of(folder: Path) -> Path:
    """Where the code lies that the tests of a folder are of."""
    package, *rooms = folder.relative_to(UNIT).parts
    [package_folder] = ROOT.glob(f"*/maskserve_{package}")
    return package_folder.joinpath(*rooms)


def test_each_folder_of_unit_tests_is_named_like_a_room() -> None:
    folders = {path.parent for path in UNIT.rglob("test_*.py")}
    assert folders
    assert UNIT not in folders, "a test lies in the room that it is of"
    assert [folder for folder in sorted(folders) if not room_of(folder).is_dir()] == []
