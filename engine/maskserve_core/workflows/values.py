"""What values are as a workflow runs: bytes of pictures and masks, text, and these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Areas:
    """Regions."""

    masks: tuple[Any, ...]
    waves: tuple[int, ...]
    """Of each the wave in which it may be painted: regions of one wave stay apart, and a region is
    in a later one than those before it that it touches."""

    @classmethod
    def in_turn(cls, masks: Sequence[Any]) -> Areas:
        """Regions of which nothing is known: each is painted behind the one before it."""
        return cls(tuple(masks), tuple(range(len(masks))))


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict."""

    score: float
    """The more the better."""
    passed: bool
