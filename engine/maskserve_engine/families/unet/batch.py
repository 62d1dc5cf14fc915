"""The running batch of a UNet: its passes are packed once while its rows stay the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from maskserve_engine.batch.cfg_parallel import PassShare
from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.batch.stepping import ReusableBatch
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.control_link.served import (
    LookaheadRequest,
    RowRequest,
    new_batch,
    request_residuals,
)
from maskserve_engine.families.control import ServedControl
from maskserve_engine.families.unet.captures import UnetStepCache
from maskserve_engine.families.unet.control import UnetNets, UnetSample, controlled
from maskserve_engine.families.unet.forward import Captures, PackedPasses, forward
from maskserve_engine.families.unet.graphs import UnetStep
from maskserve_engine.families.unet.latents import PackedLatents, extrapolated_latents
from maskserve_engine.families.unet.rows import UnetLookahead, UnetPrimingRow, UnetRow
from maskserve_engine.families.unet.stack import StackCapture
from maskserve_engine.families.unet.weights import UnetWeights

Row = UnetRow | UnetPrimingRow | UnetLookahead


class _Part(NamedTuple):
    """Adjacent passes that the model answers in one call."""

    passes: slice
    packed: PackedPasses
    weights: UnetWeights


class UnetBatch(ReusableBatch[Row, UnetWeights]):
    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        row_passes = [row.passes() for row in rows]
        # Rows with a tile follow the others, which share every convolution.
        tiled = [passes[0].surroundings is not None for passes in row_passes]
        order = sorted(range(len(rows)), key=lambda i: (tiled[i], _captured(rows[i])))
        self._order, row_passes = [rows[i] for i in order], [row_passes[i] for i in order]
        self._passes = [len(passes) for passes in row_passes]
        edits = [row for row in self._order if isinstance(row, UnetRow)]
        self._latents = PackedLatents(edits) if edits else None
        self._parts: tuple[_Part, ...] = ()
        """This rank's passes; empty until they are packed."""
        self._begin = rows[0].step
        timesteps = [row.precomputed_timesteps for row in self._order]
        steps, counts = min(map(len, timesteps)), torch.tensor(self._passes)
        self._by_step = torch.tensor(
            [row_timesteps[:steps] for row_timesteps in timesteps]
        ).T.repeat_interleave(counts, 1)
        """[steps, passes] timesteps from `_begin` on; moved to the device at the first step."""
        self._inputs = [pass_input for passes in row_passes for pass_input in passes]
        self._number = new_batch()
        self._share: PassShare | None = None
        """Share of this rank in the last step; None: one rank took it alone."""
        self._pass_numbers: torch.Tensor | None = None
        """Numbers of this rank's passes; None: all."""
        self._nets = UnetNets()
        self._begin_captures()

    def holds(self, rows: Sequence[Row]) -> bool:
        return super().holds(rows) and 0 <= rows[0].step - self._begin < len(self._by_step)

    def step(
        self, model: UnetWeights, kinds: Sequence[str], exchange: Exchange | None = None
    ) -> None:
        samples, ahead = self._samples(), self._lookaheads()
        self._run_nets(samples, ahead)
        if ahead:  # passes over the whole picture, which share no convolution with those over tiles
            UnetBatch(ahead).step(model, (), exchange)
        if exchange is not (None if self._share is None else self._share.exchange):
            self._share_with(exchange)
        sample = torch.stack(
            [
                sample_of_row
                for sample_of_row, count in zip(samples, self._passes, strict=True)
                for _ in range(count)
            ]
        )
        timesteps = self._timesteps(sample.device)
        if self._share is None:
            answer = self._forward(model, sample, timesteps, kinds)
        else:
            answer = self._forward_share(self._share, model, sample, timesteps, kinds)
        answers = list(zip(self._order, answer.split(self._passes), strict=True))
        if self._latents is not None:
            self._latents.advance(
                [row_answer for row, row_answer in answers if isinstance(row, UnetRow)]
            )
        for row, row_answer in answers:
            if not isinstance(row, UnetRow):
                row.advance(row_answer)

    def _lookaheads(self) -> list[UnetLookahead]:
        ahead = []
        for row in self._order:
            if isinstance(row, UnetRow):
                row.lookahead = row.lookahead_step
                if row.lookahead is not None:
                    ahead.append(UnetLookahead(row, row.lookahead))
        return ahead

    def _samples(self) -> list[torch.Tensor]:
        """Return [in_channels, h, w] of each row."""
        edits = iter(() if self._latents is None else self._latents.samples())
        return [next(edits) if isinstance(row, UnetRow) else row.sample() for row in self._order]

    def _share_with(self, exchange: Exchange | None) -> None:
        """Switch to all passes, or to this rank's share of them."""
        self._parts, self._share, self._pass_numbers = (), None, None
        if exchange is None:
            self._begin_captures()
            return
        if any(isinstance(row, UnetPrimingRow) for row in self.rows):
            raise ValueError("rows that record what they compute take their steps on one device")
        # Convolutions run on all positions, whatever the masks are, so all passes cost the same.
        costs = [[1.0] * count for count in self._passes]
        stays = [
            row.request_id if step_caches else None for row, _, step_caches in self._step_caches()
        ]
        self._share = PassShare(costs, stays, exchange)
        self._begin_captures()

    def _step_caches(self) -> Iterator[tuple[Row, int, Sequence[UnetStepCache]]]:
        """Yield each row, the number of its first pass, and its step caches."""
        first = 0
        for row, count in zip(self._order, self._passes, strict=True):
            yield row, first, () if isinstance(row, UnetPrimingRow) else row.step_caches
            first += count

    def _begin_captures(self) -> None:
        share = self._share
        for _, first, step_caches in self._step_caches():
            for number, step_cache in enumerate(step_caches, start=first):
                is_elsewhere = share is not None and number not in share.passes
                step_cache.set_share(
                    None if share is None else "elsewhere" if is_elsewhere else "here"
                )

    def _forward_share(
        self,
        share: PassShare,
        model: UnetWeights,
        sample: torch.Tensor,
        timesteps: torch.Tensor,
        kinds: Sequence[str],
    ) -> torch.Tensor:
        """Run `_forward` for this rank's passes, and gather the answers to all."""
        answer = sample.new_empty(0)
        if share.passes:
            if self._pass_numbers is None:
                [self._pass_numbers] = to_device([torch.tensor(share.passes)], sample.device)
            rank_sample, rank_times = (
                x.index_select(0, self._pass_numbers) for x in (sample, timesteps)
            )
            answer = self._forward(model, rank_sample, rank_times, kinds)
        shape = int(model.model.config.out_channels), *sample.shape[2:]
        answers = share.gather(answer, [math.prod(shape)] * len(sample))
        return torch.stack(answers).view(-1, *shape)

    def _forward(
        self,
        model: UnetWeights,
        sample: torch.Tensor,
        timesteps: torch.Tensor,
        kinds: Sequence[str],
    ) -> torch.Tensor:
        """Return the model's answer to the passes of this rank, from [P, in_channels, h, w]."""
        if not self._parts:
            self._parts = tuple(self._packed(model, sample))
        answers, captures = [], self._captures()
        recorder = model.graphs if self._is_recorded(model) else None
        for passes, packed, weights in self._parts:
            part_captures = [of for of in captures if passes.start <= of[0] < passes.stop]
            packed.show_to([(a - passes.start, b - passes.start, of) for a, b, of in part_captures])
            inputs = weights, packed, sample[passes], timesteps[passes], kinds
            answers.append(
                forward(*inputs) if recorder is None else recorder.answer(UnetStep(*inputs))
            )
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def _packed(self, model: UnetWeights, sample: torch.Tensor) -> Iterator[_Part]:
        """Pack this rank's passes: in one part or, where steps are recorded, each row by itself
        that has a tile, because the same mix of tiles seldom comes twice, or that fills step
        caches, whose buffers are large.
        """
        pass_numbers = range(len(self._inputs)) if self._share is None else self._share.passes
        recorded, end = self._is_recorded(model), 0
        of_rows = zip(self._order, self._passes, strict=True)
        rows = [row for row, count in of_rows for _ in range(count)]

        def alone(number: int) -> int | None:
            """Return a row's identity if it is by itself; None: it is with others."""
            has_tile = self._inputs[number].surroundings is not None
            return id(rows[number]) if recorded and (has_tile or _captured(rows[number])) else None

        for _, group in groupby(pass_numbers, alone):
            numbers = list(group)
            passes = slice(end, end := end + len(numbers))
            packed = PackedPasses(
                [self._inputs[i] for i in numbers],
                (sample.shape[2], sample.shape[3]),
                len(model.down_blocks),
                sample.device,
                buckets=recorded,
                together=recorded and len({id(rows[i]) for i in numbers}) > 1,
            )
            weights = model.with_adapters([rows[i].adapters for i in numbers])
            yield _Part(passes, packed, weights)

    def _is_recorded(self, model: UnetWeights) -> bool:
        return (
            model.graphs is not None
            and model.graphs.records
            and not any(isinstance(row, UnetPrimingRow) for row in self.rows)
            and not any(pass_input.picture for pass_input in self._inputs)
        )

    def _run_nets(
        self, samples: Sequence[torch.Tensor], lookaheads: Sequence[UnetLookahead]
    ) -> None:
        """Run ControlNets for this step and for its lookahead, from the rows' [in_channels,
        h, w].
        """
        service_requests, local_rows = [], []
        lookahead_by_row = {id(lookahead.row): lookahead for lookahead in lookaheads}
        for row, sample in zip(self._order, samples, strict=True):
            if not isinstance(row, UnetRow):
                continue
            control, row_sample = row.control, sample[: len(row.latents)]
            if control is None:
                continue
            # The base adds the nets' outputs in its own lookahead, if it has one.
            adds = id(row) in lookahead_by_row
            lookahead = lookahead_by_row.get(id(row)) or nets_lookahead(row)
            lookahead_sample = None if lookahead is None else lookahead.sample()[: len(row_sample)]
            if isinstance(control, ServedControl):
                count = row_sample[0].numel() if row.active is None else len(row.active[0])
                lookahead_request = None
                if lookahead is not None and lookahead_sample is not None:
                    all_tokens = adds * row_sample[0].numel()
                    lookahead_request = LookaheadRequest(
                        lookahead.refresh_step, lookahead_sample, all_tokens
                    )
                extrapolate = partial(extrapolated_latents, row)
                service_requests.append(
                    RowRequest(
                        control.served, row.step, row_sample, count, extrapolate, lookahead_request
                    )
                )
                continue
            unet_sample = UnetSample(row_sample, row.active)
            local_rows.append(controlled(control, unet_sample, row.timestep, row.step, row.steps))
            if lookahead is not None and lookahead_sample is not None:
                [timestep] = lookahead.precomputed_timesteps
                local_rows.append(
                    controlled(
                        control.for_lookahead,
                        UnetSample(lookahead_sample, None),
                        timestep,
                        row.step,
                        row.steps,
                        lookahead.refresh_step,
                        adds=adds,
                    )
                )
        request_residuals(service_requests, self._number)
        self._nets.run(local_rows)

    def _timesteps(self, device: torch.device) -> torch.Tensor:
        if self._by_step.device != device:
            [self._by_step] = to_device([self._by_step], device)
        return self._by_step[self.rows[0].step - self._begin]

    def _captures(self) -> Captures:
        """Return the captures: of a priming row one for all passes, of a row at a refresh step one
        for each pass.
        """
        captures: list[tuple[int, int, StackCapture]] = []
        pass_numbers = range(len(self._inputs)) if self._share is None else self._share.passes
        for (row, first, _), count in zip(self._step_caches(), self._passes, strict=True):
            if isinstance(row, UnetPrimingRow):
                captures.append((first, first + count, row.capture))
                continue
            for number, capture in enumerate(row.captures, start=first):
                if number in pass_numbers:
                    index = pass_numbers.index(number)
                    captures.append((index, index + 1, capture))
        return captures


def _captured(row: Row) -> bool:
    """Return whether an edit's row fills step caches in its next step."""
    return not isinstance(row, UnetPrimingRow) and len(row.captures) > 0


def nets_lookahead(row: UnetRow) -> UnetLookahead | None:
    """Return the lookahead that only a row's ControlNets compute; None: they compute none."""
    if row.control is None or row.answer is None:
        return None
    step = row.control.schedule.lookahead_at(row.step)
    return None if step is None else UnetLookahead(row, step)
