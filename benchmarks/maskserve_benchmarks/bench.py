"""The commands that measure, write documents, check or train: `scripts/bench NAME` runs one."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from maskserve_benchmarks.checkout import CHECKOUT

COMMANDS = {
    # Steps of the model.
    "step": "steps.step",
    "profile_costs": "steps.profile_costs",
    # Whole edits.
    "bench_edit": "edits.edit",
    "overhead": "edits.overhead",
    "router": "edits.router_overhead",
    "pictures": "edits.pictures",
    "every_edit": "edits.every_edit",
    "fuzz_headers": "edits.fuzz_headers",
    "convert_checkpoint": "edits.convert_checkpoint",
    # Load.
    "end_to_end": "rivals.end_to_end",
    "perf_analyzer": "perf.command",
    "soak": "soak.command",
    # The code itself.
    "code_path": "edits.code_path",
    "module_index": "documents.module_index",
    "check_words": "documents.words",
    "record_edits": "recording.command",
    "mutants": "mutants",
    # Files that are generated from the code, and a demonstration.
    "config_reference": "documents.configuration",
    "model_configs": "documents.model_configs",
    "openapi": "documents.openapi",
    "dashboard": "documents.dashboard",
    "papers": "documents.papers",
    "check_install": "documents.install_check",
    "demo": "demo",
    "job_pictures": "documents.job_pictures",
    # Studies of steps and of their plans.
    "bytes_table": "maskserve_studies.model_counts.entry_bytes",
    "model_counts": "maskserve_studies.model_counts.command",
    "pipeline": "maskserve_studies.block_plans.pipeline",
    "plan_table": "maskserve_studies.block_plans.table",
    "plan_counts": "maskserve_studies.block_plans.counts",
    "planner": "maskserve_studies.block_plans.planner",
    "kernel_table": "maskserve_studies.kernels.command",
    "recorded_steps": "maskserve_studies.kernels.recorded_steps",
    "gpu_estimate": "maskserve_studies.gpu_estimates.step",
    "gpu_cards": "maskserve_studies.gpu_estimates.cards",
    "gpu_run": "maskserve_studies.gpu_run.command",
    "bench_sp": "maskserve_studies.sequence_parallel.command",
    "vae_batches": "maskserve_studies.vae_batches.command",
    # Studies of adapters.
    "bench_adapters": "maskserve_studies.adapters.command",
    "adapter_misses": "maskserve_studies.adapter_misses.command",
    "profile_lora": "maskserve_studies.profile_lora.command",
    "unet_adapters": "maskserve_studies.unet_adapters.command",
    # Studies of the quality of pictures.
    "eval_quality": "maskserve_studies.quality.command",
    "eval_unet_quality": "maskserve_studies.quality.unet_command",
    "eval_demo_model": "maskserve_studies.demo_model.command",
    "refresh_steps": "maskserve_studies.refresh_steps.command",
    "reuse": "maskserve_studies.reuse.command",
    "regions": "maskserve_studies.regions.command",
    "approximate": "maskserve_studies.approximate.command",
    "pieces": "maskserve_studies.vae_pieces.command",
    "windows": "maskserve_studies.windows.command",
    "eval_photo_model": "maskserve_studies.photo_model.command",
    # Studies of routers, of many workers and of workflows.
    "routing": "maskserve_studies.router_limits.decisions",
    "router_scale": "maskserve_studies.router_limits.workers",
    "scale": "maskserve_studies.router_limits.hosts",
    "job_history": "maskserve_studies.router_limits.job_history",
    "simulate_cluster": "maskserve_studies.cluster.command",
    "flashps": "maskserve_studies.flashps.command",
    "due_times": "maskserve_studies.due_times.command",
    "workflows": "maskserve_studies.workflows.command",
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
"""Command → module: a name in this package, or a full dotted name. Each module has a `main()`
that reads `sys.argv`; the first paragraph of its docstring describes the command."""

_USAGE = """\
usage: bench NAME [FLAGS …]     run one
       bench NAME --help        its flags
       bench --list             what there is"""


def main() -> int:
    """Run the named command and return its exit code. The code is 2 if no command has that name, or
    if the command cannot serve the given folder or configuration.
    """
    name, flags = (sys.argv[1] if sys.argv[1:] else ""), sys.argv[2:]
    if name in ("--list", "--help", "-h"):
        print("\n".join(_listing()) if name == "--list" else _USAGE)
        return 0
    if name not in COMMANDS:
        print(f"bench: there is no {name!r}\n{_USAGE}" if name else _USAGE, file=sys.stderr)
        return 2
    from maskserve_common.config import ConfigError

    # A command shows this name in its help and in its report.
    sys.argv = [f"scripts/bench {name}", *flags]
    try:
        return int(importlib.import_module(module_of(name)).main() or 0)
    except ConfigError as error:
        print(f"bench {name}: {error}", file=sys.stderr)
        return 2


def module_of(name: str) -> str:
    """Return the full dotted name of a command's module."""
    module = COMMANDS[name]
    return module if module.startswith("maskserve_") else f"maskserve_benchmarks.{module}"


def _listing() -> list[str]:
    width = max(map(len, COMMANDS))
    return [f"{name:{width}}  {_summary(module_of(name))}" for name in COMMANDS]


def _summary(module: str) -> str:
    """Return the first paragraph of a module's docstring without importing the module."""
    file = Path(*module.split(".")).with_suffix(".py")
    folder = "studies" if module.startswith("maskserve_studies.") else "benchmarks"
    path = CHECKOUT / folder / file
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())
