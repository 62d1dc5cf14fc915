"""What rows cost on this worker, published for routers: counted work, and what steps have taken."""

from __future__ import annotations

from functools import partial

from maskserve_core.config import Config
from maskserve_core.contracts.pricing import Pricing
from maskserve_core.routing.estimate import pricing_of
from maskserve_engine.entry_store import entry_format
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.measured_costs import MeasuredCosts


class PriceList:
    """Prices of rows of the model's native size.

    Args:
        config: of this worker.
        adapter: the model.
        costs: of this worker; prices follow them.
        anchors: of a template.
    """

    def __init__(
        self, config: Config, adapter: Adapter, costs: MeasuredCosts, anchors: int
    ) -> None:
        self._costs, facts = costs, adapter.facts
        side = facts.native_resolution // facts.vae_scale_factor
        self._priced = partial(
            pricing_of,
            adapter.work(side, side),
            fmt=entry_format(config),
            text=facts.text_tokens(config.model.max_sequence_length),
            anchors=anchors,
            steps_per_anchor=facts.steps_default(config.model.num_inference_steps) / anchors,
            halves=adapter.entry_halves,
        )
        self._made, self._pricing = costs.sequence, self._priced(costs.model)

    @property
    def pricing(self) -> Pricing:
        """By what the worker costs now."""
        if self._made != self._costs.sequence:
            self._made, self._pricing = self._costs.sequence, self._priced(self._costs.model)
        return self._pricing

    def measured(self) -> Pricing | None:
        """The same; None while it is an estimate, and follows no steps that were taken."""
        return self.pricing if self._costs.model.source == "measured" else None
