"""Check whether each extra and each image can be installed from the public index.

A machine's settings for pip can hide a conflict, because its index may have other builds of torch;
so the check ignores them. It reads metadata and installs nothing. Versions that fit all extras and
images together fit each of them; only if there are none, each is checked by itself. A success is
noted in .cache/ until one of the files in `SOURCES` changes.

    python scripts/bench check_install
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("pyproject.toml", "constraints.txt", "Dockerfile", "deploy/requirements.py", "Makefile")
PYTHONS = ("3.11", "3.12")
GOOD = ROOT / ".cache" / "install-checked"


def installations() -> Iterator[tuple[str, list[str]]]:
    """Yield each combination that users install: a name, and the requirements in pip's syntax."""
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
    """Return why pip cannot install these together by default; empty if it can."""
    prefixes = ("PIP_", "UV_")
    uv = str(Path(sys.executable).parent / "uv")
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_36"]
    command = [uv, "pip", "compile", "-", "--quiet", "--no-config", "--only-binary", ":all:"]
    resolved = subprocess.run(
        [*command, "--constraints", str(constraints), *target],
        input="\n".join(requirements),
        text=True,
        capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(prefixes)},
        check=False,
    )
    return resolved.stderr if resolved.returncode else ""


def conflicts(
    requirement_sets: dict[str, list[str]],
    constraints: Path,
    reason: Callable[[list[str], Path, str], str] = conflict,
) -> list[str]:
    """Return a text for each set that cannot be installed: its name and the reason."""
    union = sorted({line for lines in requirement_sets.values() for line in lines})
    with ThreadPoolExecutor(8) as pool:  # most of the time goes into waiting for the index
        at_once = pool.map(lambda python: reason(union, constraints, python), PYTHONS)
        pythons = [python for python, why in zip(PYTHONS, at_once, strict=True) if why]
        cases = [
            (name, lines, python) for name, lines in requirement_sets.items() for python in pythons
        ]
        reasons = pool.map(lambda one: reason(one[1], constraints, one[2]), cases)
        return [
            f"{name} cannot be installed on Python {python}:\n{why}"
            for (name, _, python), why in zip(cases, reasons, strict=True)
            if why
        ]


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    content = b"\0".join((ROOT / name).read_bytes() for name in (*SOURCES, Path(__file__)))
    digest = hashlib.sha256(content).hexdigest()
    if GOOD.exists() and GOOD.read_text() == digest:
        return 0
    problems = conflicts(dict(installations()), ROOT / "constraints.txt")
    for sentence in problems:
        print(sentence, file=sys.stderr)
    if not problems:
        GOOD.parent.mkdir(exist_ok=True)
        GOOD.write_text(digest)
    return 1 if problems else 0
