"""The assignment of models to devices: loads and bytes in, placements out.

The value of a placement is the factor by which all loads may grow until devices are full
(`sustained`). By Hall's theorem some models are *tight*: the devices that have any of them are full
with them alone. A copy of a tight model is therefore added to a device that has none of them,
repeatedly. If no such device has room, one with more copies than necessary makes room.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

Placed = Mapping[str, frozenset[str]]
"""Device → models."""
_LEAST_GAIN = 1e-9
_MOST_LOOKS = 10_000
"""Most placements of models that are tried before they count as not fitting."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A model and its load."""

    name: str
    nbytes: int
    load: float
    """Devices that it keeps busy: calls per second times seconds per call."""
    only: Set[str] | None = None
    """Devices that may have it; None: all."""

    def may(self, device: str) -> bool:
        """Return True if the device may have the model, given room."""
        return self.only is None or device in self.only


def sustained(models: Sequence[ModelLoad], placed: Placed) -> float:
    """Return the factor by which all loads may grow until devices are full.

    The devices share each model's calls in the best way.
    """
    return _tight(models, placed)[0]


def place(models: Sequence[ModelLoad], rooms: Mapping[str, int]) -> dict[str, frozenset[str]]:
    """Place models on devices.

    Args:
        models: models, each of which must get a place.
        rooms: bytes of each device for models.

    Raises:
        ValueError: they do not all fit.
    """
    best: dict[str, frozenset[str]] | None = None
    worth = -1.0
    for spread in (True, False):
        for weigh in (_by_bytes, _by_load, _by_load_of_a_byte):
            first = _one_copy_of_all(sorted(models, key=weigh), rooms, spread=spread)
            if first is None:
                continue
            placement = grown(models, rooms, first)
            if (score := sustained(models, placement)) > worth:
                best, worth = placement, score
            if score >= _most(models, rooms):
                return placement
    if best is None:
        largest = max(models, key=lambda model: model.nbytes)
        raise ValueError(
            f"models of {sum(model.nbytes for model in models)} bytes, {largest.name} of "
            f"{largest.nbytes} the largest, do not fit on {len(rooms)} devices"
        )
    return best


def _by_bytes(model: ModelLoad) -> float:
    return -model.nbytes


def _by_load(model: ModelLoad) -> float:
    return -model.load


def _by_load_of_a_byte(model: ModelLoad) -> float:
    return -model.load / max(1, model.nbytes)


def _one_copy_of_all(
    models: Sequence[ModelLoad], rooms: Mapping[str, int], *, spread: bool
) -> dict[str, frozenset[str]] | None:
    """Place each model on the device with most (or, without `spread`, least) room, with
    backtracking.

    None: they do not fit, as far as the search went.
    """
    free_bytes = dict(rooms)
    placed: dict[str, set[str]] = {name: set() for name in rooms}
    looks = _MOST_LOOKS

    def fits(number: int) -> bool:
        nonlocal looks
        if number == len(models):
            return True
        model = models[number]
        for name in sorted(free_bytes, key=free_bytes.__getitem__, reverse=spread):
            looks -= 1
            if free_bytes[name] < model.nbytes or not model.may(name) or looks < 0:
                continue
            free_bytes[name] -= model.nbytes
            placed[name].add(model.name)
            if fits(number + 1):
                return True
            free_bytes[name] += model.nbytes
            placed[name].remove(model.name)
        return False

    return {name: frozenset(names) for name, names in placed.items()} if fits(0) else None


def grown(
    models: Sequence[ModelLoad], rooms: Mapping[str, int], placed: Placed
) -> dict[str, frozenset[str]]:
    """Return a placement with added copies, first while they help and then wherever room is free.

    An existing copy is removed only for one that helps more.
    """
    by_name = {model.name: model for model in models}
    while True:
        placement = _filled(by_name, rooms, placed)
        score, tight = _tight(models, placement)
        if score >= _most(models, rooms):
            return placement
        best, worth = None, score * (1.0 + _LEAST_GAIN)
        for change in _changes(by_name, rooms, placement, tight):
            if (change_score := sustained(models, {**placement, **change})) > worth:
                best, worth = change, change_score
        if best is None:
            return placement
        placed = {**placement, **best}


def _filled(
    by_name: Mapping[str, ModelLoad], rooms: Mapping[str, int], placed: Placed
) -> dict[str, frozenset[str]]:
    """Fill the free room: first with copies of tight models, then of models without a place, then
    of those with the most load per copy.
    """
    placed = dict(placed)
    models = list(by_name.values())
    while True:
        copies = Counter(model for names in placed.values() for model in names)
        _, tight = _tight(models, placed)
        candidates = sorted(
            models,
            key=lambda m: (
                m.name not in tight, m.name in copies, -m.load / (copies[m.name] or 1), m.name,
            ),
        )  # fmt: skip
        for model, name in itertools.product(
            candidates, sorted(placed, key=lambda n: len(placed[n]))
        ):
            names = placed[name]
            if (
                model.name not in names
                and model.may(name)
                and _size(by_name, names) + model.nbytes <= rooms[name]
            ):
                placed[name] = names | {model.name}
                break
        else:
            return placed


def _changes(
    by_name: Mapping[str, ModelLoad],
    rooms: Mapping[str, int],
    placed: Placed,
    tight: frozenset[str],
) -> Iterator[dict[str, frozenset[str]]]:
    """Yield placements in which a device without the tight models gets one of them in place of
    others.

    Of equal devices, only one is tried. A model that loses its only copy moves elsewhere.
    """
    copies = Counter(model for names in placed.values() for model in names)
    tried = set()
    for name, names in placed.items():
        missing = frozenset(model for model in tight - names if by_name[model].may(name))
        if not missing or (names, missing, rooms[name]) in tried:
            continue
        tried.add((names, missing, rooms[name]))
        for model in sorted(missing):
            for removed in _sets(names, by_name[model].nbytes + _size(by_name, names) - rooms[name],
                              by_name):  # fmt: skip
                change = {name: names - removed | {model}}
                if all(
                    _moved(other_model, by_name, rooms, {**placed, **change}, change)
                    for other_model in removed
                    if copies[other_model] == 1
                ):
                    yield change


def _sets(
    names: Iterable[str], over: int, by_name: Mapping[str, ModelLoad]
) -> Iterator[frozenset[str]]:
    """Yield sets of one or two of the placed models that free enough bytes."""
    for count in (1, 2):
        for subset in itertools.combinations(sorted(names), count):
            if _size(by_name, subset) >= over:
                yield frozenset(subset)


def _moved(
    model: str,
    by_name: Mapping[str, ModelLoad],
    rooms: Mapping[str, int],
    placed: Placed,
    change: dict[str, frozenset[str]],
) -> bool:
    """Move a model to another device that has room, or that copies can leave.

    Record the moves in `change`. Return False: no such device was found.
    """
    current = {name: change.get(name, names) for name, names in placed.items()}
    if any(model in names for names in current.values()):
        return True
    copies = Counter(other_model for names in current.values() for other_model in names)
    for spare in (False, True):
        for name, names in current.items():
            if not by_name[model].may(name):
                continue
            over = _size(by_name, names) + by_name[model].nbytes - rooms[name]
            removed: frozenset[str] | None = frozenset()
            if over > 0:
                removable = names if spare and name not in change else ()
                removed = next(
                    _sets(
                        {other_model for other_model in removable if copies[other_model] > 1},
                        over,
                        by_name,
                    ),
                    None,
                )
            if removed is not None:
                change[name] = names - removed | {model}
                return True
    return False


def _most(models: Sequence[ModelLoad], rooms: Mapping[str, int]) -> float:
    """Return the upper bound of every placement: all devices are busy."""
    total = sum(model.load for model in models)
    return (1.0 - _LEAST_GAIN) * len(rooms) / total if total else math.inf


def _size(by_name: Mapping[str, ModelLoad], names: Iterable[str]) -> int:
    return sum(by_name[model].nbytes for model in names)


def _tight(models: Sequence[ModelLoad], placed: Placed) -> tuple[float, frozenset[str]]:
    """Return `sustained` and the models that limit it, by Dinkelbach's iteration: each guess is
    what the last bottleneck allows.
    """
    loads = {model.name: model.load for model in models if model.load > 0.0}
    groups = Counter(frozenset(names & loads.keys()) for names in placed.values())
    hosts = list(groups.items())
    total = sum(loads.values())
    if not total:
        return math.inf, frozenset()
    factor, tight = len(placed) / total, frozenset(loads)
    while True:
        short = _short(loads, hosts, factor)
        if not short:
            return factor, tight
        room = sum(count for names, count in hosts if names & short)
        new_factor = room / sum(loads[name] for name in short)
        if new_factor >= factor * (1.0 - _LEAST_GAIN):
            return factor, tight
        factor, tight = new_factor, short


def _short(
    loads: Mapping[str, float], hosts: Sequence[tuple[frozenset[str], int]], factor: float
) -> frozenset[str]:
    """Return the models whose devices cannot serve them at this factor.

    They are the source's side of a minimum cut; none if all can be served.
    """
    need = {name: factor * load for name, load in loads.items()}
    free = [float(count) for _, count in hosts]
    assigned: list[dict[str, float]] = [{} for _ in hosts]
    least = _LEAST_GAIN * sum(need.values())
    for name in need:  # a greedy start, without a search
        for at, (names, _) in enumerate(hosts):
            if need[name] <= least:
                break
            if name in names and free[at] > least:
                amount = min(need[name], free[at])
                free[at] -= amount
                need[name] -= amount
                assigned[at][name] = amount
    while True:
        start = [name for name, unmet in need.items() if unmet > least]
        parents: dict[str, tuple[int, str] | None] = dict.fromkeys(start)
        goal = None
        for name in start:  # grows: models that can give way to the short ones
            for at, (names, _) in enumerate(hosts):
                if name not in names:
                    continue
                if free[at] > least:
                    goal = (at, name)
                    break
                for other_name, share in assigned[at].items():
                    if share > least and other_name not in parents:
                        parents[other_name] = (at, name)
                        start.append(other_name)
            if goal:
                break
        if goal is None:
            return frozenset(parents)
        path, (at, name) = [goal], goal
        while (step := parents[name]) is not None:
            path.append(step)
            at, name = step
        # Backwards along `path`: the last element's model is short, and each model gives way to the
        # next.
        amount = min(need[path[-1][1]], free[path[0][0]])
        for (_, source), (at, _) in itertools.pairwise(path):
            amount = min(amount, assigned[at][source])
        free[path[0][0]] -= amount
        need[path[-1][1]] -= amount
        for at, name in path:
            assigned[at][name] = assigned[at].get(name, 0.0) + amount
        for (_, source), (at, _) in itertools.pairwise(path):
            assigned[at][source] -= amount
