#!/usr/bin/env python3
"""Whether this machine can set maskserve up: one sentence per thing that is missing.

Runs before anything is installed, under whatever Python the machine has, so it uses the standard
library alone and nothing recent of the language.
"""

import importlib.util
import sys
from collections.abc import Iterator

# What the versions in constraints.txt have wheels for.
OLDEST, NEWEST = (3, 11), (3, 12)


def problems() -> Iterator[str]:
    """Yields one sentence for each thing that is missing."""
    python_version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        yield (
            f"Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} is needed, and "
            f"{sys.executable} is {python_version}; install one of them and name it, as in "
            "`make PYTHON=python3.12 demo`."
        )
        return
    if not all(importlib.util.find_spec(module) for module in ("venv", "ensurepip")):
        yield (
            "Python's venv module is missing; on Debian and Ubuntu: "
            f"apt-get install python{python_version}-venv."
        )
    from maskserve_serving.errors import ServeError
    from maskserve_serving.runtime import check_machine

    try:
        check_machine()
    except ServeError as error:
        yield f"{error}."


if __name__ == "__main__":
    found = list(problems())
    for problem in found:
        print("maskserve: " + problem, file=sys.stderr)
    sys.exit(1 if found else 0)
