"""Print what an image installs: the requirements of pyproject.toml's extras, one per line.

Read apart from the code, so that the layer of dependencies is built anew only when they change.

    python3 deploy/requirements.py engine router trace > requirements.txt
"""

import sys
from pathlib import Path

import tomllib


def requirements(extras: list[str]) -> list[str]:
    """Those of the package and of these extras."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [line for extra in extras for line in project["optional-dependencies"][extra]]
    own = project["name"]
    return [line for line in [*project["dependencies"], *named] if not line.startswith(f"{own}[")]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
