"""ControlNets beside the rows of a batch: the part that all families share.

Before a step each net runs once, over all rows that use it; its outputs, times the row's scale, are
added behind blocks of the base. Beside a cached row a net computes all tokens at the row's refresh
steps (`OwnPlan`) and keeps a step cache with the edit, because a template's entries do not
depend on the control picture; at the steps between it computes the base's computed tokens. How a
net runs, and what it keeps, is the family's (`Nets.say`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch.step_cache import OwnPlan
from maskserve_engine.control_link.opening import Opening


class NetInput(Protocol):
    @property
    def control(self) -> ControlInput: ...

    @property
    def net(self) -> Any: ...


I = TypeVar("I", bound=NetInput)  # noqa: E741


class KeptOfNet(NamedTuple):
    step: int
    tokens: Sequence[Any]
    """One `OwnAnchors` of the family's kind for each pass."""


@dataclass(slots=True, eq=False)
class PassResiduals:
    added: dict[int, Tensor] = field(default_factory=dict)

    def after(self, number: int) -> Tensor | None:
        return self.added.get(number)


@dataclass(slots=True, eq=False)
class RowControl(Generic[I]):
    """The ControlNets of one row, and their residuals for its next step."""

    inputs: tuple[I, ...]
    own: OwnPlan
    """Steps at which the nets compute all tokens although the base does not, and the format of
    their caches. (They also do when the base does.)"""
    exact: bool = False
    """Whether the caches must not be recomputed at another step (`reproducible`)."""
    passes: tuple[PassResiduals, ...] = field(default_factory=lambda: (PassResiduals(),))
    """Residuals of the prompt's pass, then of the negative prompt's if one model call computes
    both."""
    kept: dict[int, KeptOfNet] = field(default_factory=dict)
    _ahead: RowControl[I] | None = field(init=False, default=None)

    @property
    def ahead(self) -> RowControl[I]:
        """Residuals of the lookahead pass; both share their step caches."""
        if self._ahead is None:
            self._ahead = replace(self, passes=tuple([PassResiduals() for _ in self.passes]))
        return self._ahead

    def forget(self) -> None:
        for residuals in (*self.passes, *(() if self._ahead is None else self._ahead.passes)):
            residuals.added.clear()

    def after(self, number: int) -> Tensor | None:
        [residuals] = self.passes
        return residuals.after(number)

    @property
    def missed(self) -> bool:
        """Whether the result would change if the row continued without its step caches."""
        return self.exact and bool(self.kept)


class Controlled(NamedTuple, Generic[I]):
    control: RowControl[I]
    given: Any
    """The base's input, in the form of the family's nets."""
    sparse: bool
    """Whether the base computes only some tokens."""
    idle: bool
    """Whether some steps of this request skip unmasked tokens."""
    timesteps: Sequence[float]
    """Timesteps of this step and some later ones."""
    step: int
    steps: int
    foreseen: int | None = None
    """Refresh step of a lookahead pass; None: the pass of the present step."""
    before: Sequence[float] = ()
    """Timesteps of earlier steps whose vectors are computed with it in a batch of one row."""

    @property
    def at(self) -> int:
        """Step at which the nets' scales are taken."""
        return self.step if self.foreseen is None else self.foreseen


class Asked(NamedTuple, Generic[I]):
    row: Controlled[I]
    number: int
    own: I
    scale: float

    @property
    def kept(self) -> Sequence[Any] | None:
        """Caches that the net reads between refresh steps, when it computes only the base's
        computed tokens. None elsewhere, and if there was no memory for them.

        A retried step, after a failed batch, makes the same choice.
        """
        row, cached = self.row, self.last
        if not row.sparse or row.step in row.control.own.anchors or cached is None:
            return None
        is_valid = cached.step < row.step and all(tokens.whole() for tokens in cached.tokens)
        return cached.tokens if is_valid else None

    @property
    def last(self) -> KeptOfNet | None:
        return self.row.control.kept.get(self.number)

    @property
    def keeps(self) -> bool:
        """Whether this step's cached tokens are kept: it computes them, and the next step may not.
        A lookahead only continues an existing cache.
        """
        if self.row.foreseen is not None:
            return self.last is not None
        follows = self.row.step + 1
        next_is_between = follows < self.row.steps and follows not in self.row.control.own.anchors
        return self.row.idle and self.kept is None and next_is_between

    def keep(self, tokens: Sequence[Any]) -> None:
        """Keep the caches of this step. A lookahead updates those of its row in place."""
        if self.row.foreseen is None:
            self.row.control.kept[self.number] = KeptOfNet(self.row.step, tokens)


Said = tuple[Sequence[int], Sequence[Sequence[Tensor]]]
"""Places of the base where a net's output is added, and the output per row and pass."""
Told = Callable[[Sequence[tuple[RowControl[Any], Sequence[int]]]], None]
"""Receives rows, each with the places that are complete."""


class Nets(ABC, Generic[I]):
    """ControlNets beside a batch, while the same rows go on."""

    in_parts: ClassVar[bool]
    """Whether the base can use complete residuals while later blocks of a net run."""
    stacked: ClassVar[bool]
    """Whether a service sends a row's passes as one tensor [passes, ...]; otherwise a row has one
    pass."""

    @abstractmethod
    def say(self, net: Any, same: Sequence[Asked[I]]) -> Iterator[Said]:
        """Run a net over its rows, and keep their step caches (`Asked.keep`).

        Yields:
            The output of each block.
        """

    def run(self, rows: Sequence[Controlled[I]], told: Told | None = None) -> None:
        """Compute the residuals of the rows' next step into their `RowControl`.

        `told` receives complete ones while later blocks run.
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
    """A row of a ControlNet service, whose base runs elsewhere."""

    @property
    def control(self) -> RowControl[Any]: ...

    def at(self, step: int, sample: Tensor, computed: int, foreseen: int | None) -> Controlled[Any]:
        """Return the row before a step; arguments as the fields of `NetStep`."""
        ...


class OpenedRows(ABC):
    """Mixin of adapters: creates a row's local ControlNets from the same opening as a service does
    (`Adapter.opening`).
    """

    device: torch.device

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        """See `Adapter.opening`; None for families without ControlNets."""
        return None

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> NetRow:
        raise AssertionError("nothing was opened")

    @abstractmethod
    def controlled_by(self, row: Any, control: RowControl[Any]) -> None:
        """Add the residuals of `control` to a row."""

    def control(self, row: Any, job: EditJob, nets: Mapping[str, Any]) -> None:
        with torch.inference_mode():
            opening = self.opening(row, job)
            if opening is not None:
                control = self.net_row(opening.on(self.device), nets).control
                control.exact = job.request.settings.reproducible
                self.controlled_by(row, control)


class NetStep(NamedTuple):
    """The next step of a row whose base runs elsewhere."""

    row: Any
    step: int
    sample: Tensor
    """The base's latents for the nets."""
    computed: int
    """Number of tokens that the base computes; in FLUX the first ones."""
    foreseen: int | None = None


class Residual(NamedTuple):
    number: int
    first: int
    last: int
    """The tensor is added at each place of the base from `first` to `last`."""
    added: Tensor


Send = Callable[[Sequence[Residual]], None]
"""Receives complete residuals while later blocks of the nets run."""


class NetBatch:
    """ControlNets beside the rows of one batch, while the same rows go on."""

    def __init__(self, nets: Nets[Any]) -> None:
        self._nets = nets

    def run(self, rows: Sequence[NetStep], send: Send) -> None:
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
        """Yield the residuals, with equal ones at consecutive places as one."""
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
