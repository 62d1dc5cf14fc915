#!/usr/bin/env python3
"""Check whether this machine can set maskserve up, and print one sentence per missing thing.

The script runs before anything is installed, under any Python of the machine, so it uses only the
standard library and no recent syntax.
"""

import importlib.util
import sys
from collections.abc import Iterator

# Versions of Python with wheels for constraints.txt.
OLDEST, NEWEST = (3, 11), (3, 12)


def problems() -> Iterator[str]:
    """Yield one sentence for each missing thing."""
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
    sentences = list(problems())
    for sentence in sentences:
        print("maskserve: " + sentence, file=sys.stderr)
    sys.exit(1 if sentences else 0)
