"""Outputs of several ControlNets of a row are added in the order of the edit's controls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from maskserve_benchmarks.steps.replay import refreshed_every
from maskserve_engine.base.job import ControlInput
from maskserve_engine.families.control import (
    Controlled,
    NetOutput,
    NetRequest,
    Nets,
    PassResiduals,
    RowControl,
)
from tests.support.draws import fresh_rng

PICTURE = np.zeros((0, 0, 3), np.uint8)
PLACES = 7


class DrawnNet:
    """Its outputs, each at some places in a row."""

    def __init__(self, rng: np.random.Generator) -> None:
        cuts = np.sort(rng.choice(np.arange(1, PLACES), int(rng.integers(0, 4)), replace=False))
        self.places = [tuple(map(int, run)) for run in np.split(np.arange(PLACES), cuts)]
        self.places = self.places[: int(rng.integers(1, len(self.places) + 1))]


class DrawnInput(NamedTuple):
    control: ControlInput
    net: DrawnNet
    outputs: Sequence[Sequence[Tensor]]
    """By the net's block and pass."""


class DrawnNets(Nets[DrawnInput]):
    in_parts = True

    def outputs(self, net: DrawnNet, same: Sequence[NetRequest[DrawnInput]]) -> Iterator[NetOutput]:
        for block, places in enumerate(net.places):
            yield places, [request.net_input.outputs[block] for request in same]


def drawn_row(
    rng: np.random.Generator, nets: Sequence[DrawnNet], passes: int
) -> Controlled[DrawnInput]:
    inputs = []
    for _ in range(int(rng.integers(1, 5))):
        net = nets[int(rng.integers(len(nets)))]
        outputs = [
            [torch.from_numpy(rng.normal(size=11).astype(np.float32)) for _ in range(passes)]
            for _ in net.places
        ]
        scale = float(rng.choice([0.0, 0.3, 1.0], p=[0.1, 0.6, 0.3]))
        inputs.append(DrawnInput(ControlInput("net", PICTURE, scale), net, outputs))
    residuals = tuple([PassResiduals() for _ in range(passes)])
    control = RowControl(tuple(inputs), refreshed_every(1, 1), passes=residuals)
    return Controlled(control, None, False, False, (1.0,), 0, 1)


def in_order(row: Controlled[DrawnInput], number: int) -> dict[int, Tensor]:
    """The sums of a pass, by place."""
    sums: dict[int, Tensor] = {}
    for net_input in row.control.inputs:
        if not net_input.control.scale:
            continue
        for places, samples in zip(net_input.net.places, net_input.outputs, strict=True):
            sample = samples[number] * net_input.control.scale
            for place in places:
                sums[place] = sums[place] + sample if place in sums else sample
    return sums


@pytest.mark.parametrize("passes", [1, 2])
def test_sums_are_those_of_the_row_alone_whatever_its_mates_make_run_first(passes: int) -> None:
    """They are complete when they are announced, and each is announced once."""
    rng, by_arrival = fresh_rng(), 0
    for _ in range(40):
        nets = [DrawnNet(rng) for _ in range(int(rng.integers(1, 5)))]
        rows = [drawn_row(rng, nets, passes) for _ in range(int(rng.integers(1, 5)))]
        announced: dict[tuple[int, int], list[Tensor]] = {}

        def note(
            whole: Any, rows: Any = rows, announced: dict[tuple[int, int], list[Tensor]] = announced
        ) -> None:
            numbers = {id(row.control): number for number, row in enumerate(rows)}
            for control, places in whole:
                for place in places:
                    sums = [residuals.added[place] for residuals in control.passes]
                    announced.setdefault((numbers[id(control)], place), []).append(
                        torch.stack(sums)
                    )

        DrawnNets().run(rows, note)
        for number, row in enumerate(rows):
            for at, residuals in enumerate(row.control.passes):
                expected = in_order(row, at)
                assert residuals.added.keys() == expected.keys()
                for place, tensor in residuals.added.items():
                    assert torch.equal(tensor, expected[place])
            for place in in_order(row, 0):
                stack = torch.stack([residuals.added[place] for residuals in row.control.passes])
                assert all(torch.equal(x, stack) for x in announced.get((number, place), ()))
            by_arrival += differs_by_arrival(rows, number)
    assert by_arrival, "no draw tells the order of the controls from that of the nets"


def differs_by_arrival(rows: Sequence[Controlled[DrawnInput]], number: int) -> bool:
    """Whether sums in the order in which the batch runs its nets differ from the row's."""
    run: dict[int, list[DrawnInput]] = {}
    for row in rows:
        for net_input in row.control.inputs:
            mine = run.setdefault(id(net_input.net), [])
            if row is rows[number]:
                mine.append(net_input)
    row = rows[number]
    control = RowControl(
        tuple(net_input for inputs in run.values() for net_input in inputs), row.control.schedule
    )
    other, expected = in_order(row._replace(control=control), 0), in_order(row, 0)
    return any(not torch.equal(tensor, expected[place]) for place, tensor in other.items())
