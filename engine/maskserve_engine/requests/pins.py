"""Which templates were asked to be kept from eviction, and which of their entries are."""

from __future__ import annotations

from maskserve_engine.cache.store import Store


class Pins:
    """Pins by template; a template has entries under several keys (text lengths, formats).

    Args:
        store: of the entries.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: dict[str, set[str]] = {}
        """Template ids that are pinned, and the keys that are for it."""

    def __contains__(self, template_id: str) -> bool:
        return template_id in self._keys

    def pin(self, template_id: str) -> bool:
        """Keep a template's entries, those to come too, from eviction; whether any are held."""
        self._keys.setdefault(template_id, set())
        keys = self._store.keys_of(template_id)
        for key in keys:
            self.primed(template_id, key)
        return bool(keys)

    def primed(self, template_id: str, key: str) -> None:
        """Entries are whole: they are kept if their template is pinned."""
        if template_id in self._keys:
            self._keys[template_id].add(key)
            self._store.pin(key, pinned=True)

    def unpin(self, template_id: str) -> bool:
        """Undo `pin`, of another worker of the host too; False when it was not pinned."""
        keys = self._store.keys_of(template_id)
        pinned = template_id in self or any(
            held.pinned
            for templates in self._store.held().values()
            for key, held in templates.items()
            if key in keys
        )
        for key in self._keys.pop(template_id, set()).union(keys):
            self._store.pin(key, pinned=False)
        return pinned

    def check_integrity(self) -> None:
        """Raises AssertionError when the device keeps what nobody asked for, none being primed."""
        left = self._store.memory.pinned.difference(*self._keys.values())
        assert not left, f"{len(left)} pins that nobody asked for"
