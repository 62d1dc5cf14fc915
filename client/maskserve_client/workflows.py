"""`maskserve workflows`: definitions to plans, on this machine and without a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from maskserve_core.errors import InvalidRequest
from maskserve_core.workflows.explained import explained
from maskserve_core.workflows.folder import compile_folder, read_plans
from maskserve_core.workflows.node_types import WorkflowError
from maskserve_core.workflows.passes import PASSES
from maskserve_core.workflows.plan import WorkflowPlan, dump_plan


def add_workflows(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The grammar of `maskserve workflows`."""
    workflows = subcommands.add_parser(
        "workflows",
        help="compile, check and explain workflows",
        description="Workflows chain models round edits. Definitions are Python files; what is "
        "served are the plans that compile writes beside them.",
    )
    actions = workflows.add_subparsers(required=True, metavar="ACTION")
    made = actions.add_parser("compile", help="run the definitions of a folder; writes NAME.json")
    check = actions.add_parser("check", help="whether the plans are whole, and those of today")
    told = actions.add_parser("explain", help="what the plans do, and what the passes did to them")
    for command, run in ((made, _compile), (check, _check), (told, _explain)):
        command.add_argument("folder", type=Path, metavar="DIR", help="folder of the definitions")
        command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        command.add_argument(
            "--without",
            action="append",
            choices=list(PASSES),
            default=[],
            metavar="PASS",
            help=f"leave out a pass: {', '.join(PASSES)}; may be given again",
        )
        command.set_defaults(run=run)


def _compiled(options: argparse.Namespace) -> list[WorkflowPlan]:
    try:
        return compile_folder(options.folder, set(PASSES) - set(options.without))
    except WorkflowError as error:
        raise InvalidRequest("workflows", str(error)) from None


def _compile(options: argparse.Namespace) -> None:
    plans = _compiled(options)
    for plan in plans:
        (options.folder / f"{plan.name}.json").write_bytes(dump_plan(plan))
    _print(options, plans, [f"{options.folder / plan.name}.json {plan.digest}" for plan in plans])


def _check(options: argparse.Namespace) -> None:
    plans = {plan.name: plan for plan in _compiled(options)}
    try:
        found = {plan.name: plan for plan in read_plans(options.folder)}
    except WorkflowError as error:
        raise InvalidRequest("workflows", str(error)) from None
    for name, plan in plans.items():
        if name not in found:
            raise InvalidRequest("workflows", f"{name} is not compiled", "run workflows compile")
        if found[name].digest != plan.digest:
            raise InvalidRequest(
                "workflows", f"{name}.json is not what its definition says", "run workflows compile"
            )
    _print(options, found.values(), [f"{name} {plan.digest}: ok" for name, plan in found.items()])


def _explain(options: argparse.Namespace) -> None:
    plans = _compiled(options)
    _print(options, plans, [explained(plan) for plan in plans])


def _print(options: argparse.Namespace, plans: Iterable[WorkflowPlan], lines: list[str]) -> None:
    if options.json:
        print(json.dumps({"workflows": msgspec.to_builtins(list(plans))}))
    else:
        print("\n".join(lines))
