"""A router imports only what it is configured for. Each test builds one in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maskserve_benchmarks.documents.module_index import code_lines

_WITHOUT = """
import json, os, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
_START = (
    _WITHOUT
    + """
from maskserve_common.config import ConfigError
from maskserve_router.config import router_config_of
from maskserve_router.router import Router

try:
    router = Router(router_config_of({tables}))
except ConfigError as error:
    print(error)
else:
    print(router._jobs.state)
files = {{name: vars(module).get("__file__") for name, module in sys.modules.items()}}
print(json.dumps(files), flush=True)
os._exit(0)  # a router that was not started logs as Python ends
"""
)
_COMMAND = (
    _WITHOUT
    + """
from maskserve_router.cli import main

sys.exit(main({arguments}))
"""
)
ROUTER = (
    "fsspec", "grpc_health", "httptools", "httpx", "prometheus_client", "pybase64",
    "python_multipart", "starlette", "uvicorn",
)  # fmt: skip
JOBS = ("sqlalchemy", "tenacity")
WORKFLOWS = ("maskserve_workflows",)
NO_JOBS = {"enabled": False}
JOBS_ROOM = "maskserve_router.jobs"
WORKFLOW_ROOMS = ("maskserve_router.workflows", "maskserve_router.nodes")
MOST_LINES, MOST_ROUTER_LINES = 14_000, 7_600
"""Most code lines of ours that a router of edits imports; the second without those of the common
packages.
"""


def started(
    tables: dict[str, object], missing: tuple[str, ...] = (), state: Path | None = None
) -> tuple[str, dict[str, str | None]]:
    """The output of a process that builds a router of this configuration, and the files of its
    modules by name.
    """
    run = _ran(_START.format(missing=missing, tables=tables), state)
    run.check_returncode()
    *output, modules = run.stdout.splitlines()
    return "\n".join(output), json.loads(modules)


def _ran(script: str, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(state or "/")}
    return subprocess.run(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )


def test_a_router_of_edits_imports_neither_jobs_nor_workflows() -> None:
    output, modules = started({"jobs": NO_JOBS})
    assert output == "off"
    assert modules.keys().isdisjoint({*JOBS, *WORKFLOWS, JOBS_ROOM, *WORKFLOW_ROOMS})
    lines = {
        name: code_lines(Path(file).read_text(encoding="utf-8"))
        for name, file in modules.items()
        if name.startswith("maskserve_") and file
    }
    assert len(lines) > 100
    assert sum(lines.values()) <= MOST_LINES
    router = sum(n for name, n in lines.items() if name.startswith("maskserve_router"))
    assert router <= MOST_ROUTER_LINES


@pytest.mark.parametrize("key", ["folder", "nodes", "node_path"])
def test_plans_or_node_servers_import_workflows(key: str, tmp_path: Path) -> None:
    values = {"folder": str(tmp_path), "nodes": ["127.0.0.1:9"], "node_path": [str(tmp_path)]}
    workflows = {key: values[key]}
    _, modules = started({"jobs": NO_JOBS, "workflows": workflows})
    assert modules.keys() >= {*WORKFLOWS, *WORKFLOW_ROOMS}
    assert modules.keys().isdisjoint({*JOBS, JOBS_ROOM})


def test_without_the_extra_workflows_cannot_be_configured() -> None:
    tables = {"jobs": NO_JOBS, "workflows": {"nodes": ["127.0.0.1:9"]}}
    output, _ = started(tables, WORKFLOWS)
    assert output == (
        "[workflows]: workflows and node servers need the extra `workflows` "
        "(pip install -e '.[workflows]'): maskserve_workflows is missing"
    )
    assert started({"jobs": NO_JOBS}, WORKFLOWS)[0] == "off"


def test_without_the_extra_a_router_takes_no_jobs_and_says_so(tmp_path: Path) -> None:
    output, _ = started({}, JOBS, tmp_path)
    assert output.endswith("\noff")
    assert "pip install -e '.[jobs]'" in output


def test_without_the_extra_a_database_cannot_be_configured(tmp_path: Path) -> None:
    output, _ = started({"jobs": {"database": str(tmp_path / "jobs")}}, JOBS, tmp_path)
    assert output.startswith("[jobs]: jobs need the extra `jobs`")
    assert "sqlalchemy is missing" in output


@pytest.mark.parametrize("missing", [ROUTER, ("uvicorn",)])
def test_a_router_without_its_extra_ends_with_a_sentence(missing: tuple[str, ...]) -> None:
    run = _ran(_COMMAND.format(missing=missing, arguments=["--worker", "127.0.0.1:9"]))
    assert run.returncode == 2
    assert run.stdout.startswith(
        "maskserve-router: routers need the extra `router` (pip install -e '.[router]'): "
    )
    assert run.stdout.endswith(" is missing\n")
    assert run.stdout.count("\n") == 1
    assert _ran(_COMMAND.format(missing=ROUTER, arguments=["--help"])).returncode == 0
