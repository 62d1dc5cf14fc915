"""The corpus as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tests.fakes.corpus.bombs import bomb_cases
from tests.fakes.corpus.case import Case, Refused
from tests.fakes.corpus.images import image_cases
from tests.fakes.corpus.masks import mask_cases
from tests.fakes.corpus.mutations import mutation_cases
from tests.fakes.corpus.prompts import prompt_cases
from tests.fakes.corpus.settings import settings_cases
from tests.fakes.hostile import HostileCase, hostile_cases


@cache
def edit_cases() -> tuple[Case, ...]:
    """Every edit of the corpus."""
    return tuple(_all())


def _all() -> Iterator[Case]:
    yield from map(_by_hand, hostile_cases())
    yield from image_cases()
    yield from bomb_cases()
    yield from mask_cases()
    yield from settings_cases()
    yield from prompt_cases()
    yield from mutation_cases()


def _by_hand(case: HostileCase) -> Case:
    return Case("hand-made", case.name, lambda: case.inputs, Refused(case.field, case.code))


def is_sampled(index: int, count: int, sample_count: int) -> bool:
    """Whether case `index` of `count` is one of about `sample_count`, spread evenly."""
    return index % max(1, count // sample_count) == 0


def sample(per_group: int = 7) -> set[str]:
    """Names of the cases of a short run: some of each sort and expectation.

    All cases written by hand as the worst of their kind are included.
    """
    groups: dict[tuple[str, type], list[str]] = {}
    for case in edit_cases():
        groups.setdefault((case.sort, type(case.expected)), []).append(str(case))
    return {
        name
        for (sort, _), names in groups.items()
        for index, name in enumerate(names)
        if sort == "hand-made" or is_sampled(index, len(names), per_group)
    }
