"""Whether what we ask for can be installed: each extra and each image, from the public index.

A machine's own settings for pip can hide a conflict, for its index may serve other builds of torch.
So nothing of them is used here. Only metadata is read and nothing is installed. What was found good
is remembered in .cache/ until one of the files that say it changes.

    python scripts/check_install.py
"""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("pyproject.toml", "constraints.txt", "Dockerfile", "deploy/requirements.py", "Makefile")
PYTHONS = ("3.11", "3.12")
GOOD = ROOT / ".cache" / "install-checked"


def wanted() -> Iterator[tuple[str, list[str]]]:
    """What people install: a name, and the requirements in pip's words."""
    sys.path.insert(0, str(ROOT / "deploy"))
    from requirements import requirements  # type: ignore[import-not-found]

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    yield "maskserve", requirements([])
    for extra in extras:
        yield f"maskserve[{extra}]", requirements([extra])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for together in re.findall(r"-e '\.\[([a-z,]+)\]'", makefile):
        yield f"make: maskserve[{together}]", requirements(together.split(","))
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for stage in re.findall(r"requirements\.py ([a-z ]+) >", dockerfile):
        yield f"image: {stage}", ["torch", *requirements(stage.split())]


def conflict(requirements: list[str], constraints: Path, python: str) -> str:
    """Why these cannot be installed together with pip's defaults; empty if they can."""
    ours = ("PIP_", "UV_")
    uv = str(Path(sys.executable).parent / "uv")
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_36"]
    command = [uv, "pip", "compile", "-", "--quiet", "--no-config", "--only-binary", ":all:"]
    resolved = subprocess.run(
        [*command, "--constraints", str(constraints), *target],
        input="\n".join(requirements),
        text=True,
        capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(ours)},
        check=False,
    )
    return resolved.stderr if resolved.returncode else ""


def main() -> int:
    told = b"\0".join((ROOT / name).read_bytes() for name in (*SOURCES, Path(__file__)))
    digest = hashlib.sha256(told).hexdigest()
    if GOOD.exists() and GOOD.read_text() == digest:
        return 0
    asked = [(name, lines, python) for name, lines in wanted() for python in PYTHONS]
    with ThreadPoolExecutor(8) as pool:  # it is the index that is waited for
        reasons = pool.map(lambda one: conflict(one[1], ROOT / "constraints.txt", one[2]), asked)
    found = 0
    for (name, _, python), reason in zip(asked, reasons, strict=True):
        if reason:
            found += 1
            print(f"{name} cannot be installed on Python {python}:\n{reason}", file=sys.stderr)
    if not found:
        GOOD.parent.mkdir(exist_ok=True)
        GOOD.write_text(digest)
    return 1 if found else 0
