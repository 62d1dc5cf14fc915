"""Inputs of a simulation, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from maskserve_benchmarks.reports import table


class Input(NamedTuple):
    name: str
    value: str
    kind: Literal["problem", "measured", "published", "counted", "assumed"]
    """`problem`: the workload as the paper states it. `published`: by others than the paper."""
    source: str
    """Command and hardware, publication, or the range that the results are run over."""


def inputs_table(inputs: Sequence[Input]) -> str:
    return table(("input", "value", "", "source or range"), inputs)
