"""ControlNets beside the rows of a batch: what is the same for every family.

Before a step each net runs once, over all rows that have it; what its blocks say, times the row's
scale, is added behind those of the base. Beside a cached row a net computes all tokens at the row's
anchors (`planning.own_anchors`) and keeps with the edit what the inactive ones are in its blocks,
for no template's entry knows of the control picture; at the steps between it computes the active
ones. How a net runs, and what is kept, the family says (`Nets.say`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch.own_anchors import OwnPlan
from maskserve_engine.control_link.opening import Opening


class NetInput(Protocol):
    """What a net is given of one edit, made once."""

    @property
    def control(self) -> ControlInput: ...

    @property
    def net(self) -> Any: ...


I = TypeVar("I", bound=NetInput)  # noqa: E741


class KeptOfNet(NamedTuple):
    """What a net has kept of a cached row's inactive tokens."""

    step: int
    """Of the row, when all tokens were computed."""
    tokens: Sequence[Any]
    """An `OwnAnchors` of each pass, the family's."""


@dataclass(slots=True, eq=False)
class PassResiduals:
    """What is added to one pass of a row (`batch.packing.Residuals`)."""

    added: dict[int, Tensor] = field(default_factory=dict)
    """By the place in the base."""

    def after(self, number: int) -> Tensor | None:
        return self.added.get(number)


@dataclass(slots=True, eq=False)
class RowControl(Generic[I]):
    """The ControlNets of one row, and what they add to its next step."""

    inputs: tuple[I, ...]
    own: OwnPlan
    """At which steps they compute all tokens though the base does not, and how they keep what they
    have of those that the steps between leave out. (They do, in any case, where the base does.)"""
    exact: bool = False
    """Whether what is kept may not be computed anew at another step (`reproducible`)."""
    passes: tuple[PassResiduals, ...] = field(default_factory=lambda: (PassResiduals(),))
    """The prompt's, then the negative prompt's where one model call answers both."""
    kept: dict[int, KeptOfNet] = field(default_factory=dict)
    """By the number of the input, of a cached row."""
    _ahead: RowControl[I] | None = field(init=False, default=None)

    @property
    def ahead(self) -> RowControl[I]:
        """What they add to the pass that foresees the row's next anchor; both keep the same."""
        if self._ahead is None:
            self._ahead = replace(self, passes=tuple([PassResiduals() for _ in self.passes]))
        return self._ahead

    def forget(self) -> None:
        """What they have added to a step that is over."""
        for residuals in (*self.passes, *(() if self._ahead is None else self._ahead.passes)):
            residuals.added.clear()

    def after(self, number: int) -> Tensor | None:
        """Of a row with one pass."""
        [residuals] = self.passes
        return residuals.after(number)

    @property
    def missed(self) -> bool:
        """Whether the row would be another if it went on without what is kept."""
        return self.exact and bool(self.kept)


class Controlled(NamedTuple, Generic[I]):
    """A row with control that is about to take a step."""

    control: RowControl[I]
    given: Any
    """What the base is given of it, as the family's nets read it."""
    sparse: bool
    """Whether the base computes the active tokens alone."""
    idle: bool
    """Whether other steps leave out tokens that this one computes, or leaves out as they do."""
    timesteps: Sequence[float]
    """Of this step and of some behind it."""
    step: int
    steps: int
    foreseen: int | None = None
    """Where these tokens lie, of a pass in which the row foresees an anchor; None: in the step that
    it takes."""
    before: Sequence[float] = ()
    """Timesteps of the steps before it that are computed with it where its row is by itself."""

    @property
    def at(self) -> int:
        """Of which step the nets' scales are."""
        return self.step if self.foreseen is None else self.foreseen


class Asked(NamedTuple, Generic[I]):
    """A row that a net is run for."""

    row: Controlled[I]
    number: int
    """Of the row's input."""
    own: I
    scale: float
    """Of the step."""

    @property
    def kept(self) -> Sequence[Any] | None:
        """What the inactive tokens are, at a step between anchors: then the net computes the active
        ones. None also where there was no memory for it.

        A step that is tried again, as one of a batch that failed is, does again what it did.
        """
        row, cached = self.row, self.last
        if not row.sparse or row.step in row.control.own.anchors or cached is None:
            return None
        is_valid = cached.step < row.step and all(tokens.whole() for tokens in cached.tokens)
        return cached.tokens if is_valid else None

    @property
    def last(self) -> KeptOfNet | None:
        """What was kept last."""
        return self.row.control.kept.get(self.number)

    @property
    def keeps(self) -> bool:
        """Whether this step's inactive tokens are to be kept: it computes them, and the next one
        may not. What is foreseen goes on from what there is.
        """
        if self.row.foreseen is not None:
            return self.last is not None
        follows = self.row.step + 1
        next_is_between = follows < self.row.steps and follows not in self.row.control.own.anchors
        return self.row.idle and self.kept is None and next_is_between

    def keep(self, tokens: Sequence[Any]) -> None:
        """What was foreseen is where it was kept before."""
        if self.row.foreseen is None:
            self.row.control.kept[self.number] = KeptOfNet(self.row.step, tokens)


Said = tuple[Sequence[int], Sequence[Sequence[Tensor]]]
"""Places of the base at which a net's output is added, and it: per row, per pass."""
Told = Callable[[Sequence[tuple[RowControl[Any], Sequence[int]]]], None]
"""Takes rows, each with places of the base at which nothing more will be added."""


class Nets(ABC, Generic[I]):
    """ControlNets beside a batch, for as long as the same rows go on."""

    in_parts: ClassVar[bool]
    """Whether the base can use what is whole while later blocks of a net still run."""
    stacked: ClassVar[bool]
    """Whether a service sends a row's passes as one tensor [passes, ...]; else there is one."""

    @abstractmethod
    def say(self, net: Any, same: Sequence[Asked[I]]) -> Iterator[Said]:
        """Run a net over its rows, and have them keep (`Asked.keep`) what they are to.

        Yields:
            behind each of its blocks what it says.
        """

    def run(self, rows: Sequence[Controlled[I]], told: Told | None = None) -> None:
        """Have what ControlNets add to the next step of these rows in their `RowControl`.

        Args:
            rows: of one batch.
            told: of what is whole while later blocks of the nets still run.
        """
        requests_by_net: dict[int, list[Asked[I]]] = {}
        for row in rows:
            row.control.forget()
            for number, net_input in enumerate(row.control.inputs):
                scale = net_input.control.scale_at(row.at, row.steps)
                if scale:
                    requests_by_net.setdefault(id(net_input.net), []).append(
                        Asked(row, number, net_input, scale)
                    )
        last = {
            id(request.row.control): net
            for net, net_requests in requests_by_net.items()
            for request in net_requests
        }
        for net, net_requests in requests_by_net.items():
            controls = {id(request.row.control): request.row.control for request in net_requests}
            whole = [control for key, control in controls.items() if last[key] == net]
            for places, by_row in self.say(net_requests[0].own.net, net_requests):
                for asks, samples in zip(net_requests, by_row, strict=True):
                    for residuals, sample in zip(asks.row.control.passes, samples, strict=True):
                        _add(residuals.added, places, sample * asks.scale)
                if told is not None:
                    told([(control, places) for control in whole])


def _add(added: dict[int, Tensor], places: Sequence[int], sample: Tensor) -> None:
    for place in places:
        previous = added.get(place)
        added[place] = sample if previous is None else previous + sample


# Nets over rows whose base is in another process: what a ControlNet service asks of a family.


class NetRow(Protocol):
    """A row whose base is elsewhere."""

    @property
    def control(self) -> RowControl[Any]: ...

    def at(self, step: int, sample: Tensor, computed: int, foreseen: int | None) -> Controlled[Any]:
        """The row as it is about to take a step; arguments as `NetStep` has them."""
        ...


class OpenedRows(ABC):
    """Of an adapter: its rows' own ControlNets are made as a service makes them, by what it would
    be told (`Adapter.opening`).
    """

    device: torch.device

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        """See `Adapter.opening`; of a family without ControlNets none acts."""
        return None

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> NetRow:
        """See `Adapter.net_row`."""
        raise AssertionError("nothing was opened")

    @abstractmethod
    def controlled_by(self, row: Any, control: RowControl[Any]) -> None:
        """Have a row add what its ControlNets say."""

    def control(self, row: Any, job: EditJob, nets: Mapping[str, Any]) -> None:
        """See `Adapter.control`."""
        with torch.inference_mode():
            opening = self.opening(row, job)
            if opening is not None:
                control = self.net_row(opening.on(self.device), nets).control
                control.exact = job.request.settings.reproducible
                self.controlled_by(row, control)


class NetStep(NamedTuple):
    """A row that is about to take a step elsewhere."""

    row: Any
    """A `NetRow`, as the family has made it."""
    step: int
    sample: Tensor
    """What nets are given of the base's latents."""
    computed: int
    """Tokens of them that the base computes; of FLUX the first ones."""
    foreseen: int | None = None
    """As of `Controlled`."""


class Residual(NamedTuple):
    """What is added to a row."""

    number: int
    """Of the row among those that were asked for."""
    first: int
    last: int
    """At each place of the base from the first to the last."""
    added: Tensor


Send = Callable[[Sequence[Residual]], None]
"""Takes what is whole while later blocks of the nets still run."""


class NetBatch:
    """ControlNets beside the rows of one batch, for as long as the same rows go on.

    Args:
        nets: of the rows' family.
    """

    def __init__(self, nets: Nets[Any]) -> None:
        self._nets = nets

    def run(self, rows: Sequence[NetStep], send: Send) -> None:
        """Each net runs once, over all rows that have it."""
        controlled_rows = [
            row_step.row.at(row_step.step, row_step.sample, row_step.computed, row_step.foreseen)
            for row_step in rows
        ]
        numbers = {id(row_step.control): number for number, row_step in enumerate(controlled_rows)}
        sent_places = [set[int]() for _ in controlled_rows]

        def told(whole: Sequence[tuple[RowControl[Any], Sequence[int]]]) -> None:
            residuals: list[Residual] = []
            for control, places in whole:
                number = numbers[id(control)]
                residuals += self._residuals(number, control, places)
                sent_places[number].update(places)
            send(residuals)

        self._nets.run(controlled_rows, told if self._nets.in_parts else None)
        remaining: list[Residual] = []
        for number, row in enumerate(
            controlled_rows
        ):  # a deeper net ran before the last, or nothing is told
            places = sorted(row.control.passes[0].added.keys() - sent_places[number])
            remaining += self._residuals(number, row.control, places)
        if remaining:
            send(remaining)

    def _residuals(
        self, number: int, control: RowControl[Any], places: Sequence[int]
    ) -> Iterator[Residual]:
        """What is the same at places one behind the other is one."""
        first, begin = control.passes[0].added, 0
        for i, place in enumerate(places):
            following = places[i + 1] if i + 1 < len(places) else None
            if following == place + 1 and first[following] is first[place]:
                continue
            samples = [residual_pass.added[place] for residual_pass in control.passes]
            yield Residual(
                number,
                places[begin],
                place,
                torch.stack(samples) if self._nets.stacked else samples[0],
            )
            begin = i + 1
