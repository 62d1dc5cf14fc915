"""A router without the extra `jobs` (SQLAlchemy, tenacity), in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_START = """
import sys
{before}
from maskserve_common.config import ConfigError
from maskserve_router.config import router_config_of
from maskserve_router.router import Router

try:
    router = Router(router_config_of({tables}))
except ConfigError as error:
    print(error)
else:
    print(router._jobs.state)
print([name for name in ("sqlalchemy", "tenacity", "maskserve_router.jobs") if name in sys.modules])
"""
_WITHOUT_EXTRA = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("sqlalchemy", "tenacity"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def started(tables: dict[str, object], before: str = "", state: Path | None = None) -> str:
    """The output of a process that builds a router of this configuration."""
    script = _START.format(before=before, tables=tables)
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(state or "/")}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    return run.stdout + run.stderr


def test_a_router_whose_jobs_are_off_imports_none_of_theirs() -> None:
    assert started({"jobs": {"enabled": False}}) == "off\n[]\n"


def test_without_the_extra_a_router_takes_no_jobs_and_says_so(tmp_path: Path) -> None:
    output = started({}, _WITHOUT_EXTRA, tmp_path)
    assert output.startswith("off\n")
    assert "pip install -e '.[jobs]'" in output


def test_without_the_extra_a_database_cannot_be_configured(tmp_path: Path) -> None:
    output = started({"jobs": {"database": str(tmp_path / "jobs")}}, _WITHOUT_EXTRA, tmp_path)
    assert output.startswith("[jobs]: jobs need the extra `jobs`")
    assert "sqlalchemy is missing" in output
