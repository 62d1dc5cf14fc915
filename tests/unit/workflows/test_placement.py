"""Placements beside the best there are."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_workflows.placement import ModelLoad, place, sustained
from tests.support.draws import fresh_random
from tests.support.examples import examples, number


def by_hall(models, placed):
    """The least ratio, over all sets of models, of devices that have one of them to their load."""
    loaded = [model for model in models if model.load]
    return min(
        sum(any(m.name in names for m in subset) for names in placed.values())
        / sum(m.load for m in subset)
        for size in range(1, len(loaded) + 1)
        for subset in itertools.combinations(loaded, size)
    )


def best_there_is(models, rooms):
    """Over all ways to fill the devices as far as they go."""
    sets = [
        frozenset(m.name for m in subset)
        for size in range(len(models) + 1)
        for subset in itertools.combinations(models, size)
    ]
    size_of = {s: sum(m.nbytes for m in models if m.name in s) for s in sets}
    choices = []
    for room in rooms.values():
        fitting = [s for s in sets if size_of[s] <= room]
        choices.append([s for s in fitting if not any(s < superset for superset in fitting)])
    best = 0.0
    for combination in itertools.product(*choices):
        if frozenset().union(*combination) == sets[-1]:
            best = max(best, by_hall(models, dict(zip(rooms, combination, strict=True))))
    return best


@st.composite
def instances(draw):
    models = [
        ModelLoad(f"m{n}", draw(st.integers(1, 8)), draw(st.integers(1, 16)) / 8)
        for n in range(draw(st.integers(1, 4)))
    ]
    rooms = {f"d{n}": draw(st.integers(1, 20)) for n in range(draw(st.integers(1, 4)))}
    return models, rooms


@given(instances())
@examples(1000)
def test_a_placement_keeps_to_the_rooms_and_its_value_is_by_hall(instance):
    models, rooms = instance
    try:
        placed = place(models, rooms)
    except ValueError:
        return
    by_name = {model.name: model for model in models}
    for name, model_names in placed.items():
        assert sum(by_name[model_name].nbytes for model_name in model_names) <= rooms[name]
    assert frozenset().union(*placed.values()) == set(by_name)
    assert math.isclose(sustained(models, placed), by_hall(models, placed), rel_tol=1e-6)


def test_placements_are_within_a_fiftieth_of_the_best_on_average():
    """A greedy search: rare instances are farther off."""
    rng = fresh_random()
    losses = []
    for _ in range(number(1000, least=200)):
        models = [
            ModelLoad(f"m{n}", rng.randint(1, 8), rng.randint(1, 16) / 8)
            for n in range(rng.randint(1, 4))
        ]
        rooms = {f"d{n}": rng.randint(1, 20) for n in range(rng.randint(1, 4))}
        best = best_there_is(models, rooms)
        try:
            losses.append(1.0 - sustained(models, place(models, rooms)) / best)
        except ValueError:  # they do not fit, or the search did not see how
            losses.append(1.0 if best else 0.0)
    assert sum(losses) / len(losses) <= 0.02, sorted(losses)[-20:]


def test_what_is_asked_for_most_has_most_copies():
    models = [ModelLoad("base", 20, 3.0), ModelLoad("rare", 20, 0.5), ModelLoad("idle", 20, 0.0)]
    placed = place(models, {f"d{n}": 20 for n in range(8)})
    copies = [
        sum(name in model_names for model_names in placed.values())
        for name in ("base", "rare", "idle")
    ]
    assert copies == [6, 1, 1]
    assert sustained(models, placed) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="base of 20 the largest, do not fit on 2 devices"):
        place(models, {"d0": 20, "d1": 20})
