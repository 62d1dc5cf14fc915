"""The command line of commands that write files of the checkout."""

from __future__ import annotations

import argparse


def check_only(description: str | None) -> bool:
    """Reads a writer's command line; whether it is to see that its files are as it would write
    them, and to write none.

    Args:
        description: the docstring of its module.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a file is stale"
    )
    check: bool = parser.parse_args().check
    return check
