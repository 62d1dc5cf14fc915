"""Operations on adapters of a worker's host, called by `control` (design §3)."""

from __future__ import annotations

from typing import Any

from maskserve_common.config import Config
from maskserve_common.contracts.keys import ADAPTER_NAME
from maskserve_common.errors import InvalidRequest
from maskserve_lora.catalogue import KnownAdapter
from maskserve_lora.store import AdapterStore

_FIELD = "OP.name"


class AdapterOperations:
    """Operations on the adapters of `[adapters] store`; each lists the storage anew."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = AdapterStore(config)

    def close(self) -> None:
        self._store.close()

    def overview(self) -> dict[str, Any]:
        """Return a description of each adapter, with its tiers on this host."""
        if not self._config.adapters.store:
            return {"adapters": [], "problem": ""}
        self._store.catalogue.scan(at_once=True, wait=False)
        pinned = self._store.host.pinned()
        digests = self._digests()
        return {
            "adapters": [
                _description(adapter, digests, name in pinned)
                for name, adapter in sorted(self._store.catalogue.all().items())
            ],
            "problem": self._store.catalogue.problem,
        }

    def check(self, name: str) -> dict[str, Any]:
        """Check all weights of an adapter, without loading it.

        Raises:
            MaskserveError: the adapter is unknown or cannot be served.
        """
        adapter = self._known(name)
        digest = self._store.checked(adapter, _FIELD)
        record = _description(adapter, self._digests(), name in self._store.host.pinned())
        return {**record, "digest": digest}

    def load(self, name: str) -> dict[str, Any]:
        """Check all weights of an adapter, and load it to this host's memory.

        Raises:
            MaskserveError: as `AdapterStore.fetch` does.
        """
        adapter = self._known(name)
        file = self._store.fetch(name, adapter.version, _FIELD)
        digests = {(name, adapter.version, "host"): file.digest}
        return _description(adapter, digests, name in self._store.host.pinned())

    def pin(self, name: str, *, pinned: bool) -> dict[str, Any]:
        """Load an adapter to this host's memory and protect it from eviction; or end that.

        Raises:
            MaskserveError: as `load` does.
        """
        if not pinned:
            self._check_name(name)
            self._store.host.pin(name, pinned=False)
            return {"name": name, "pinned": False}
        record = self.load(name)
        self._store.host.pin(name, pinned=True)
        return {**record, "pinned": True}

    def evict(self, name: str) -> dict[str, Any]:
        """Remove an adapter's files from this host; the storage keeps it."""
        self._check_name(name)
        self._store.host.pin(name, pinned=False)
        return {"name": name, "freed_bytes": self._store.forget(name)}

    def _digests(self) -> dict[tuple[str, str, str], str]:
        """Return (name, version, tier) -> digest of the adapters on this host."""
        folders = {"host": self._store.host}
        if self._store.disk is not None:
            folders["disk"] = self._store.disk
        return {
            (file.name, file.version, tier): file.digest
            for tier, folder in folders.items()
            for file in folder.files()
        }

    def _known(self, name: str) -> KnownAdapter:
        self._check_name(name)
        self._store.catalogue.scan(at_once=True, wait=False)
        return self._store.catalogue.find(name, _FIELD)

    def _check_name(self, name: str) -> None:
        if not self._config.adapters.store:
            raise InvalidRequest("OP.op", "adapters are not served here", "[adapters] store")
        if ADAPTER_NAME.fullmatch(name) is None:
            raise InvalidRequest(_FIELD, "has another form", "the name of an adapter")


def _description(
    adapter: KnownAdapter, digests: dict[tuple[str, str, str], str], pinned: bool
) -> dict[str, Any]:
    digest_by_tier = {
        tier: digest
        for tier in ("host", "disk")
        if (digest := digests.get((adapter.name, adapter.version, tier)))
    }
    hides = [f"hides {adapter.hides}, which has the same name; rename one"] if adapter.hides else []
    return {
        "name": adapter.name,
        "bytes": adapter.nbytes,
        "rank": adapter.rank,
        "parts": list(adapter.parts),
        "notes": [*hides, *adapter.notes],
        "problem": adapter.problem,
        "version": adapter.version,
        "digest": next(iter(digest_by_tier.values()), ""),
        "tiers": list(digest_by_tier),
        "pinned": pinned,
    }
