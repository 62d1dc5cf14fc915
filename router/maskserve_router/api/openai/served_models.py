"""The models that clients may name: those that workers serve now, workflows, and aliases."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.status_record import Served
from maskserve_common.errors import InvalidRequest
from maskserve_router.api.openai.answers import ModelNotFound
from maskserve_router.api.openai.form import Quality
from maskserve_router.workers.pool import Pool

_STEPS: Final[Mapping[Quality, float]] = {"low": 0.5, "high": 1.5, "hd": 1.5}
"""Steps by quality, as a multiple of the model's; others have the model's."""


class ServedModels:
    """Looks models up. Use it from any thread.

    Args:
        pool: the workers.
        workflows: names of workflows.
        aliases: name that clients have built in -> name of a served model.
    """

    def __init__(self, pool: Pool, workflows: Collection[str], aliases: Mapping[str, str]) -> None:
        self._pool, self._workflows, self._aliases = pool, workflows, aliases

    def names(self) -> list[str]:
        """Return the names that a request may give."""
        served = self._without_aliases()
        aliases = {alias for alias, name in self._aliases.items() if name in served}
        return sorted(served | aliases)

    def resolved(self, name: str | None) -> str | None:
        """Return the served name of a model; None: any worker's.

        Raises:
            ModelNotFound: no worker serves it.
        """
        if name is None:
            return None
        served = self._without_aliases()
        served_name = name if name in served else self._aliases.get(name, name)
        if served_name not in served:
            raise ModelNotFound(name, self.names())
        return served_name

    def properties(self, name: str | None = None) -> list[Served]:
        """Return the properties of a model at each worker that serves it; None: of all models."""
        statuses = [worker.status for worker in self._pool.up() if worker.status]
        return [
            status.served for status in statuses if status.served and name in (None, status.model)
        ]

    def makes(self, kind: EditKind, name: str | None) -> bool:
        """Return whether a worker makes edits of a kind with a model."""
        return any(kind in served.edit_kinds for served in self.properties(name))

    def varying(self, name: str | None) -> str | None:
        """Return the model of a variation: the named one, or the one with most workers of those
        that begin an edit without a mask at the noised source; None: no worker tells.

        Raises:
            InvalidRequest: the model, or every model, edits by instructions or with masks only.
        """
        statuses = [worker.status for worker in self._pool.up() if worker.status]
        tellers = [
            (status.model, status.served)
            for status in statuses
            if status.served and name in (None, status.model)
        ]
        able = [
            model
            for model, served in tellers
            if "edit" in served.edit_kinds and not served.references
        ]
        if name in self._workflows or (tellers and not able):
            problem = "needs a prompt or a mask to change a picture"
            if name is None:
                raise InvalidRequest("model", f"every served model {problem}", "/v1/images/edits")
            raise InvalidRequest("model", f"{name} {problem}", "/v1/images/edits, or a base model")
        return max(sorted(set(able)), key=able.count, default=name)

    def steps(self, name: str | None, quality: Quality) -> int | None:
        """Return the steps of a quality; None: the model's own, or no worker says how many."""
        own_steps = [served.num_inference_steps for served in self.properties(name)]
        if quality not in _STEPS or not own_steps:
            return None
        return max(1, math.ceil(_STEPS[quality] * min(own_steps)))

    def _without_aliases(self) -> set[str]:
        models = {worker.status.model for worker in self._pool.up() if worker.status}
        return {*models, *self._workflows}
