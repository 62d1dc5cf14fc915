"""The extras of the package that parts of the router need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from maskserve_common.config import ConfigError

_OWN = ("maskserve_router", "maskserve_common")


class ExtraMissing(ConfigError):
    """A library of an extra is not installed.

    Args:
        parts: what needs it, in the plural.
        lack: what it needs.
    """

    def __init__(self, parts: str, lack: str) -> None:
        super().__init__(f"{parts} {lack}")
        self.lack = lack


@contextmanager
def extra(name: str, parts: str) -> Iterator[None]:
    """Name the extra that the imports of the block need.

    Args:
        name: the extra.
        parts: what needs it, in the plural.

    Raises:
        ExtraMissing: one of its libraries is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.startswith(_OWN):
            raise
        raise ExtraMissing(
            parts, f"need the extra `{name}` (pip install -e '.[{name}]'): {missing} is missing"
        ) from None
