"""Predicts the time of an edit's step on several devices from the worker's steps."""

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
    """Predicts seconds of a step by degree, for tickets.

    Args:
        costs: measured costs of one device's share of the worker's steps.
        exchange: returns the measured costs of exchanges between ranks.
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
        """Return, for 2, 4 and 8 devices, a row's seconds beyond the fixed seconds of a step, as a
        share of those on one device; 1 if more devices gain nothing. The row has the model's native
        size and `text` prompt tokens; a cached row computes a fifth of its tokens.
        """
        facts = self._adapter.spec
        if facts.guidance == "cfg":
            return (DegreePrice(0.5, 0.5),)  # one of its passes each
        side = facts.native_resolution // facts.vae_scale_factor
        work, line = self._adapter.work(side, side), self._costs.model.compute
        degrees = tuple([degree for degree in DEGREES if degree <= self._devices])

        def shares(kind: str, ratio: float) -> list[float]:
            row, exchange = work.row_at(ratio, text), self._exchange()
            seconds = seconds_by_degree(work, row, kind, line, exchange, degrees)
            single, *shared = [value - line.fixed for value in seconds]
            # A line that was fitted to steps that hardly differ may have no slope.
            return [value / single if value < single else 1.0 for value in shared]

        pairs = zip(shares("dense", 1.0), shares("kv", 0.2), strict=True)
        return tuple([DegreePrice(dense, cached) for dense, cached in pairs])

    def of(self, edit: RequestState) -> tuple[tuple[float, ...], float]:
        """Return the seconds of one step of the edit alone on 1, 2, 4 and 8 devices, as far as it
        may have them, and the part of each that does not depend on its rows.

        A reproducible edit keeps to one device: products of other shapes round differently.
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
            "kv" if edit.mode == "cached" else "dense",
            line,
            exchange,
            tuple([degree for degree in DEGREES if degree <= most]),
        )
        of_passes = [passes * step_s for step_s in seconds]
        if passes == 2 and most > 1:  # each has one (`batch.cfg_parallel`)
            of_passes[1] = seconds[0] + exchange.call_seconds
        return tuple(of_passes), line.fixed

    def overhead_shares(self, edits: Sequence[RequestState], ranks: int) -> float:
        """Return the seconds that a step of these edits takes on `ranks` ranks beyond an even share
        of its FLOPs: ranks exchange once for all rows, and wait for the rank with most heads.
        """
        exchange, counted = self._exchange(), [self._counted(edit) for edit in edits]
        work, row = counted[0]
        calls = exchange.seconds(work, RowTokens((0.0,) * len(row.active), 0.0), ranks)
        exchanged = calls + sum(exchange.seconds(*work_row, ranks) - calls for work_row in counted)
        kinds = ["kv" if edit.mode == "cached" else "dense" for edit in edits]
        uneven = sum(
            uneven_flops(*work_row, kind, ranks)
            for work_row, kind in zip(counted, kinds, strict=True)
        )
        return exchanged + self._costs.model.compute.per_unit * uneven

    def _counted(self, edit: RequestState) -> tuple[ModelWork, RowTokens]:
        """Return the model's work at the edit's size, and the tokens that its step computes."""
        _, height, width = edit.job.moments.shape
        work = self._adapter.work(height, width)
        cached = edit.mode == "cached"
        tokens = edit.work.active_tokens if cached else edit.work.total_tokens
        active = tuple([float(tokens) * n / work.tokens[0] for n in work.tokens])
        return work, RowTokens(active, float(len(edit.job.conditioning["prompt_embeds"])))
