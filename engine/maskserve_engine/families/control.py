"""ControlNets beside the rows of a batch: the part that all families share.

Before a step each net runs once, over all rows that use it; its outputs, times the row's scale, are
added after blocks of the base. Beside a cached row a net computes all tokens of the refresh steps
(`RefreshSchedule`), also beside a template, whose entries do not depend on the control picture: of
the first one in its own step, and of later ones by lookahead. They fill a step cache of the edit.
For each step after the first the net computes the base's computed tokens, and reads the others from
it. The family defines how a net runs and what it keeps (`Nets.outputs`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from maskserve_common.contracts.settings import Ranged, scale_at
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch.step_cache import NetStepCaches, RefreshSchedule, StepCache
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.served import LookaheadResiduals, ServedRow
from maskserve_engine.planning.refresh_steps import RefreshRule
from maskserve_engine.spec.model_spec import ModelSpec


class NetInput(Protocol):
    @property
    def control(self) -> ControlInput: ...

    @property
    def net(self) -> Any: ...


I = TypeVar("I", bound=NetInput)  # noqa: E741
C = TypeVar("C", bound=StepCache)


class NetResiduals(NamedTuple):
    step: int
    tokens: Sequence[Any]
    """One `StepCache` of the family's kind for each pass."""


@dataclass(slots=True, eq=False)
class PassResiduals:
    added: dict[int, Tensor] = field(default_factory=dict)

    def after(self, number: int) -> Tensor | None:
        return self.added.get(number)


class ServedPass(NamedTuple):
    """Residuals of one pass of a row whose nets run in a service."""

    served: ServedRow | LookaheadResiduals
    number: int

    def after(self, number: int) -> Tensor | None:
        added = self.served.after(number)
        return None if added is None else added[self.number]


@dataclass(slots=True, eq=False)
class ServedControl:
    """Stands for `RowControl` in a row whose nets run in a service."""

    served: ServedRow
    passes: tuple[ServedPass, ...]

    @classmethod
    def of(cls, served: ServedRow, passes: int) -> ServedControl:
        return cls(served, tuple([ServedPass(served, number) for number in range(passes)]))

    @property
    def schedule(self) -> RefreshSchedule:
        return self.served.schedule

    @property
    def for_lookahead(self) -> ServedControl:
        ahead = self.served.for_lookahead
        passes = [ServedPass(ahead, served_pass.number) for served_pass in self.passes]
        return ServedControl(self.served, tuple(passes))


@dataclass(slots=True, eq=False)
class RowControl(Generic[I]):
    """The ControlNets of one row, and their residuals for its next step."""

    inputs: tuple[I, ...]
    schedule: RefreshSchedule
    """Refresh steps of the nets of a row that reads a template; without refresh steps the nets
    compute all tokens, and look ahead, when the base does."""
    exact: bool = False
    """Whether the caches must not be recomputed at another step (`reproducible`)."""
    passes: tuple[PassResiduals, ...] = field(default_factory=lambda: (PassResiduals(),))
    """Residuals of the prompt's pass, then of the negative prompt's if the nets run with it."""
    residuals: dict[int, NetResiduals] = field(default_factory=dict)
    caches: NetStepCaches | None = None
    """Receives the nets' step caches, which may then lie in host memory; None: they stay on the
    device."""
    _lookahead: RowControl[I] | None = field(init=False, default=None)

    @property
    def for_lookahead(self) -> RowControl[I]:
        """Residuals of the lookahead pass; both share their step caches."""
        if self._lookahead is None:
            self._lookahead = replace(self, passes=tuple([PassResiduals() for _ in self.passes]))
        return self._lookahead

    def place(self, cache: C, blocks: int) -> C:
        """Return a new step cache of a net of so many blocks, where it may lie."""
        if self.caches is not None:
            self.caches.add(cache, blocks)
        return cache

    def forget(self) -> None:
        for residuals in (
            *self.passes,
            *(() if self._lookahead is None else self._lookahead.passes),
        ):
            residuals.added.clear()

    @property
    def missed(self) -> bool:
        """Whether the result would change if the row continued without its step caches."""
        return self.exact and bool(self.residuals)


class Controlled(NamedTuple, Generic[I]):
    control: RowControl[I]
    base_input: Any
    """The base's input, in the form of the family's nets."""
    sparse: bool
    """Whether the base computes only some tokens."""
    idle: bool
    """Whether some steps of this request skip unmasked tokens."""
    timesteps: Sequence[float]
    """Timesteps of this step and some later ones."""
    step: int
    steps: int
    lookahead: int | None = None
    """Refresh step of a lookahead pass; None: the pass of the present step."""
    adds: bool = True
    """Whether the base adds the residuals; otherwise a lookahead only fills the step caches."""
    before: Sequence[float] = ()
    """Timesteps of earlier steps whose vectors are computed with it, if all rows have the same."""

    @property
    def at(self) -> int:
        """Step at which the nets' scales are taken."""
        return self.step if self.lookahead is None else self.lookahead


class NetRequest(NamedTuple, Generic[I]):
    row: Controlled[I]
    number: int
    net_input: I
    scale: float

    @property
    def cached(self) -> Sequence[Any] | None:
        """Caches that the net reads between refresh steps, when it computes only the base's
        computed tokens. None elsewhere, and if there was no memory for them.

        A retried step, after a failed batch, makes the same choice.
        """
        row, cached = self.row, self.last
        if not row.sparse or row.lookahead is not None or cached is None:
            return None
        if row.step in row.control.schedule.dense:
            return None
        is_valid = cached.step < row.step and all(tokens.whole() for tokens in cached.tokens)
        return cached.tokens if is_valid else None

    @property
    def last(self) -> NetResiduals | None:
        return self.row.control.residuals.get(self.number)

    @property
    def keeps(self) -> bool:
        """Whether this step's cached tokens are kept: it computes them, and a later step may not.
        A lookahead only continues an existing cache, and replaces what its step would keep.
        """
        row, schedule, is_kept = self.row, self.row.control.schedule, self.last is not None
        is_due = schedule.lookahead_at(row.step) is not None
        if row.lookahead is not None:
            return is_kept and (is_due or not schedule.refresh_steps)
        if is_kept and is_due:
            return False
        follows = row.step + 1
        next_may_read = follows < row.steps and follows not in schedule.dense
        return row.idle and self.cached is None and next_may_read

    def keep(self, tokens: Sequence[Any]) -> None:
        """Keep the caches of this step. A lookahead updates those of its row in place."""
        if self.row.lookahead is None:
            self.row.control.residuals[self.number] = NetResiduals(self.row.step, tokens)


NetOutput = tuple[Sequence[int], Sequence[Sequence[Tensor]]]
"""Places of the base where a net's output is added, and the output per row and pass."""
OnComplete = Callable[[Sequence[tuple[RowControl[Any], Sequence[int]]]], None]
"""Receives rows, each with the places that are complete."""


class Nets(ABC, Generic[I]):
    """ControlNets beside a batch, while its rows are the same."""

    in_parts: ClassVar[bool]
    """Whether the base can use complete residuals while later blocks of a net run."""

    @abstractmethod
    def outputs(self, net: Any, same: Sequence[NetRequest[I]]) -> Iterator[NetOutput]:
        """Run a net over its rows, and keep their step caches (`NetRequest.keep`).

        Yields:
            The output of each block.
        """

    def run(self, rows: Sequence[Controlled[I]], on_complete: OnComplete | None = None) -> None:
        """Compute the residuals of the rows' next step into their `RowControl`.

        `on_complete` receives complete ones while later blocks run.
        """
        requests_by_net: dict[int, list[NetRequest[I]]] = {}
        for row in rows:
            row.control.forget()
            for number, net_input in enumerate(row.control.inputs):
                scale = net_input.control.scale_at(row.at, row.steps)
                request = NetRequest(row, number, net_input, scale)
                if scale and (row.adds or request.keeps):
                    requests_by_net.setdefault(id(net_input.net), []).append(request)
        sums: dict[int, _RowSum] = {}
        for request in chain.from_iterable(requests_by_net.values()):
            if request.row.adds:
                control = request.row.control
                sums.setdefault(id(control), _RowSum(control)).pending.add(request.number)
        for net_requests in requests_by_net.values():
            adding = [request for request in net_requests if request.row.adds]
            for request in adding:
                sums[id(request.row.control)].pending.discard(request.number)
            net_sums = {key: sums[key] for key in (id(request.row.control) for request in adding)}
            whole = [row_sum.control for row_sum in net_sums.values() if not row_sum.pending]
            for places, by_row in self.outputs(net_requests[0].net_input.net, net_requests):
                for request, samples in zip(net_requests, by_row, strict=True):
                    if request.row.adds:
                        scaled = [sample * request.scale for sample in samples]
                        sums[id(request.row.control)].take(request.number, places, scaled)
                for row_sum in net_sums.values():
                    row_sum.add(places)
                if on_complete is not None:
                    on_complete([(control, places) for control in whole])
            for row_sum in net_sums.values():
                row_sum.add(list(row_sum.waiting))


class _RowSum:
    """Sum of the outputs of a row's nets, added in the order of the edit's controls whatever order
    the nets of a batch run in. An output waits until those of earlier controls are there.
    """

    def __init__(self, control: RowControl[Any]) -> None:
        self.control = control
        self.pending: set[int] = set()
        """Numbers of the nets that have not begun to run."""
        self.waiting: dict[int, list[tuple[int, Sequence[Tensor]]]] = {}
        """Outputs (number, sample of each pass) that wait, by place."""

    def take(self, number: int, places: Sequence[int], samples: Sequence[Tensor]) -> None:
        """Let a net's output wait at its places."""
        for place in places:
            self.waiting.setdefault(place, []).append((number, samples))

    def add(self, places: Iterable[int]) -> None:
        """Add the outputs at these places that wait for no other net."""
        least = min(self.pending, default=None)
        sums: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        """Sums with their terms, by the terms: equal ones at several places are one tensor."""
        for place in places:
            waiting = sorted(self.waiting.pop(place, ()), key=itemgetter(0))
            ready = [item for item in waiting if least is None or item[0] < least]
            if waiting[len(ready) :]:
                self.waiting[place] = waiting[len(ready) :]
            for _, samples in ready:
                for residuals, sample in zip(self.control.passes, samples, strict=False):
                    added, before = residuals.added, residuals.added.get(place)
                    if before is None:
                        added[place] = sample
                        continue
                    key = id(before), id(sample)
                    if key not in sums:
                        sums[key] = before, sample, before + sample
                    added[place] = sums[key][-1]


# Nets over rows whose base is in another process: the part of a family for ControlNet services.


class NetRow(Protocol):
    """A row of a ControlNet service, whose base runs elsewhere."""

    @property
    def control(self) -> RowControl[Any]: ...

    def at(
        self, step: int, sample: Tensor, computed: int, lookahead: int | None
    ) -> Controlled[Any]:
        """Return the row before a step; arguments as the fields of `NetStep`."""
        ...


class OpenedRows(ABC):
    """Mixin of adapters: creates a row's local ControlNets from the same opening as a service does
    (`Adapter.opening`).
    """

    device: torch.device
    spec: ModelSpec
    _refresh_rule: RefreshRule

    @property
    def net_module_bytes(self) -> int:
        """See `Adapter.net_module_bytes`."""
        return 0

    @abstractmethod
    def sigmas(self, job: EditJob) -> list[tuple[float, float]]: ...

    def net_schedule(self, job: EditJob, controls: Sequence[Ranged]) -> RefreshSchedule:
        """See `Adapter.net_schedule`."""
        sigmas = [sigma for sigma, _ in self.sigmas(job)]
        steps = range(len(sigmas))
        acting = [n for n in steps if any(scale_at(control, n, len(steps)) for control in controls)]
        act = slice(acting[0], acting[-1] + 1) if acting else slice(None)
        return RefreshSchedule.with_controls(self.spec, self._refresh_rule, sigmas, act)

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        """See `Adapter.opening`; None for families without ControlNets."""
        return None

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> NetRow:
        raise AssertionError("nothing was opened")

    @abstractmethod
    def set_control(self, row: Any, control: RowControl[Any]) -> None:
        """Add the residuals of `control` to a row."""

    def control(
        self,
        row: Any,
        job: EditJob,
        nets: Mapping[str, Any],
        caches: NetStepCaches | None = None,
    ) -> None:
        with torch.inference_mode():
            opening = self.opening(row, job)
            if opening is not None:
                control = self.net_row(opening.on(self.device), nets).control
                control.exact, control.caches = job.request.settings.reproducible, caches
                self.set_control(row, control)


class NetStep(NamedTuple):
    """The next step of a row whose base runs elsewhere."""

    row: Any
    step: int
    sample: Tensor
    """The base's latents for the nets."""
    computed: int
    """Number of tokens that the base computes; in FLUX the first ones. 0: it computes no pass, and
    a lookahead only fills step caches."""
    lookahead: int | None = None


class Residual(NamedTuple):
    number: int
    first: int
    last: int
    """The tensor is added at each place of the base from `first` to `last`."""
    added: Tensor
    """[passes, ...]; those of shorter texts begin with zeros (Z-Image)."""


Send = Callable[[Sequence[Residual]], None]
"""Receives complete residuals while later blocks of the nets run."""


class NetBatch:
    """ControlNets beside the rows of one batch, while these are the same."""

    def __init__(self, nets: Nets[Any]) -> None:
        self._nets = nets

    def run(self, rows: Sequence[NetStep], send: Send) -> None:
        controlled_rows = [
            row_step.row.at(row_step.step, row_step.sample, row_step.computed, row_step.lookahead)
            for row_step in rows
        ]
        numbers = {id(row_step.control): number for number, row_step in enumerate(controlled_rows)}
        sent_places = [set[int]() for _ in controlled_rows]

        def on_complete(whole: Sequence[tuple[RowControl[Any], Sequence[int]]]) -> None:
            residuals: list[Residual] = []
            for control, places in whole:
                number = numbers[id(control)]
                residuals += self._residuals(number, control, places)
                sent_places[number].update(places)
            send(residuals)

        self._nets.run(controlled_rows, on_complete if self._nets.in_parts else None)
        remaining: list[Residual] = []
        for number, row in enumerate(
            controlled_rows
        ):  # a deeper net ran before the last, or none called back
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
            added = pad_sequence(samples, batch_first=True, padding_side="left")
            yield Residual(number, places[begin], place, added)
            begin = i + 1
