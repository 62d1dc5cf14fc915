"""A folder of workflows: definitions in Python, and the plans compiled from them."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from maskserve_workflows.definition import Workflow
from maskserve_workflows.passes import compiled
from maskserve_workflows.plan import WorkflowPlan, parse_plan
from maskserve_workflows.ports import WorkflowError


def compile_folder(folder: Path, passes: Collection[str] | None = None) -> list[WorkflowPlan]:
    """Run the definitions in a folder's .py files, and return their plans, by file and position.

    Args:
        folder: folder of the definitions.
        passes: compiler passes; None: all.

    Raises:
        WorkflowError: a definition cannot run, or two have the same name.
    """
    plans: dict[str, WorkflowPlan] = {}
    for path in _files(folder, ".py"):
        for flow in _definitions(path):
            if flow.name in plans:
                raise WorkflowError(f"{path}: {flow.name} is defined twice; accepted: once")
            plans[flow.name] = compiled(flow.plan, passes)
    if not plans:
        raise WorkflowError(f"{folder}: holds no definitions; accepted: .py files with workflows")
    return list(plans.values())


def read_plans(folder: Path, report: Callable[[str], None] | None = None) -> list[WorkflowPlan]:
    """Return the .json plans in a folder, by name. No Python of the folder runs.

    Args:
        folder: folder of the plans.
        report: receives the error of each plan that cannot be read; None: the first one is raised.

    Raises:
        WorkflowError: naming the file.
    """
    plans = []
    for path in _files(folder, ".json"):
        try:
            plans.append(_plan(path))
        except WorkflowError as error:
            if report is None:
                raise
            report(str(error))
    return plans


def _plan(path: Path) -> WorkflowPlan:
    try:
        plan = parse_plan(path.read_bytes())
    except WorkflowError as error:
        raise WorkflowError(f"{path}: {error}") from None
    if plan.name != path.stem:
        raise WorkflowError(f"{path}: holds {plan.name}; accepted: {plan.name}.json")
    return plan


def _files(folder: Path, suffix: str) -> list[Path]:
    if not folder.is_dir():
        raise WorkflowError(f"{folder}: is not a folder; accepted: a folder with workflows")
    return sorted(folder.glob(f"*{suffix}"))


def _definitions(path: Path) -> Iterator[Workflow]:
    try:
        namespace = runpy.run_path(str(path))
    except WorkflowError as error:
        raise WorkflowError(f"{path}: {error}") from None
    except Exception as error:
        raise WorkflowError(f"{path}: {type(error).__name__}: {error}") from error
    for value in namespace.values():
        if isinstance(value, Workflow):
            yield value
