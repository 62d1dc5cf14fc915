"""One entry to everything that measures: `scripts/bench NAME` runs the command of that name."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

COMMANDS = {
    # The model's steps, and what surrounds them in a worker.
    "step": "benchmarks.step",
    "bench_adapters": "benchmarks.bench_adapters",
    "kernel_table": "benchmarks.kernel_table",
    "gpu_estimate": "benchmarks.gpu_estimate",
    "gpu_cards": "benchmarks.gpu_cards",
    "bench_sp": "benchmarks.sequence_parallel",
    "profile_costs": "benchmarks.profile_costs",
    "first_run": "benchmarks.first_run",
    "overhead": "benchmarks.overhead",
    "bench_edit": "benchmarks.edit",
    "bytes_table": "benchmarks.bytes_table",
    # Many workers.
    "simulate_cluster": "simulator.command",
    # Load.
    "end_to_end": "rivals.end_to_end",
    "due_times": "benchmarks.due_times",
    "perf_analyzer": "perf.command",
    "soak": "soaking.command",
    # The quality of pictures.
    "eval_quality": "quality.command",
    "profile_lora": "quality.profile_lora",
    # The code itself.
    "module_index": "documents.module_index",
}
"""The module of each command inside this package. It has a `main()` that reads `sys.argv`, and its
docstring's first paragraph says what is measured."""

_USAGE = """\
usage: bench NAME [FLAGS …]     run one
       bench NAME --help        its flags
       bench --list             what there is"""


def main() -> int:
    """Runs the command that is named; its exit code, or 2 where there is none of that name."""
    name, flags = (sys.argv[1] if sys.argv[1:] else ""), sys.argv[2:]
    if name in ("--list", "--help", "-h"):
        print("\n".join(_listed()) if name == "--list" else _USAGE)
        return 0
    if name not in COMMANDS:
        print(f"bench: there is no {name!r}\n{_USAGE}" if name else _USAGE, file=sys.stderr)
        return 2
    # What a command calls itself in its help and in its report.
    sys.argv = [f"scripts/bench {name}", *flags]
    module = importlib.import_module(f"maskserve_harness.{COMMANDS[name]}")
    return int(module.main() or 0)


def _listed() -> list[str]:
    width = max(map(len, COMMANDS))
    return [f"{name:{width}}  {_summary(module)}" for name, module in COMMANDS.items()]


def _summary(module: str) -> str:
    """The first paragraph of a module's docstring; nothing is imported for it."""
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(said.split("\n\n")[0].split())
