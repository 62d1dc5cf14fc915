"""The assignment of models to devices: loads and bytes in, placements out.

The search is greedy: each model gets one place, and copies fill the free room. The value of a
placement is the factor by which all loads may grow until a device is full (`sustained`), if calls
go to the least busy device that has their model. A copy goes first to a model that keeps the
busiest devices busy. The result is seldom far from the best (docs/adr/0060-live-placement.md).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

Placement = Mapping[str, frozenset[str]]
"""Device → models."""
_NOTHING_PLACED: Placement = MappingProxyType({})
_MOST_ROUNDS = 100
"""Most rounds in which the models' calls move to less busy devices."""
_LEAST_MOVE = 1e-9
"""Least part of a device's time by which a move of calls counts."""
_BUSIEST = 1.0 - 1e-6
"""Share of the greatest busy time from which on a device counts as one of the busiest."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A model and its load."""

    name: str
    nbytes: int
    load: float
    """Devices that it keeps busy: calls per second times seconds per call."""
    only: Set[str] | None = None
    """Devices that may have it; None: all."""

    def may_have(self, device: str) -> bool:
        """Return True if the device may have the model, given room."""
        return self.only is None or device in self.only


def sustained(models: Sequence[ModelLoad], placed: Placement) -> float:
    """Return the factor by which all loads may grow until a device is full."""
    busy, _ = _busiest(models, placed)
    return 1.0 / busy if busy else math.inf


def place(models: Sequence[ModelLoad], rooms: Mapping[str, int]) -> dict[str, frozenset[str]]:
    """Place models on devices.

    Args:
        models: models, each of which must get a place.
        rooms: bytes of each device for models.

    Raises:
        ValueError: they do not all fit, as far as the search went.
    """
    best = max(
        placements(models, rooms), key=lambda placed: sustained(models, placed), default=None
    )
    if best is None:
        largest = max(models, key=lambda model: model.nbytes)
        raise ValueError(
            f"models of {sum(model.nbytes for model in models)} bytes, {largest.name} of "
            f"{largest.nbytes} the largest, do not fit on {len(rooms)} devices"
        )
    return best


def placements(
    models: Sequence[ModelLoad], rooms: Mapping[str, int], current: Placement = _NOTHING_PLACED
) -> Iterator[dict[str, frozenset[str]]]:
    """Yield placements of all models, from several orders of the first copies.

    Args:
        models: the models.
        rooms: bytes of each device for models.
        current: present placement; of devices with equal room, one that has the model is chosen.
    """
    for spread in (True, False):
        for weigh in (_by_bytes, _by_load, _by_load_of_a_byte):
            ordered_models = sorted(models, key=weigh)
            first = _one_copy_of_all(ordered_models, rooms, current, spread=spread)
            if first is not None:
                yield filled(models, rooms, first)


def _by_bytes(model: ModelLoad) -> float:
    return -model.nbytes


def _by_load(model: ModelLoad) -> float:
    return -model.load


def _by_load_of_a_byte(model: ModelLoad) -> float:
    return -model.load / max(1, model.nbytes)


def _one_copy_of_all(
    models: Sequence[ModelLoad], rooms: Mapping[str, int], current: Placement, *, spread: bool
) -> dict[str, frozenset[str]] | None:
    """Place each model on the device with most (or, without `spread`, least) room.

    None: one of them does not fit.
    """
    free_bytes, placed = dict(rooms), dict.fromkeys(rooms, frozenset[str]())
    sign = 1 if spread else -1
    for model in models:
        name = max(
            (name for name in rooms if model.may_have(name) and model.nbytes <= free_bytes[name]),
            key=lambda name: (sign * free_bytes[name], model.name in current.get(name, ())),
            default=None,
        )
        if name is None:
            return None
        free_bytes[name] -= model.nbytes
        placed[name] |= {model.name}
    return placed


def filled(
    models: Sequence[ModelLoad], rooms: Mapping[str, int], placed: Placement
) -> dict[str, frozenset[str]]:
    """Return a placement whose free room is filled with copies.

    First come models that keep the busiest devices busy, then models without a place, then those
    with the most load per copy.
    """
    by_name = {model.name: model for model in models}
    filled_devices = dict(placed)
    while True:
        copies = Counter(itertools.chain.from_iterable(filled_devices.values()))
        _, busiest = _busiest(models, filled_devices)
        candidates = sorted(
            models,
            key=lambda m: (
                m.name not in busiest, m.name in copies, -m.load / (copies[m.name] or 1), m.name,
            ),
        )  # fmt: skip
        emptiest = sorted(filled_devices, key=lambda name: len(filled_devices[name]))
        for model, name in itertools.product(candidates, emptiest):
            names = filled_devices[name]
            if (
                model.name not in names
                and model.may_have(name)
                and _size(by_name, names) + model.nbytes <= rooms[name]
            ):
                filled_devices[name] = names | {model.name}
                break
        else:
            return filled_devices


def _size(by_name: Mapping[str, ModelLoad], names: Iterable[str]) -> int:
    return sum(by_name[model].nbytes for model in names)


def _busiest(models: Sequence[ModelLoad], placed: Placement) -> tuple[float, frozenset[str]]:
    """Return the part of its time that the busiest device is busy, and the models that it serves.

    In turn, each model divides its calls so that the least busy of its devices become equally busy.
    This converges to the least busy time that the busiest device can have. Devices with the same
    models count as one group. A model without a device makes the time infinite.
    """
    loaded = [model for model in models if model.load > 0.0]
    loaded_names = frozenset(model.name for model in loaded)
    groups = Counter(names & loaded_names for names in placed.values())
    busy_by_model = {
        model.name: {names: 0.0 for names in groups if model.name in names} for model in loaded
    }
    """Model -> busy time that it gives each device of a group."""
    if unplaced := frozenset(
        name for name, groups_of_model in busy_by_model.items() if not groups_of_model
    ):
        return math.inf, unplaced
    busy = dict.fromkeys(groups, 0.0)
    for _ in range(_MOST_ROUNDS):
        largest_change = 0.0
        for model in loaded:
            busy_of_groups = busy_by_model[model.name]
            for names, part_busy in busy_of_groups.items():
                busy[names] -= part_busy
            total, count = model.load, 0
            for names in sorted(busy_of_groups, key=busy.__getitem__):
                if count and busy[names] * count >= total:
                    break
                total += busy[names] * groups[names]
                count += groups[names]
            for names, part_busy in busy_of_groups.items():
                busy_of_groups[names] = max(0.0, total / count - busy[names])
                busy[names] += busy_of_groups[names]
                largest_change = max(largest_change, abs(busy_of_groups[names] - part_busy))
        if largest_change < _LEAST_MOVE:
            break
    busiest_time = max(busy.values(), default=0.0)
    return busiest_time, frozenset(
        name
        for name, busy_of_groups in busy_by_model.items()
        if any(
            part_busy > 0.0 and busy[n] >= busiest_time * _BUSIEST
            for n, part_busy in busy_of_groups.items()
        )
    )
