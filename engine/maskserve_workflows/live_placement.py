"""The choice of node servers for models while they run: servers' records in, changes out.

The servers report what they have loaded, so all routers agree, and a new router only needs the
calls' load. The placement stays while servers are not too busy. It also stays if no better one
(`placement`) is worth its loads. A call goes to a server that has its model, and elsewhere only if
none has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from maskserve_common.contracts.status_record import BUSY_SHARE
from maskserve_workflows.placement import ModelLoad, Placement, filled, placements, sustained
from maskserve_workflows.scheduling import NodePlace, Prices, ReadyNode

_ENOUGH: Final = 1.0 / BUSY_SHARE
"""Value of `sustained` at which a placement needs no change."""
_GAIN: Final = 1.2
"""Least factor by which another placement must be better."""
_WINDOW_S: Final = 60.0
"""Seconds of the window in which calls count; older ones count less."""
_ROUTER: Final = ""
"""The place that has a call's inputs."""
_IDLE: Final = 1e-3
"""Load below which a model counts as idle."""
Record: TypeAlias = Mapping[str, Any]
"""The type of `NodeModels.record`."""
_Telemetry: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Telemetry of one server, by model."""


class _ReportedPlacement(NamedTuple):
    """Current placement, as the servers that answer report it."""

    telemetry: Mapping[str, _Telemetry]
    device_bytes: Mapping[str, int]
    """Bytes for models on each server."""
    placed: Placement
    """Models with weights on each server, or about to be loaded there."""
    busy: Mapping[str, float]
    """Number of servers that the calls of each model keep busy."""


class LivePlacement:
    """Placement that follows the load. Any thread may call its methods, but for `observe`."""

    def __init__(self) -> None:
        self._reported = _ReportedPlacement({}, {}, {}, {})
        self._ended: dict[tuple[str, str], int] = {}
        """(server, model) -> number of ended calls at the last count."""
        self._counted_at = 0.0
        self._busy: dict[str, float] = {}
        """Model -> seconds that its calls ran in the window."""
        self._observed_s = 0.0
        """Seconds of the window that have been observed."""

    def score(
        self, model: str, server: str, queue_s: float, nbytes: int = 0, byte_s: float = 0.0
    ) -> tuple[int, float]:
        """Return the rank of a server for a call; the lowest gets it.

        The first element is 0 where the model is loaded, 1 where it has free room, 2 where room can
        be made, and 3 where it cannot be loaded or nothing is known. The second is the predicted
        seconds to the call's end, `Prices.score` at measured prices.

        Args:
            model: model of the call.
            server: name of the server.
            queue_s: seconds of work that the server still has.
            nbytes: bytes of the call's inputs.
            byte_s: seconds that the server takes to receive a byte of them.
        """
        models, rooms, placed, _ = self._reported
        record = models.get(server, {}).get(model)
        if record is None or not _is_available(record, rooms[server]):
            return 3, queue_s + nbytes * byte_s
        loaded = frozenset({model}) if record["state"] == "ready" else frozenset()
        node = ReadyNode(
            model, 0.0, math.inf, record["seconds"], 0.0, frozenset({model}), {_ROUTER: nbytes}
        )
        prices = Prices({model: record.get("load_s", 0.0)}, byte_s)
        seconds = prices.score(node, NodePlace(server, queue_s, loaded), 0.0)
        free_bytes = rooms[server] - sum(models[server][name]["bytes"] for name in placed[server])
        is_placed = not record["bytes"] or model in placed[server]
        place = 0 if is_placed else 1 if record["bytes"] <= free_bytes else 2
        return place, seconds

    def busy(self) -> Mapping[str, float]:
        """Return how many servers the calls of each model kept busy lately, over all routers."""
        return self._reported.busy

    def count_call(self, model: str, server: str) -> None:
        """Note that a call goes to a server and so loads its model; the next calls follow it."""
        models, _, placed, _ = self._reported
        if model in models.get(server, {}) and model not in placed[server]:
            placed = {**placed, server: placed[server] | {model}}
            self._reported = self._reported._replace(placed=placed)

    def observe(
        self, records: Mapping[str, Record | None], now: float
    ) -> dict[str, frozenset[str]]:
        """Read the servers' records; return the models to load, for each server that has to change.

        Args:
            records: server -> record; None: it does not answer.
            now: seconds of a clock.
        """
        answered = {name: record for name, record in records.items() if record is not None}
        model_records = {
            name: {model_record["name"]: model_record for model_record in record["models"]}
            for name, record in answered.items()
        }
        rooms = {name: record["device_bytes"] for name, record in answered.items()}
        loaded = {
            name: frozenset(
                model
                for model, model_record in models.items()
                if model_record["bytes"] and model_record["state"] in ("ready", "loading")
            )
            for name, models in model_records.items()
        }
        busy = self._count(model_records, now)
        loads = _loads(model_records, rooms, busy)
        placed = _better(loads, rooms, loaded, model_records)
        self._reported = _ReportedPlacement(model_records, rooms, placed, busy)
        return {name: names for name, names in placed.items() if names != loaded[name]}

    def _count(self, telemetry: Mapping[str, _Telemetry], now: float) -> dict[str, float]:
        """Return the number of servers that each model keeps busy."""
        elapsed_s = now - self._counted_at if self._ended else 0.0
        self._counted_at, decay = now, math.exp(-elapsed_s / _WINDOW_S)
        self._observed_s = self._observed_s * decay + elapsed_s
        self._busy = {name: seconds * decay for name, seconds in self._busy.items()}
        old_counts, self._ended = self._ended, {}
        for server, models in telemetry.items():
            for name, record in models.items():
                ended: int = record["ended"]
                new = ended - old_counts.get((server, name), ended)
                new = new if new >= 0 else ended  # the server was restarted
                self._busy[name] = self._busy.get(name, 0.0) + new * record["seconds"]
                self._ended[server, name] = ended
        return {name: seconds / (self._observed_s or 1.0) for name, seconds in self._busy.items()}


def _loads(
    telemetry: Mapping[str, _Telemetry], rooms: Mapping[str, int], busy: Mapping[str, float]
) -> list[ModelLoad]:
    """Return the loads of models with weights that some server can hold.

    A server where a model failed to load is left out; a call tries it there again only if no other
    server can take it.
    """
    sizes: dict[str, int] = {}
    only: dict[str, set[str]] = {}
    for server, models in telemetry.items():
        for name, record in models.items():
            if record["bytes"] and _is_available(record, rooms[server]):
                sizes[name] = max(sizes.get(name, 0), _needed(record))
                only.setdefault(name, set()).add(server)
    return [
        ModelLoad(name, nbytes, busy[name] if busy[name] > _IDLE else 0.0, only[name])
        for name, nbytes in sorted(sizes.items())
    ]


def _is_available(telemetry: Mapping[str, Any], room: int) -> bool:
    """Return True if a server has room for a model and no load of it failed there."""
    return telemetry["state"] != "failed" and _needed(telemetry) <= room


def _needed(telemetry: Mapping[str, Any]) -> int:
    nbytes: int = telemetry.get("needs_bytes", telemetry["bytes"])
    return nbytes


def _better(
    loads: Sequence[ModelLoad],
    rooms: Mapping[str, int],
    current: Placement,
    telemetry: Mapping[str, _Telemetry],
) -> Placement:
    """Return a placement that is worth its loads, or the current one."""
    current_score = sustained(loads, current)
    if len(current) < 2 or current_score >= _ENOUGH:
        return current

    def worth(placed: Placement) -> float:
        """Return `sustained`, reduced by the share of the window that loads take."""
        load_s: float = sum(
            telemetry[server][model].get("load_s", 0.0)
            for server, model_names in placed.items()
            for model in model_names - current[server]
        )
        return sustained(loads, placed) * max(1.0 - load_s / (len(placed) * _WINDOW_S), 0.0)

    for models in (loads, [model_load for model_load in loads if model_load.load]):
        names = {model_load.name for model_load in models}
        present = {server: model_names & names for server, model_names in current.items()}
        best: Placement = filled(models, rooms, present)
        if worth(best) < _ENOUGH:
            best = max([best, *placements(models, rooms, present)], key=worth)
        if worth(best) >= _GAIN * current_score:
            return best
    return current
