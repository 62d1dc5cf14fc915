"""The running batch of a flow-matching transformer, packed once while its rows are the same.

Between steps only latents and timesteps change. Packing again at each step, row by row, costs more
than the rest of a step outside the model. So the rows' latents are views of the packed tokens,
where the sampler's step is one operation for all rows. Inputs of the steps ahead are laid out when
rows are packed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from maskserve_engine.batch.cfg_parallel import PassShare
from maskserve_engine.batch.forward import Transformer, forward
from maskserve_engine.batch.graphs import Graphs, Inputs, Launcher
from maskserve_engine.batch.packing import Packed, RowInput
from maskserve_engine.batch.padding import PaddedRows, Sizes, sizes_of
from maskserve_engine.batch.sequence_parallel import Exchange, RankShare, forward_shared
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.batch.stepping import ReusableBatch
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.control_link.served import (
    LookaheadRequest,
    RowRequest,
    ServedRow,
    new_batch,
    request_residuals,
)
from maskserve_engine.families.control import ServedControl
from maskserve_engine.families.mmdit.rows import (
    FlowPrimingRow,
    FlowRow,
    PromptPass,
    Row,
    all_tokens,
    lookahead_inputs,
    pass_inputs,
)
from maskserve_engine.families.mmdit.schedule import Walk
from maskserve_engine.families.mmdit.spans import References
from maskserve_engine.layers.low_rank import Adapters
from maskserve_engine.stages.cpu_threads import one_cpu_thread


class FlowWeights(Protocol):
    """The part of a transformer's weights that a batch uses."""

    @property
    def width(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def blocks(self) -> Sequence[Any]: ...

    @property
    def graphs(self) -> Graphs | None:
        """Records the steps; None: steps are not recorded."""
        ...

    def with_adapters(self, rows: Sequence[Adapters]) -> Self: ...


@dataclass(frozen=True, slots=True)
class FlowStep:
    """A recordable step (`graphs.BatchStep`); fields as the arguments of `forward`."""

    model: Transformer
    packed: Packed
    kinds: Sequence[str]

    @property
    def shapes(self) -> Hashable | None:
        """A lone pass has the kernels of its own length, unless it is captured or its text varies.
        With LoRAs only lone passes and padded ones are recorded.
        """
        cached = self.packed.cached_cis is not None
        sizes, updates = self.sizes, self.model.updates
        shapes: Hashable | None = sizes
        if sizes is None and not self.packed.primes:
            shapes = self.packed.shapes
            if self.model.alone:
                shapes = shapes, self.packed.alone.shapes
            if cached:
                shapes = None if "project" in self.kinds else (shapes, tuple(self.kinds))
        if shapes is not None and self.packed.residuals:
            shapes = shapes, "residuals"
        if updates is None or shapes is None:
            return shapes
        fixed = sizes is not None or len(self.packed.rows) == 1
        return (shapes, updates.shapes) if fixed and updates.shapes is not None else None

    @property
    def sizes(self) -> Sizes | None:
        """Sizes to which the step is padded if it is recorded; None: it is not padded. A lone pass
        whose text varies is, since prompts of other lengths would be other shapes.
        """
        packed = self.packed
        loads = packed.cached_cis is None or set(self.kinds) == {"kv"}
        several = len(packed.rows) > 1 or packed.primes
        return sizes_of(packed) if loads and (several or packed.varies) else None

    @property
    def common(self) -> bool:
        return self.sizes is not None

    def copied(self, inputs: Inputs) -> FlowStep:
        sizes, copy = self.sizes, inputs.copy
        if sizes is None:
            return FlowStep(self.model.copied(copy, ()), self.packed.copied(copy), self.kinds)
        packed = PaddedRows.of(self.packed, sizes, inputs, alone=self.model.alone > 0)
        model, kinds = self.model.copied(copy, packed.moving), ("kv",) * self.model.block_count
        step = FlowStep(model, packed, kinds)
        step.run(Launcher())  # kernels of these sizes are chosen before one is recorded
        return step

    def take(self, other: FlowStep, *, all_inputs: bool) -> None:
        self.model.follow(other.model)
        self.packed.tokens[: len(other.packed.tokens)].copy_(other.packed.tokens)
        if all_inputs:
            self.packed.take(other.packed)
            if self.model.updates is not None and other.model.updates is not None:
                self.model.updates.take(other.model.updates)

    def run(self, launcher: Launcher) -> Tensor:
        return forward(self.model, self.packed, self.kinds, launcher)

    def answer_of(self, recorded: Tensor) -> Tensor:
        return recorded[: len(self.packed.tokens)].clone()


W = TypeVar("W", bound=FlowWeights)


class FlowBatch(ReusableBatch[Row, W]):
    """Rows and their packed inputs. A row belongs to the batch that packed it last."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        self._texts_left_out = _texts_left_out(rows)
        self._guided = tuple((i, row.negative) for i, row in enumerate(rows) if row.negative)
        """Index and negative prompt of rows with a second pass; second passes are packed after all
        rows."""
        lookaheads = [
            (i, lookahead_input)
            for i, row in enumerate(rows)
            for lookahead_input in lookahead_inputs(row)
        ]
        self._lookahead_rows = tuple([i for i, _ in lookaheads])
        """Row index of each lookahead pass; these are packed last."""
        self.precomputed = self.precomputed_steps(len(rows) + len(self._guided))
        back = rows[0].step % self.precomputed if len(rows) == 1 else 0
        """Products of other shapes round differently. So a lone row's vectors are computed for the
        same groups of steps, at whichever step it was packed."""
        self.steps = back + min(row.steady for row in rows)
        """Number of steps that are laid out: the next ones, and `back` before them."""
        self._begin = rows[0].step - back
        row_inputs = list(map(pass_inputs, rows))
        inputs = [first for first, *_ in row_inputs]
        inputs += [seconds[0] for _, *seconds in row_inputs if seconds]
        inputs += [lookahead_input for _, lookahead_input in lookaheads]
        self.packed = Packed(inputs)
        self._stream = self.packed.layout.narrow.image_stream
        self._still = _still(self.packed)
        self._blends = any(row.blends for row in rows)
        self._sees_references = any(row.references is not None for row in rows)
        self._steered = tuple(
            [row for row in rows if isinstance(row, FlowRow) and row.schedule.moves]
        )
        self._refreshing = tuple(
            [row for row in rows if isinstance(row, FlowRow) and row.step_cache is not None]
        )
        needs_eager = self.packed.sees_fixed or self.packed.pictures is not None
        self._recorded = all(row.recorded for row in rows) and not needs_eager
        extra_passes = [*(i for i, _ in self._guided), *self._lookahead_rows]
        self._packed_adapters = (*self._adapters, *(self._adapters[i] for i in extra_passes))
        self._weights: W | None = None
        self._share: RankShare | _Passes | None = None
        self._served = tuple(
            (row, row.residuals.served)
            for row in rows
            if isinstance(row, FlowRow) and isinstance(row.residuals, ServedControl)
        )
        self._number = new_batch() if self._served else 0
        self._vectors: Sequence[Any] = ()
        """Vectors of `precomputed` steps, including the present one."""
        self._lay_out()

    def follow(self, last: Self) -> None:
        self.packed.placed_kv.follow(last.packed.placed_kv)

    @staticmethod
    def precomputed_steps(passes: int) -> int:
        """Return the number of steps for which a family computes its vectors at once, in a batch of
        so many passes.
        """
        return 1

    def holds(self, rows: Sequence[Row]) -> bool:
        is_same = super().holds(rows) and self._texts_left_out == _texts_left_out(rows)
        return is_same and 0 <= rows[0].step - self._begin < self.steps

    def step(self, model: W, kinds: Sequence[str], exchange: Exchange | None = None) -> None:
        at = self.rows[0].step - self._begin
        self.make_fixed(model)
        if self._weights is None:
            self._weights = model.with_adapters(self._packed_adapters)
        weights = self._weights
        model_step = self.begin_step(weights, at)
        if exchange is not None:
            share = self._share_with(exchange, weights)
            if isinstance(share, RankShare):
                velocity = forward_shared(model_step, share, kinds)
            else:
                velocity = share.forward(model_step, self.packed.tokens, kinds)
        elif self._recorded and weights.graphs is not None and self._fits(weights.graphs):
            step = FlowStep(model_step, self.packed, kinds)
            velocity = weights.graphs.answer(step)
        else:
            velocity = forward(model_step, self.packed, kinds)
        if self._guided:
            self._guide(velocity)
        if self._still is not None:  # after guidance, whose rule may divide by an answer's length
            velocity.index_fill_(0, self._still, 0.0)
        for refreshing in self._refreshing:
            refreshing.arrive(velocity)
        for steered in self._steered:
            steered.steer(velocity)
        with one_cpu_thread():  # so short an operation is done before a second thread has woken
            self._move(velocity, self._changes[at])
        for i, second in self._seconds:
            second.copy_(self._parts[i])
        for row in self.rows:
            row.advance(velocity)  # by now the sampler's move

    def _fits(self, graphs: Graphs) -> bool:
        """Return whether the step is short enough to be recorded; a longer one keeps the device
        busy.
        """
        narrow = self.packed.layout.narrow
        longest = max(end - begin for begin, end in narrow.all_keys.k_spans)
        return narrow.row_stream.spans[-1][1] <= graphs.rows * longest

    def make_fixed(self, model: W) -> None:
        """Compute missing keys and values of references, alone and at time 0, since they do not
        depend on the row; those that rows share once. Families with other fixed tokens extend this.
        """
        while self._sees_references and (lacking := self._lacking_references()):
            self.make_references(model, lacking)

    def _lacking_references(self) -> list[tuple[Row, References]]:
        lacking: dict[int, tuple[Row, References]] = {}
        for row in self.rows:
            references = row.missing_references()
            if references is not None:
                lacking.setdefault(id(references.shared or references), (row, references))
        return list(lacking.values())

    def make_references(self, model: W, lacking: Sequence[tuple[Row, References]]) -> None:
        """Compute the keys and values of these references of rows, which see no others that
        lack them.
        """
        making = [
            FlowPrimingRow.of_references(row, references, len(model.blocks))
            for row, references in lacking
        ]
        type(self)(making).step(model, ())
        for row, _ in lacking:
            assert row.references is not None
            row.references.computed = True

    def begin_step(self, weights: W, at: int) -> Transformer:
        """Ask services for residuals, and return the transformer at a step."""
        if self._served:
            request_residuals(
                [_residuals_request(row, served) for row, served in self._served], self._number
            )
        if at % self.precomputed == 0 or not self._vectors:
            first = at - at % self.precomputed
            self._vectors = self.vectors(weights, slice(first, first + self.precomputed))
        return self.at_step(weights, self._vectors[at % self.precomputed])

    @abstractmethod
    def vectors(self, weights: W, steps: slice) -> Sequence[Any]:
        """Return the modulation of the blocks at each of these of the steps laid out (`timesteps`,
        `targets`).
        """

    @abstractmethod
    def at_step(self, weights: W, vectors: Any) -> Transformer:
        """Return the transformer at a step, with its `vectors`."""

    def _share_with(self, exchange: Exchange, weights: W) -> RankShare | _Passes:
        """Return this rank's share. If every row has two passes, two ranks deal them: one exchange
        per step in place of two per block.
        """
        if self._share is None or self._share.exchange is not exchange:
            if exchange.deals or (exchange.count == 2 and len(self._guided) == len(self.rows)):
                self._share = _Passes(
                    self.packed, self.rows, self._guided, self._lookahead_rows, exchange
                )
            else:
                self._share = RankShare(self.packed, exchange, weights.width // weights.head_dim)
                heads = self._share.heads[exchange.rank]
                for row in self.rows:
                    if isinstance(row, FlowRow) and row.step_cache is not None:
                        row.step_cache.set_share(heads)
        return self._share

    def _lay_out(self) -> None:
        """Lay out timesteps, changes of sigma and views of the latents for the steps ahead."""
        stream, count = self._stream, len(self.rows)
        ago = self.rows[0].step - self._begin
        self._walks = [row.walk(row.step - ago)[: self.steps] for row in self.rows]
        """Steps laid out for each of `packed`."""
        changes = [[step.change for step in walk] for walk in self._walks]
        self._walks += [self._walks[i] for i, _ in self._guided]
        changes += [[0.0] * self.steps for _ in self._guided]  # second passes follow their rows
        self._walks += [(self._lookahead_of(i),) * self.steps for i in self._lookahead_rows]
        changes += [[1.0] * self.steps for _ in self._lookahead_rows]  # the velocity moves them
        times = [[step.timestep for step in walk] for walk in self._walks]
        by_step = [torch.tensor(times).T.contiguous(), torch.tensor(changes).T.contiguous()]
        timesteps, all_changes = to_device(by_step, self.packed.tokens.device)
        self.timesteps = timesteps
        """[steps, R] timesteps of the packed rows, 0 to 1000."""
        latents = self.packed.tokens[:, : self.rows[0].channels]
        self._latents = latents.unflatten(0, (-1, stream.uniform)) if stream.uniform else latents
        """[R, n, C] if rows have equal lengths, else [N, C]."""
        shape = (self.steps, len(changes)) + (1,) * (self._latents.dim() - 1)
        self._changes = all_changes.view(shape).unbind()
        """Per step: [R, 1, 1] if rows have equal lengths, else [R, 1]."""
        self._parts = latents.split(stream.lengths)
        """[n, C] of each row, then of each second pass."""
        self._seconds = [
            (i, part) for (i, _), part in zip(self._guided, self._parts[count:], strict=False)
        ]
        for row, part, (begin, _) in zip(self.rows, self._parts, stream.spans, strict=False):
            row.settle(part, begin)
        spans = stream.spans[count + len(self._guided) :]
        for i, span in reversed(
            list(zip(self._lookahead_rows, spans, strict=True))
        ):  # its first pass
            row = self.rows[i]
            assert isinstance(row, FlowRow)
            row.settle_lookahead(slice(*span))

    @cached_property
    def targets(self) -> Tensor:
        """[steps, R] timesteps that the steps lead to, which flow maps read; the step's own where a
        template is primed.
        """
        sigmas = [[1000 * (step.sigma + step.change) for step in walk] for walk in self._walks]
        [targets] = to_device([torch.tensor(sigmas).T.contiguous()], self.packed.tokens.device)
        return targets

    def _lookahead_of(self, i: int) -> Walk:
        row = self.rows[i]
        assert isinstance(row, FlowRow)
        step = row.lookahead_step
        assert step is not None
        return row.schedule.walk[step]

    def _guide(self, velocity: Tensor) -> None:
        answers, rows = velocity.split(self._stream.lengths), len(self.rows)
        ahead: dict[int, list[Tensor]] = {}
        for number, i in enumerate(self._lookahead_rows, start=rows + len(self._guided)):
            ahead.setdefault(i, []).append(answers[number])
        for (i, negative), away in zip(self._guided, answers[rows:], strict=False):
            self.guide(answers[i], away, negative.scale)
            if i in ahead:
                answer, lookahead = ahead[i]
                self.guide(answer, lookahead, negative.scale)

    @staticmethod
    def guide(positive: Tensor, negative: Tensor, scale: float) -> None:
        """Apply diffusers' true classifier-free guidance to `positive` [n, C], in place; `negative`
        [n, C] is the negative prompt's. Families with another rule override this.
        """
        positive.sub_(negative).mul_(scale).add_(negative)

    def _move(self, velocity: Tensor, change: Tensor) -> None:
        """Take the sampler's step for all rows.

        The product is rounded to the model's dtype and the sum computed in float32, as diffusers
        does on CUDA. (On a CPU in half precision torch rounds `change` first, one ulp apart.)
        """
        if not self._stream.uniform:
            change = change.index_select(0, self._stream.row_of)
        move = velocity.view(self._latents.shape).mul_(change)
        if self._blends:
            self._latents.copy_(self._blended(move))  # nothing is allocated from here on
        else:
            self._latents.add_(move)

    def _blended(self, move: Tensor) -> Tensor:
        moved = self._latents + move
        parts = moved.flatten(0, -2).split(self._stream.lengths)
        for row, part in zip(self.rows, parts, strict=False):
            row.blend_in(part)
        return moved


def _texts_left_out(rows: Sequence[Row]) -> tuple[bool, ...]:
    return tuple([isinstance(row, FlowRow) and row.leaves_out_text for row in rows])


class _Passes:
    """One rank's passes of a batch (`cfg_parallel`), packed on their own.

    Args:
        whole: the batch.
        rows: rows of the batch; their second passes are packed after their first passes.
        guided: rows that have second passes.
        lookahead_rows: row of each lookahead pass; each runs on the rank of the pass that reads it.
        exchange: connects the ranks.

    Raises:
        ValueError: a row has a capture.
    """

    def __init__(
        self,
        whole: Packed,
        rows: Sequence[Row],
        guided: Sequence[tuple[int, PromptPass]],
        lookahead_rows: Sequence[int],
        exchange: Exchange,
    ) -> None:
        if any(isinstance(row, FlowPrimingRow) for row in rows):
            raise ValueError("rows that record what they compute take their steps on one device")
        self.exchange = exchange
        self._channels = rows[0].channels
        second = {i: len(rows) + at for at, (i, _) in enumerate(guided)}
        passes = [[i, second[i]] if i in second else [i] for i in range(len(rows))]
        groups_by_pass = {number: [number] for of_row in passes for number in of_row}
        ahead = iter(range(len(rows) + len(guided), len(whole.rows)))
        for i in dict.fromkeys(lookahead_rows):
            for number in passes[i]:
                groups_by_pass[number].append(next(ahead))

        def cost(number: int) -> float:
            return float(
                sum(len(whole.rows[pass_number].cis) for pass_number in groups_by_pass[number])
            )

        refreshing = {
            i: row for i, row in enumerate(rows) if isinstance(row, FlowRow) and row.image.refreshes
        }
        stays = [refreshing[i].request_id if i in refreshing else None for i in range(len(rows))]
        self._share = PassShare([list(map(cost, group)) for group in passes], stays, exchange)
        dealt = [groups_by_pass[number] for group in passes for number in group]
        self.passes = [pass_number for i in self._share.passes for pass_number in dealt[i]]
        for i, row in refreshing.items():
            for number, step_cache in zip(passes[i], row.step_caches, strict=True):
                step_cache.set_share("here" if number in self.passes else "elsewhere")
        numbers = [pass_number for group in dealt for pass_number in group]
        self._answered = [numbers.index(i) for i in range(len(numbers))]
        """Position of the answer to each of the batch's passes."""
        self._lengths = [
            [len(whole.rows[i].tokens) * self._channels for i in group] for group in dealt
        ]
        """Elements in the answers to passes that one rank computes together."""
        self._packed = Packed([whole.rows[i] for i in self.passes]) if self.passes else None
        spans = whole.layout.narrow.image_stream.spans
        at = [torch.arange(*spans[i]) for i in self.passes] or [torch.arange(0)]
        [self._tokens] = to_device([torch.cat(at)], whole.tokens.device)

    def forward(self, model: Transformer, tokens: Tensor, kinds: Sequence[str]) -> Tensor:
        """Run `forward.forward` for the whole batch on all ranks, each of which calls this."""
        if self._packed is None:
            answer = tokens.new_empty(0)
        else:
            self._packed.tokens = tokens.index_select(0, self._tokens)
            answer = forward(model.take(self.passes), self._packed, kinds)
        gathered = self._share.gather(answer, list(map(sum, self._lengths)))
        answer_lengths = zip(gathered, self._lengths, strict=True)
        parts = [
            part for rank_answer, lengths in answer_lengths for part in rank_answer.split(lengths)
        ]
        return torch.cat([parts[i] for i in self._answered]).view(-1, self._channels)


def _still(packed: Packed) -> Tensor | None:
    """Return positions of the tokens that no step moves; None: there are none."""
    spans = packed.layout.narrow.image_stream.spans
    fixed_spans = [
        torch.arange(end - row.still, end)
        for row, (_, end) in zip(packed.rows, spans, strict=True)
        if row.still
    ]
    if not fixed_spans:
        return None
    [places] = to_device([torch.cat(fixed_spans)], packed.tokens.device)
    return places


def _residuals_request(row: FlowRow, served: ServedRow) -> RowRequest:
    """Return the latents of all tokens that a ControlNet service needs for a row's next step, and
    for its lookahead.
    """
    tokens, lookahead = all_tokens(row).tokens[:, : row.channels], None
    ahead = nets_lookahead(row, served.schedule)
    if ahead is not None:
        latents = ahead.tokens.tokens[:, : row.channels]
        lookahead = LookaheadRequest(ahead.step, latents, ahead.computed)
    return RowRequest(served, row.step, tokens, row.computed, row.extrapolated_latents, lookahead)


class NetsLookahead(NamedTuple):
    """A refresh step of a row's ControlNets that they compute beside the row's next step."""

    step: int
    tokens: RowInput
    """All tokens at the refresh step, those that the base computes first."""
    computed: int
    """Number of tokens in the base's own lookahead pass; 0: the base has none."""


def nets_lookahead(row: FlowRow, schedule: RefreshSchedule) -> NetsLookahead | None:
    """Return the lookahead of a row's ControlNets, whose schedule this is; None: they compute none.
    If the row itself looks ahead, they do with it.
    """
    if row.lookahead is not None:
        tokens = all_tokens(row, row.lookahead.step)
        computed = len(tokens.tokens) if row.image.refreshes else len(row.image.masked)
        return NetsLookahead(row.lookahead.step, tokens, computed)
    step = schedule.lookahead_at(row.step)
    if step is None or row.sampler.moved is None:
        return None
    return NetsLookahead(step, all_tokens(row, step), 0)
