"""The holder of an API key: the owner of calls, with its limits and counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from maskserve_common.contracts.keys import NO_SCOPE
from maskserve_common.errors import AdapterNotFound


@dataclass(slots=True)
class EditCounts:
    """Number and time of a client's answered edits of one model."""

    succeeded: int = 0
    failed: int = 0
    succeeded_ns: int = 0
    failed_ns: int = 0

    def add(self, seconds: float, *, succeeded: bool) -> None:
        taken_ns = int(seconds * 1e9)
        if succeeded:
            self.succeeded, self.succeeded_ns = self.succeeded + 1, self.succeeded_ns + taken_ns
        else:
            self.failed, self.failed_ns = self.failed + 1, self.failed_ns + taken_ns


class Daily(NamedTuple):
    """A key's jobs of one day, as a count or as a limit; a limit of 0 is none."""

    jobs: int = 0
    bytes: int = 0
    megapixel_steps: float = 0


ANY = Daily()


@dataclass(slots=True, eq=False)
class KeyHolder:
    """The holder of one API key; without keys, everybody."""

    name: str
    max_edits: int
    admin: bool
    shares: bool = False
    """True if its templates are for every client."""
    private_prompts: bool = False
    """True if embeddings of its prompts are kept for it alone."""
    scope: str = NO_SCOPE
    """Scope of its request ids and templates (`maskserve_common.contracts.keys`), and its key for
    fair shares (`maskserve_common.shares`). It follows from the key's name, so that a key can be
    replaced."""
    served: dict[str, EditCounts] = field(default_factory=dict)
    """Edits that this router has answered it, by model."""
    adapters: tuple[str, ...] = ()
    """Patterns of the LoRAs that belong to it."""
    foreign: tuple[str, ...] = ()
    """Patterns of the LoRAs that belong to other keys."""
    daily: Daily = ANY
    """Limits of its jobs per day."""
    webhook_secret: str = ""
    """Secret that signs its webhooks; empty: none."""
    output_urls: tuple[str, ...] = ()
    """URL prefixes to which its pictures may be written."""

    def sees(self, adapter: str) -> bool:
        """Return True if the client may use a LoRA."""
        if self.admin or any(fnmatchcase(adapter, own_pattern) for own_pattern in self.adapters):
            return True
        return not any(fnmatchcase(adapter, foreign_pattern) for foreign_pattern in self.foreign)

    def check_adapters(self, names: Iterable[str], field: str) -> None:
        """Raises AdapterNotFound: one of these belongs to another key.

        The text is the same as for an adapter that does not exist.
        """
        for name in names:
            if not self.sees(name):
                raise AdapterNotFound(f"{field}: there is no adapter {name}")
