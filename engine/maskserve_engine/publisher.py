"""The engine's status record: what it says of itself without being asked (design §4)."""

from __future__ import annotations

from pathlib import Path

from maskserve_core.config import Config, model_name
from maskserve_core.status import StatusWriter, WorkerStatus
from maskserve_engine.cache import TemplateCache
from maskserve_engine.desk import Desk


def new_counters() -> dict[str, float]:
    """The engine's totals since its start, by metric; the cache has counters of its own."""
    return {
        "steps_total": 0,
        "step_tokens_total": 0,
        "edits_total": 0,
        "active_tokens_total": 0,
        "dense_rows_total": 0,
        "cached_rows_total": 0,
        "priming_rows_total": 0,
        "step_seconds_total": 0.0,
        "step_load_stall_seconds_total": 0.0,
    }


class Publisher:
    """Writes the record from what the engine's parts hold now; used by the engine thread only.

    Without a runtime folder it writes nothing.
    """

    def __init__(
        self, config: Config, desk: Desk, cache: TemplateCache, counters: dict[str, float]
    ) -> None:
        self._config, self._desk, self._cache, self._counters = config, desk, cache, counters
        folder = config.runtime_dir
        self._status = StatusWriter(Path(folder) / "status") if folder else None

    def publish(self, state: str) -> None:
        if self._status is None:
            return
        running, waiting = self._desk.rows()
        self._status.write(
            WorkerStatus(
                worker=self._config.worker,
                model=model_name(self._config),
                state=state,
                max_rows=self._config.engine.max_rows,
                max_waiting=self._config.engine.max_waiting,
                running=running,
                waiting=waiting,
                templates={"device": self._cache.template_ids()},
                tier_bytes={"device": self._cache.store.nbytes},
                counters={**self._counters, **self._cache.counters()},
            )
        )

    def close(self) -> None:
        if self._status is not None:
            self._status.close()
