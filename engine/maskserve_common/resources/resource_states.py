"""States of resources that edits need, and the edits that wait for them.

    absent ──reserve()──► loading ──arrived()──► ready
                             └────failed()────► failed

    absent and failed resources begin with reserve()

`ResourceStates` enforces the byte budget of a kind: a ready resource stays until one with a higher
score takes its room. Kinds without a budget (templates, whose entries the store keeps) have only
waiting edits: `arrived` ends their wait, and the resource is absent again. Used by the engine
thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from maskserve_common.contracts.keys import scope_of
from maskserve_common.errors import MaskserveError, Overloaded
from maskserve_common.shares import room


class Resource(NamedTuple):
    kind: str
    """Kind of the resource, such as `template`."""
    name: str


ResourceState = Literal["absent", "loading", "ready", "failed"]


@dataclass(slots=True)
class _Record:
    state: ResourceState
    nbytes: int
    score: float
    error: MaskserveError | None = None


class ResourceStates:
    """Resources by name, and the edits that wait for sets of them.

    Args:
        most_waiting: most edits that may wait.
        budgets: bytes by kind; other kinds have no budget.
        on_evicted: called with each resource that is evicted.
    """

    def __init__(
        self,
        most_waiting: int,
        budgets: Mapping[str, int] | None = None,
        on_evicted: Callable[[Resource], None] = lambda resource: None,
    ) -> None:
        self._most, self._budgets = most_waiting, dict(budgets or {})
        self._on_evicted = on_evicted
        self._records: dict[Resource, _Record] = {}
        self._pins: Counter[Resource] = Counter()
        self._missing: dict[str, set[Resource]] = {}
        """Request id → resources that it waits for, in order of arrival."""

    def state(self, resource: Resource) -> ResourceState:
        record = self._records.get(resource)
        return "absent" if record is None else record.state

    def error(self, resource: Resource) -> MaskserveError | None:
        """Return the error of a failed resource; None: it has not failed."""
        record = self._records.get(resource)
        return None if record is None else record.error

    def nbytes(self, kind: str) -> int:
        """Return the bytes of a kind's loaded and loading resources."""
        return sum(
            record.nbytes for resource, record in self._records.items() if resource.kind == kind
        )

    def nbytes_of(self, resource: Resource) -> int:
        """Return the bytes that are reserved for a resource."""
        record = self._records.get(resource)
        return 0 if record is None else record.nbytes

    def reserve(self, resource: Resource, nbytes: int = 0, score: float = 0.0) -> bool:
        """Reserve bytes for a resource and set it loading; return False if there is no room.

        It evicts ready resources of the same kind, the lowest score first, but none with a higher
        score and none that is pinned.
        """
        if self.state(resource) in ("loading", "ready"):
            return True
        victims = self._victims(resource, nbytes, score)
        if victims is None:
            return False
        for victim in victims:
            self.evict(victim)
        self._records[resource] = _Record("loading", nbytes, score)
        return True

    def record_arrival(self, resource: Resource) -> list[str]:
        """Set a resource ready; return the edits that now wait for nothing, in order of arrival."""
        if resource.kind in self._budgets:
            record = self._records.setdefault(resource, _Record("loading", 0, 0.0))
            record.state, record.error = "ready", None
        else:
            self._records.pop(resource, None)
        ready = []
        for request_id, missing in self._missing.items():
            missing.discard(resource)
            if not missing:
                ready.append(request_id)
        for request_id in ready:
            del self._missing[request_id]
        return ready

    def record_failure(self, resource: Resource, error: MaskserveError) -> list[str]:
        """Set a resource failed; return the edits that waited for it."""
        self._records[resource] = _Record("failed", 0, 0.0, error)
        waiting = [name for name, missing in self._missing.items() if resource in missing]
        for request_id in waiting:
            del self._missing[request_id]
        return waiting

    def wait(self, request_id: str, resources: Iterable[Resource]) -> bool:
        """Let an edit wait until all these resources are ready; return False if they already are.

        Raises:
            MaskserveError: one of them has failed.
            Overloaded: too many edits wait, in all or of its key.
        """
        missing = {item for item in resources if self.state(item) != "ready"}
        for item in missing:
            error = self.error(item)
            if error is not None:
                raise error
        if not missing:
            return False
        key = scope_of(request_id)
        key_waiting = sum(scope_of(name) == key for name in self._missing)
        if room(self._most, len(self._missing), key_waiting, key) < 1:
            kinds = " or ".join(sorted({item.kind for item in missing}))
            owner_text = " of this key" if len(self._missing) < self._most else ""
            count = key_waiting if owner_text else len(self._missing)
            raise Overloaded(f"{count} edits{owner_text} wait for their {kinds}; try again later")
        self._missing[request_id] = missing
        return True

    def leave(self, request_id: str) -> None:
        """Remove an edit that waits no longer."""
        self._missing.pop(request_id, None)

    def pin(self, resource: Resource) -> None:
        """Protect a ready or loading resource from eviction, until `unpin` was called as often as
        `pin`.
        """
        self._pins[resource] += 1

    def unpin(self, resource: Resource) -> None:
        self._pins[resource] -= 1
        if self._pins[resource] <= 0:
            del self._pins[resource]

    def pinned(self, resource: Resource) -> bool:
        return resource in self._pins

    def touch(self, resource: Resource, score: float) -> None:
        """Set the score of a loaded or loading resource."""
        self._records[resource].score = score

    def evict(self, resource: Resource) -> None:
        """Evict a resource, if it is ready."""
        if self.state(resource) == "ready":
            del self._records[resource]
            self._on_evicted(resource)

    def check_integrity(self) -> None:
        """Raise AssertionError if a budget is exceeded, or an edit waits for nothing."""
        for kind, budget in self._budgets.items():
            assert self.nbytes(kind) <= budget, f"{kind}: {self.nbytes(kind)} of {budget} bytes"
        assert all(self._missing.values()), "an edit waits for nothing"

    def _victims(self, resource: Resource, nbytes: int, score: float) -> list[Resource] | None:
        """Return the resources to evict for a new one; None: it does not fit even then."""
        budget = self._budgets.get(resource.kind)
        if budget is None:
            return []
        over = self.nbytes(resource.kind) + nbytes - budget
        candidates = [
            (record.score, candidate)
            for candidate, record in self._records.items()
            if candidate.kind == resource.kind
            and record.state == "ready"
            and record.score <= score
            and candidate not in self._pins
        ]
        victims: list[Resource] = []
        for _, candidate in sorted(candidates):
            if over <= 0:
                break
            victims.append(candidate)
            over -= self._records[candidate].nbytes
        return victims if over <= 0 else None
