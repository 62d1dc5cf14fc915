"""The plans in assets/workflows are those of their definitions, which are short."""

from pathlib import Path

from maskserve_workflows.folder import compile_folder, read_plans

FOLDER = Path(__file__).parents[2] / "assets" / "workflows"
SHIPPED = {"background", "detail", "outline", "replace", "scene", "variants"}
_MOST_LINES = 20


def test_the_plans_are_those_that_compile_writes() -> None:
    """`maskserve workflows compile assets/workflows` writes them."""
    plans = {plan.name: plan for plan in read_plans(FOLDER)}
    assert set(plans) == SHIPPED
    assert plans == {plan.name: plan for plan in compile_folder(FOLDER)}


def test_a_definition_is_short() -> None:
    for path in FOLDER.glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) <= _MOST_LINES, path.name
