"""A virtual environment with the packages of some extras, and no other installed package.

Nothing is fetched or copied: its site-packages links to the running interpreter's packages. So it
shows in a second which imports would fail after `pip install -e '.[EXTRAS]'`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from maskserve_benchmarks.checkout import CHECKOUT

SITE = Path(sysconfig.get_path("purelib"))
SCRIPTS = Path(sysconfig.get_path("scripts"))


def extras_of(stamp: str) -> list[str]:
    """The extras that the Makefile installs for a stamp such as `SERVING`."""
    makefile = (CHECKOUT / "Makefile").read_text("utf-8")
    match = re.search(
        rf"^\$\({stamp}\):.*?-e '\.\[([a-z,]+)\]'", makefile, re.DOTALL | re.MULTILINE
    )
    assert match is not None, stamp
    return match[1].split(",")


def required(extras: Iterable[str]) -> dict[str, Distribution]:
    """The installed distributions that maskserve needs with these extras, by name. pyproject.toml
    lists the extras.

    Raises:
        KeyError: a distribution is not installed.
    """
    installed = {
        canonicalize_name(distribution.metadata["Name"]): distribution
        for distribution in distributions()
    }
    known_extras: dict[str, set[str]] = {}
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    dependencies = {"": project["dependencies"], **project["optional-dependencies"]}
    waiting = [("maskserve", frozenset(extras))]
    while waiting:
        name, extra_names = waiting.pop()
        new = {"", *extra_names} - known_extras.get(name, set())
        if not new:
            continue
        known_extras.setdefault(name, set()).update(new)
        lines: Iterable[str] = installed[name].requires or ()
        if name == "maskserve":
            lines = [line for extra in new for line in dependencies[extra]]
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in new):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name: installed[name] for name in known_extras}


def make_environment(folder: Path, extras: Iterable[str]) -> None:
    """Make the environment in `folder`, with the commands of its packages in `bin`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    packages = required(extras)
    owners: dict[PurePosixPath, set[str]] = defaultdict(set)
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        for file in distribution.files or ():
            if file.parts[0] != "..":
                for path in (file, *file.parents):
                    owners[path].add(name)
            elif name in packages and (SCRIPTS / file.name).is_file():
                _copy_command(SCRIPTS / file.name, folder / "bin")
    _link(PurePosixPath("."), site, owners, set(packages))


def _link(
    path: PurePosixPath, site: Path, owners: dict[PurePosixPath, set[str]], packages: set[str]
) -> None:
    """Link the paths that belong only to kept distributions. Folders that others share are made
    and entered.
    """
    if path != PurePosixPath(".") and owners[path] <= packages:
        (site / path).symlink_to(SITE / path)
    elif (SITE / path).is_dir() and owners[path] & packages:
        (site / path).mkdir(exist_ok=True)
        for below in (SITE / path).iterdir():
            inner = path / below.name
            if inner in owners:
                _link(inner, site, owners, packages)


def _copy_command(script: Path, folder: Path) -> None:
    lines = script.read_bytes().split(b"\n", 1)
    if lines[0].startswith(b"#!") and b"python" in lines[0]:
        shebang = f"#!{shlex.quote(str(folder / 'python'))}".encode()
        (folder / script.name).write_bytes(b"\n".join([shebang, *lines[1:]]))
        (folder / script.name).chmod(0o755)
