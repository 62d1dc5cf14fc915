"""Predictions of an edit's step on several devices, from the measured steps of the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maskserve_common.contracts.pricing import DegreePrice
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.loop.measured_costs import MeasuredCosts
from maskserve_engine.planning.degree_costs import (
    DEGREES,
    ExchangeCosts,
    seconds_by_degree,
    uneven_flops,
)
from maskserve_engine.planning.flops import ModelWork, RowTokens
from maskserve_engine.requests.state import RequestState


class DegreeTimes:
    """Predicts the seconds of a step by degree, for tickets.

    Args:
        adapter: adapter of the model.
        costs: measured costs of a device's share of the worker's steps.
        exchange: returns the measured costs of exchanges between ranks.
        devices: number of the worker's devices.
    """

    def __init__(
        self,
        adapter: Adapter,
        costs: MeasuredCosts,
        exchange: Callable[[], ExchangeCosts],
        devices: int,
    ) -> None:
        self._adapter, self._costs = adapter, costs
        self._exchange, self._devices = exchange, devices

    def prices(self, text: int) -> tuple[DegreePrice, ...]:
        """Return the prices of a row on 2, 4 and 8 devices: its seconds beyond the fixed seconds of
        a step, as a share of those on one device (1: more devices gain nothing). The row has the
        model's native size and `text` prompt tokens; a cached row computes a fifth of its tokens.
        """
        spec = self._adapter.spec
        if spec.guidance == "cfg":
            return (DegreePrice(0.5, 0.5),)  # each device takes one of the two passes
        side = spec.native_resolution // spec.vae_scale_factor
        work, line = self._adapter.work(side, side), self._costs.model.compute
        degrees = tuple([degree for degree in DEGREES if degree <= self._devices])

        def shares(kind: str, ratio: float) -> list[float]:
            row, exchange = work.row_at(ratio, text), self._exchange()
            seconds = seconds_by_degree(work, row, kind, line, exchange, degrees)
            single, *shared = [value - line.fixed for value in seconds]
            # If the measured steps hardly differ, the line has no slope, and `single` is 0.
            return [value / single if value < single else 1.0 for value in shared]

        pairs = zip(shares("dense", 1.0), shares("kv", 0.2), strict=True)
        return tuple([DegreePrice(dense, cached) for dense, cached in pairs])

    def step_seconds(self, edit: RequestState) -> tuple[tuple[float, ...], float]:
        """Return the seconds of a step of the edit alone on 1, 2, 4 and 8 devices, up to the number
        that it may use, and the part of these seconds that does not depend on its rows.

        A reproducible edit uses one device, because products of other shapes round differently.
        """
        job = edit.job
        most = min(self._devices, self._adapter.most_ranks(job))
        if job.request.settings.reproducible:
            most = 1
        work, row = self._counted(edit)
        passes, exchange, line = edit.work.passes, self._exchange(), self._costs.model.compute
        seconds = seconds_by_degree(
            work,
            row,
            "kv" if edit.plan.mode == "cached" else "dense",
            line,
            exchange,
            tuple([degree for degree in DEGREES if degree <= most]),
        )
        step_seconds = [passes * pass_s for pass_s in seconds]
        if passes == 2 and most > 1:  # each device takes one pass (`batch.cfg_parallel`)
            step_seconds[1] = seconds[0] + exchange.call_seconds
        return tuple(step_seconds), line.fixed

    def overhead_shares(self, edits: Sequence[RequestState], ranks: int) -> float:
        """Return the seconds that a step of these edits takes on `ranks` ranks beyond an even share
        of its FLOPs: the ranks exchange data once for all rows, and wait for the rank with most
        attention heads.
        """
        exchange, counted = self._exchange(), [self._counted(edit) for edit in edits]
        work, row = counted[0]
        calls = exchange.seconds(work, RowTokens((0.0,) * len(row.active), 0.0), ranks)
        exchanged = calls + sum(exchange.seconds(*work_row, ranks) - calls for work_row in counted)
        kinds = ["kv" if edit.plan.mode == "cached" else "dense" for edit in edits]
        uneven = sum(
            uneven_flops(*work_row, kind, ranks)
            for work_row, kind in zip(counted, kinds, strict=True)
        )
        return exchanged + self._costs.model.compute.per_unit * uneven

    def _counted(self, edit: RequestState) -> tuple[ModelWork, RowTokens]:
        """Return the model's work at the edit's size, and the tokens that its step computes."""
        work = edit.work.model
        cached = edit.plan.mode == "cached"
        tokens = edit.work.active_tokens if cached else edit.work.total_tokens
        active = tuple([float(tokens) * n / work.tokens[0] for n in work.tokens])
        return work, RowTokens(active, float(len(edit.job.conditioning["prompt_embeds"])))
