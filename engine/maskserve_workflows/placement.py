"""Which models lie on which devices, and how many times: loads and bytes in, places out.

A placement is as good as the factor by which all loads may grow until devices are full
(`sustained`). By Hall's theorem some models are *tight*: all devices that have any of them are full
of them alone. So a copy of one of these goes to a device that has none of them, again and again;
where none has room, one that has more copies than it needs makes room.
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
"""At places for models, until it is taken that they do not fit."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A model and what is asked of it."""

    name: str
    nbytes: int
    load: float
    """Devices that it keeps busy: calls in a second, times their seconds."""
    only: Set[str] | None = None
    """Devices that may have it; None: all."""

    def may(self, device: str) -> bool:
        """Whether it may lie there, if there is room."""
        return self.only is None or device in self.only


def sustained(models: Sequence[ModelLoad], placed: Placed) -> float:
    """The factor by which all loads may grow until devices are full: they share a model's calls as
    is best.
    """
    return _tight(models, placed)[0]


def place(models: Sequence[ModelLoad], rooms: Mapping[str, int]) -> dict[str, frozenset[str]]:
    """Models by device.

    Args:
        models: all of which lie somewhere.
        rooms: bytes that each device has for them.

    Raises:
        ValueError: they do not all fit.
    """
    best: dict[str, frozenset[str]] | None = None
    worth = -1.0
    for spread in (True, False):
        for weigh in (_by_bytes, _by_load, _by_load_of_a_byte):
            first = _each_once(sorted(models, key=weigh), rooms, spread=spread)
            if first is None:
                continue
            made = grown(models, rooms, first)
            if (found := sustained(models, made)) > worth:
                best, worth = made, found
            if found >= _most(models, rooms):
                return made
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


def _each_once(
    models: Sequence[ModelLoad], rooms: Mapping[str, int], *, spread: bool
) -> dict[str, frozenset[str]] | None:
    """Where most room is left, or where a model fits best, and where that leads nowhere elsewhere;
    None: they do not fit, as far as was looked.
    """
    left = dict(rooms)
    placed: dict[str, set[str]] = {name: set() for name in rooms}
    looks = _MOST_LOOKS

    def fits(number: int) -> bool:
        nonlocal looks
        if number == len(models):
            return True
        model = models[number]
        for name in sorted(left, key=left.__getitem__, reverse=spread):
            looks -= 1
            if left[name] < model.nbytes or not model.may(name) or looks < 0:
                continue
            left[name] -= model.nbytes
            placed[name].add(model.name)
            if fits(number + 1):
                return True
            left[name] += model.nbytes
            placed[name].remove(model.name)
        return False

    return {name: frozenset(held) for name, held in placed.items()} if fits(0) else None


def grown(
    models: Sequence[ModelLoad], rooms: Mapping[str, int], placed: Placed
) -> dict[str, frozenset[str]]:
    """A placement with copies added while they help, and then wherever there is room. What lies
    there goes for one that helps more alone.
    """
    by_name = {model.name: model for model in models}
    while True:
        made = _filled(by_name, rooms, placed)
        now, tight = _tight(models, made)
        if now >= _most(models, rooms):
            return made
        best, worth = None, now * (1.0 + _LEAST_GAIN)
        for change in _changes(by_name, rooms, made, tight):
            if (found := sustained(models, {**made, **change})) > worth:
                best, worth = change, found
        if best is None:
            return made
        placed = {**made, **best}


def _filled(
    by_name: Mapping[str, ModelLoad], rooms: Mapping[str, int], placed: Placed
) -> dict[str, frozenset[str]]:
    """With a copy of a tight model wherever one fits, then of any: of those that lie nowhere, then
    of those with the most load for their copies.
    """
    placed = dict(placed)
    models = list(by_name.values())
    while True:
        copies = Counter(model for held in placed.values() for model in held)
        _, tight = _tight(models, placed)
        wanted = sorted(
            models,
            key=lambda m: (
                m.name not in tight, m.name in copies, -m.load / (copies[m.name] or 1), m.name,
            ),
        )  # fmt: skip
        for model, name in itertools.product(wanted, sorted(placed, key=lambda n: len(placed[n]))):
            held = placed[name]
            if (
                model.name not in held
                and model.may(name)
                and _size(by_name, held) + model.nbytes <= rooms[name]
            ):
                placed[name] = held | {model.name}
                break
        else:
            return placed


def _changes(
    by_name: Mapping[str, ModelLoad],
    rooms: Mapping[str, int],
    placed: Placed,
    tight: frozenset[str],
) -> Iterator[dict[str, frozenset[str]]]:
    """Devices that have none of the tight models, each with one of them in place of others; of
    equal devices one. What lay there alone goes to another.
    """
    copies = Counter(model for held in placed.values() for model in held)
    seen = set()
    for name, held in placed.items():
        missing = frozenset(model for model in tight - held if by_name[model].may(name))
        if not missing or (held, missing, rooms[name]) in seen:
            continue
        seen.add((held, missing, rooms[name]))
        for model in sorted(missing):
            for gone in _sets(held, by_name[model].nbytes + _size(by_name, held) - rooms[name],
                              by_name):  # fmt: skip
                change = {name: held - gone | {model}}
                if all(
                    _moved(each, by_name, rooms, {**placed, **change}, change)
                    for each in gone
                    if copies[each] == 1
                ):
                    yield change


def _sets(
    held: Iterable[str], over: int, by_name: Mapping[str, ModelLoad]
) -> Iterator[frozenset[str]]:
    """One or two of those held that make so much room."""
    for count in (1, 2):
        for some in itertools.combinations(sorted(held), count):
            if _size(by_name, some) >= over:
                yield frozenset(some)


def _moved(
    model: str,
    by_name: Mapping[str, ModelLoad],
    rooms: Mapping[str, int],
    placed: Placed,
    change: dict[str, frozenset[str]],
) -> bool:
    """Whether another device has room for a model, or copies that make room for it, which `change`
    then says.
    """
    now = {name: change.get(name, held) for name, held in placed.items()}
    if any(model in held for held in now.values()):
        return True
    copies = Counter(each for held in now.values() for each in held)
    for spare in (False, True):
        for name, held in now.items():
            if not by_name[model].may(name):
                continue
            over = _size(by_name, held) + by_name[model].nbytes - rooms[name]
            gone: frozenset[str] | None = frozenset()
            if over > 0:
                others = held if spare and name not in change else ()
                gone = next(
                    _sets({each for each in others if copies[each] > 1}, over, by_name), None
                )
            if gone is not None:
                change[name] = held - gone | {model}
                return True
    return False


def _most(models: Sequence[ModelLoad], rooms: Mapping[str, int]) -> float:
    """What no placement exceeds: all devices are full."""
    total = sum(model.load for model in models)
    return (1.0 - _LEAST_GAIN) * len(rooms) / total if total else math.inf


def _size(by_name: Mapping[str, ModelLoad], held: Iterable[str]) -> int:
    return sum(by_name[model].nbytes for model in held)


def _tight(models: Sequence[ModelLoad], placed: Placed) -> tuple[float, frozenset[str]]:
    """`sustained`, and the models that bound it: each guess is what the last one's bottleneck
    allows (Dinkelbach), until no bottleneck is left.
    """
    loads = {model.name: model.load for model in models if model.load > 0.0}
    groups = Counter(frozenset(held & loads.keys()) for held in placed.values())
    hosts = list(groups.items())
    total = sum(loads.values())
    if not total:
        return math.inf, frozenset()
    factor, tight = len(placed) / total, frozenset(loads)
    while True:
        short = _short(loads, hosts, factor)
        if not short:
            return factor, tight
        room = sum(count for held, count in hosts if held & short)
        found = room / sum(loads[name] for name in short)
        if found >= factor * (1.0 - _LEAST_GAIN):
            return factor, tight
        factor, tight = found, short


def _short(
    loads: Mapping[str, float], hosts: Sequence[tuple[frozenset[str], int]], factor: float
) -> frozenset[str]:
    """Models that the devices which have any of them cannot serve at this factor: none, or those on
    the source's side of a minimum cut.
    """
    need = {name: factor * load for name, load in loads.items()}
    free = [float(count) for _, count in hosts]
    sent: list[dict[str, float]] = [{} for _ in hosts]
    least = _LEAST_GAIN * sum(need.values())
    for name in need:  # as far as nobody has to give way, which takes no search
        for at, (held, _) in enumerate(hosts):
            if need[name] <= least:
                break
            if name in held and free[at] > least:
                amount = min(need[name], free[at])
                free[at] -= amount
                need[name] -= amount
                sent[at][name] = amount
    while True:
        start = [name for name, left in need.items() if left > least]
        came: dict[str, tuple[int, str] | None] = dict.fromkeys(start)
        goal = None
        for name in start:  # grows: whoever gives way to those that are short
            for at, (held, _) in enumerate(hosts):
                if name not in held:
                    continue
                if free[at] > least:
                    goal = (at, name)
                    break
                for other, given in sent[at].items():
                    if given > least and other not in came:
                        came[other] = (at, name)
                        start.append(other)
            if goal:
                break
        if goal is None:
            return frozenset(came)
        path, (at, name) = [goal], goal
        while (step := came[name]) is not None:
            path.append(step)
            at, name = step
        # Backwards along `path`: the last one's name is short, and each gives way to the next.
        amount = min(need[path[-1][1]], free[path[0][0]])
        for (_, gives), (at, _) in itertools.pairwise(path):
            amount = min(amount, sent[at][gives])
        free[path[0][0]] -= amount
        need[path[-1][1]] -= amount
        for at, name in path:
            sent[at][name] = sent[at].get(name, 0.0) + amount
        for (_, gives), (at, _) in itertools.pairwise(path):
            sent[at][gives] -= amount
