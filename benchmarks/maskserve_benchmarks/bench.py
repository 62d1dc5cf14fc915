"""One entry to all that measures, writes documents, checks or trains: `scripts/bench NAME` runs
the command of that name.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from maskserve_benchmarks.checkout import CHECKOUT

COMMANDS = {
    # The model's steps, and what surrounds them in a worker.
    "step": "benchmarks.step",
    "pipeline": "benchmarks.pipeline",
    "bench_adapters": "benchmarks.bench_adapters",
    "adapter_misses": "benchmarks.adapter_misses",
    "own_anchors": "quality.own_command",
    "kernel_table": "benchmarks.kernel_table",
    "plan_table": "benchmarks.plan_table",
    "planner": "benchmarks.planner",
    "plan_counts": "benchmarks.plan_counts",
    "gpu_estimate": "benchmarks.gpu_estimate",
    "gpu_cards": "benchmarks.gpu_cards",
    "bench_sp": "benchmarks.sequence_parallel",
    "profile_costs": "benchmarks.profile_costs",
    "first_run": "benchmarks.first_run",
    "overhead": "benchmarks.overhead",
    "bench_edit": "benchmarks.edit",
    "bytes_table": "benchmarks.bytes_table",
    "model_counts": "benchmarks.model_counts",
    # Many workers.
    "simulate_cluster": "simulator.command",
    "router": "benchmarks.router_added",
    "routing": "benchmarks.routing",
    "scale": "emulated.scale",
    "router_scale": "benchmarks.router_scale",
    # Load.
    "end_to_end": "rivals.end_to_end",
    "flashps": "rivals.flashps",
    "due_times": "benchmarks.due_times",
    "workflows": "benchmarks.workflows",
    "job_history": "benchmarks.job_history",
    "perf_analyzer": "perf.command",
    "soak": "soaking.command",
    "fuzz_headers": "benchmarks.fuzz_headers",
    "every_edit": "benchmarks.every_edit",
    # The quality of pictures.
    "eval_quality": "quality.command",
    "eval_unet_quality": "quality.unet_command",
    "eval_demo_model": "demo_model.eval_command",
    "profile_lora": "quality.profile_lora",
    "unet_adapters": "quality.unet_adapters",
    "pieces": "quality.pieces",
    "vae_batches": "benchmarks.vae_batches",
    "windows": "quality.windows",
    "eval_photo_model": "photo_model.command",
    "approximate": "quality.approximate",
    # The code itself.
    "module_index": "documents.module_index",
    "way_of_an_edit": "benchmarks.way_of_an_edit",
    "record_edits": "recording.command",
    "mutants": "mutants",
    # What is made of the code, and what is shown of it.
    "config_reference": "documents.configuration",
    "model_configs": "documents.model_configs",
    "dashboard": "documents.dashboard",
    "papers": "documents.papers",
    "check_install": "documents.install_check",
    "demo": "demo",
    # The models of assets/.
    "train_demo_model": "maskserve_studies.training.command",
    "train_demo_unet": "maskserve_studies.training.unet_command",
    "train_demo_lora": "maskserve_studies.training.lora",
    "train_demo_control": "maskserve_studies.training.control",
    "train_find": "maskserve_studies.training.find",
    "train_segment": "maskserve_studies.training.segment",
    "train_enlarge": "maskserve_studies.training.enlarge",
    "train_inpaint_model": "maskserve_studies.training.inpaint",
    "train_demo_edit": "maskserve_studies.training.edit",
    "train_photo_model": "maskserve_studies.training.photo",
}
"""The module of each command, in this package or by its whole name. It has a `main()` that reads
`sys.argv`, and its docstring's first paragraph says what it does."""

_USAGE = """\
usage: bench NAME [FLAGS …]     run one
       bench NAME --help        its flags
       bench --list             what there is"""


def main() -> int:
    """Runs the command that is named; its exit code, or 2 where there is none of that name, or a
    folder or configuration that it is given cannot be served.
    """
    name, flags = (sys.argv[1] if sys.argv[1:] else ""), sys.argv[2:]
    if name in ("--list", "--help", "-h"):
        print("\n".join(_listed()) if name == "--list" else _USAGE)
        return 0
    if name not in COMMANDS:
        print(f"bench: there is no {name!r}\n{_USAGE}" if name else _USAGE, file=sys.stderr)
        return 2
    from maskserve_common.config import ConfigError

    # What a command calls itself in its help and in its report.
    sys.argv = [f"scripts/bench {name}", *flags]
    try:
        return int(importlib.import_module(module_of(name)).main() or 0)
    except ConfigError as error:
        print(f"bench {name}: {error}", file=sys.stderr)
        return 2


def module_of(name: str) -> str:
    """The module of a command, by its whole name."""
    module = COMMANDS[name]
    return module if module.startswith("maskserve_") else f"maskserve_benchmarks.{module}"


def _listed() -> list[str]:
    width = max(map(len, COMMANDS))
    return [f"{name:{width}}  {_summary(module_of(name))}" for name in COMMANDS]


def _summary(module: str) -> str:
    """The first paragraph of a module's docstring; nothing is imported for it."""
    file = Path(*module.split(".")).with_suffix(".py")
    folder = "studies" if module.startswith("maskserve_studies.") else "benchmarks"
    path = CHECKOUT / folder / file
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())
