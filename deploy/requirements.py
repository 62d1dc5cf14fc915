"""Print what an image installs: the requirements of pyproject.toml's extras, one per line.

Read apart from the code, so that the layer of dependencies is built anew only when they change.

    python3 deploy/requirements.py engine postgres trace > requirements.txt
"""

import re
import sys
from pathlib import Path

import tomllib


def requirements(extras: list[str]) -> list[str]:
    """Those of the package, of these extras, and of the extras that these name."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    waiting, seen = list(extras), set[str]()
    while waiting:
        if (extra := waiting.pop(0)) in seen:
            continue
        seen.add(extra)
        for line in project["optional-dependencies"][extra]:
            if own := re.fullmatch(rf"{project['name']}\[(.+)\]", line):
                waiting += own[1].split(",")
            else:
                lines.append(line)
    return lines


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
