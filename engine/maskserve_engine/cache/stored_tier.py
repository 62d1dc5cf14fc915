"""Base of the tiers outside this process: counts, notes and the choice of templates to evict."""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache.entry_file import BadEntry, read_note
from maskserve_engine.cache.tier import Note, Rebuild, TierEntry, chosen_victims

_log = logging.getLogger(__name__)
SUFFIX = ".safetensors"


class StoredTier(ABC):
    """Entries as files or objects `<place>/<key>/<anchor>.safetensors`.

    Args:
        place: description of the place.
        budget_bytes: most bytes of all entries there, from any process.
        rebuild: returns the seconds to make a template again.
        clock: clock, in seconds.
    """

    def __init__(
        self, name: str, place: str, budget_bytes: int, rebuild: Rebuild, clock: Callable[[], float]
    ) -> None:
        self.name, self.budget_bytes = name, budget_bytes
        self.evictions = self.corrupt = self.failures = 0
        self._place, self._rebuild, self._clock = place, rebuild, clock
        self._notes: dict[str, Note] = {}
        self._refused = ""
        """Last error text of the medium; it is logged when it changes."""

    @property
    def nbytes(self) -> int:
        return sum(template.nbytes for template in self.entries().values())

    def note(self, key: str) -> Note | None:
        return self._notes.get(key)

    @abstractmethod
    def entries(self) -> Mapping[str, TierEntry]: ...

    @abstractmethod
    def _remove(self, key: str) -> int:
        """Remove a template and count it as evicted; return its bytes."""

    @abstractmethod
    def _part(self, key: str, anchor: Anchor, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of an entry's file."""

    def _make_room(self, key: str, anchor: Anchor, nbytes: int) -> bool:
        """Evict templates until an entry fits; evict none if it cannot fit."""
        templates = self.entries()
        replaced = templates[key].anchors.get(anchor, 0) if key in templates else 0
        missing = (
            sum(template.nbytes for template in templates.values())
            - replaced
            + nbytes
            - self.budget_bytes
        )
        chosen = chosen_victims(templates, missing, frozenset({key}), self._clock(), self._rebuild)
        for victim in chosen or ():
            self._remove(victim)
        return chosen is not None

    def _note_of(self, key: str, files: Mapping[Anchor, int]) -> Note:
        """Return a template's note, read from one of its entries; if none can be read, a note that
        demands one entry more than there are.
        """
        note = self._notes.get(key)  # another thread may evict the template at any time
        if note is None:
            try:
                anchor, nbytes = next(iter(files.items()))
                note = read_note(partial(self._part, key, anchor), nbytes)
                self._notes[key] = note
            except (BadEntry, FileNotFoundError):  # evicted since it was listed
                return Note("", len(files) + 1, 0.0)
            except Exception as error:  # each file system has errors of its own
                self._refuse(error)
                return Note("", len(files) + 1, 0.0)
        return note

    def _dropped(self, path: object, error: Exception) -> None:
        self.corrupt += 1
        _log.warning("tier %s: %s is dropped: %s", self.name, path, error)

    def _refuse(self, error: Exception) -> None:
        self.failures += 1
        number = getattr(error, "errno", None)
        reason = errno.errorcode.get(number or 0, type(error).__name__)
        if reason != self._refused:
            self._refused = reason
            _log.warning("tier %s in %s: %s; going on without it", self.name, self._place, error)


def anchor_name(anchor: Anchor) -> str:
    """Return a file name that encodes the anchor exactly."""
    return "_".join(x.hex() for x in (anchor.sigma, anchor.timestep, anchor.input_scale)) + SUFFIX


def anchor_of(name: str) -> Anchor | None:
    """The anchor of an entry's file; None for other files."""
    stem, dot, _ = name.partition(SUFFIX)
    try:
        return Anchor(*map(float.fromhex, stem.split("_"))) if dot else None
    except (ValueError, TypeError):
        return None
