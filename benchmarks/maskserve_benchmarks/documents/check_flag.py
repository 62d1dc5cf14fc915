"""The command line of commands that write files of the checkout."""

from __future__ import annotations

import argparse


def check_only(description: str | None) -> bool:
    """Read a generator's command line. Return whether to only check that the files are up to date,
    and write none.

    Args:
        description: the docstring of the generator's module.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a file is stale"
    )
    check: bool = parser.parse_args().check
    return check
