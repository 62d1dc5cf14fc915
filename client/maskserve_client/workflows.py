"""`maskserve workflows`: compile definitions to plans, and run workflows at a router."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from maskserve_client.commands import connected, write_whole
from maskserve_client.wire import ImageInput
from maskserve_common.config import NODE_PATH_HELP, node_path_folders
from maskserve_common.errors import InvalidRequest
from maskserve_workflows.explanation import explain
from maskserve_workflows.folder import compile_folder, read_plans
from maskserve_workflows.nodes import NODE_FILES
from maskserve_workflows.passes import PASSES
from maskserve_workflows.plan import WorkflowPlan, dump_plan
from maskserve_workflows.ports import WorkflowError


def add_workflows(
    subcommands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_common: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add the parser of `maskserve workflows`; `add_common` adds the options for a server."""
    workflows = subcommands.add_parser(
        "workflows",
        help="compile, check, explain and run workflows",
        description="Workflows chain models around edits. Their definitions are Python files; "
        "compile writes a plan next to each, and a router serves the plans.",
    )
    actions = workflows.add_subparsers(required=True, metavar="ACTION")
    compile_parser = actions.add_parser(
        "compile", help="compile the definitions of a folder to plans (NAME.json)"
    )
    check = actions.add_parser("check", help="check that the plans match their definitions")
    explain_parser = actions.add_parser(
        "explain", help="explain what the plans do, and how the passes changed them"
    )
    for command, run in ((compile_parser, _compile), (check, _check), (explain_parser, _explain)):
        command.add_argument("folder", type=Path, metavar="DIR", help="folder of the definitions")
        command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        command.add_argument("--node-path", default="", metavar="DIR[:DIR]", help=NODE_PATH_HELP)
        command.add_argument(
            "--without",
            action="append",
            choices=list(PASSES),
            default=[],
            metavar="PASS",
            help=f"skip a pass: {', '.join(PASSES)}; may be repeated",
        )
        command.set_defaults(run=run)
    run_parser = actions.add_parser(
        "run",
        help="run a workflow at a router",
        epilog="example: maskserve workflows run replace --url localhost:8081 image=@a.png "
        'name="red star" prompt="a blue heart" --out b.png',
    )
    run_parser.add_argument("name", metavar="NAME", help="name of the workflow")
    run_parser.add_argument(
        "inputs", nargs="+", metavar="INPUT=VALUE", help="text, or @FILE for a picture or mask"
    )
    run_parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file for the output image; further pictures and masks go to FILE-NAME next to it",
    )
    run_parser.add_argument(
        "--seed", type=int, metavar="N", help="seed (default: drawn and reported)"
    )
    run_parser.add_argument(
        "--steps",
        dest="num_inference_steps",
        type=int,
        metavar="N",
        help="denoising steps of each edit",
    )
    run_parser.add_argument(
        "--size", metavar="auto|WxH", help="size of the pictures of edits without a mask"
    )
    run_parser.add_argument(
        "--request-id", metavar="ID", help="name of the run, for cancel and logs"
    )
    run_parser.add_argument(
        "--timeout", type=float, metavar="S", help="cancel the run after this many seconds"
    )
    add_common(run_parser)
    run_parser.set_defaults(run=_run)


def _compiled(options: argparse.Namespace) -> list[WorkflowPlan]:
    for problem in NODE_FILES.read(node_path_folders(options.node_path)):
        print(f"maskserve: {problem}", file=sys.stderr)
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
        stored_plans = {plan.name: plan for plan in read_plans(options.folder)}
    except WorkflowError as error:
        raise InvalidRequest("workflows", str(error)) from None
    for name, plan in plans.items():
        if name not in stored_plans:
            raise InvalidRequest("workflows", f"{name} is not compiled", "run workflows compile")
        if stored_plans[name].digest != plan.digest:
            raise InvalidRequest(
                "workflows", f"{name}.json differs from its definition", "run workflows compile"
            )
    _print(
        options,
        stored_plans.values(),
        [f"{name} {plan.digest}: ok" for name, plan in stored_plans.items()],
    )


def _explain(options: argparse.Namespace) -> None:
    plans = _compiled(options)
    _print(options, plans, [explain(plan) for plan in plans])


def _run(options: argparse.Namespace) -> None:
    inputs: dict[str, ImageInput] = {}
    for argument in options.inputs:
        name, separator, value = argument.partition("=")
        if not separator:
            raise InvalidRequest("INPUT", f"{argument} has no value", "NAME=TEXT or NAME=@FILE")
        inputs[name] = Path(value[1:]) if value.startswith("@") else value
    names = ("seed", "num_inference_steps", "size", "request_id")
    settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    with connected(options) as client:
        outputs, meta = client.run_workflow(
            options.name, inputs, timeout=options.timeout, **settings
        )
    texts, out = {}, options.out
    for name, raw in outputs.items():
        if meta["outputs"][name] in ("picture", "mask"):
            file = out if name == "image" else out.with_name(f"{out.stem}-{name}{out.suffix}")
            write_whole(file, raw)
        else:
            texts[name] = raw.decode()
    text_summary = ", ".join(f"{name} {text}" for name, text in texts.items())
    summary = f"{len(meta['nodes'])} nodes in {meta['seconds']:.2f} s, seed {meta['seed']}"
    line = f"{options.out}: {summary}" + (f", {text_summary}" if text_summary else "")
    print(json.dumps({**meta, **texts}) if options.json else line)


def _print(options: argparse.Namespace, plans: Iterable[WorkflowPlan], lines: list[str]) -> None:
    if options.json:
        print(json.dumps({"workflows": msgspec.to_builtins(list(plans))}))
    else:
        print("\n".join(lines))
