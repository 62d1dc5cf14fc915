"""FLUX in the running batch: its vectors for the steps ahead, and ControlNets before a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maskserve_engine.batch.flow import FlowBatch
from maskserve_engine.control_link.served import RowAsk, ServedRow, ask_service, new_batch
from maskserve_engine.families.flux.blocks import FluxStep
from maskserve_engine.families.flux.control import FluxControlled, FluxRowControl, Nets
from maskserve_engine.families.flux.rows import FluxPrimingRow, FluxRow
from maskserve_engine.families.flux.vectors import AHEAD, Vectors, embed, steps_ahead, vectors
from maskserve_engine.families.flux.weights import FluxWeights

Row = FluxRow | FluxPrimingRow


class FluxBatch(FlowBatch[Row, FluxWeights]):
    """Rows stepped by a FluxTransformer2DModel."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        self._controlled = tuple(
            (row, row.residuals)
            for row in rows
            if isinstance(row, FluxRow) and isinstance(row.residuals, FluxRowControl)
        )
        self._nets = Nets()
        self._served = tuple(
            (row, row.residuals)
            for row in rows
            if isinstance(row, FluxRow) and isinstance(row.residuals, ServedRow)
        )
        self._number = new_batch() if self._served else 0
        self._vectors: tuple[Vectors, ...] = ()
        """Of `ahead` steps, the present one among them."""

    @staticmethod
    def steps_ahead(passes: int) -> int:
        return steps_ahead(passes)

    def begin_step(self, weights: FluxWeights, at: int) -> FluxStep:
        if self._served:
            ask_service([_asked(row, served) for row, served in self._served], self._number)
        if self._controlled:
            self._run_nets()
        return FluxStep(weights, self._vectors_of(weights, at))

    def _vectors_of(self, weights: FluxWeights, at: int) -> Vectors:
        """The vectors of a step, computed when the first of `ahead` steps needs its own."""
        if at % self.ahead == 0 or not self._vectors:
            first = at - at % self.ahead
            ahead, packed = self.timesteps[first : first + self.ahead], self.packed
            emb = embed(weights, ahead, packed.pooled, packed.guidance)
            self._vectors = vectors(weights, emb)
        return self._vectors[at % self.ahead]

    def _run_nets(self) -> None:
        """Have ControlNets say what they add to this step."""
        self._nets.run(
            [
                FluxControlled(
                    control,
                    row.model_input(),
                    [step.timestep for step in row.walk(row.step)[:AHEAD]],
                    row.step,
                    row.steps,
                )
                for row, control in self._controlled
            ]
        )


def _asked(row: FluxRow, served: ServedRow) -> RowAsk:
    """What a service is given of a row's next step: the latents of all its tokens."""
    given, channels = row.model_input(), row.channels
    tokens = given.tokens[:, :channels]
    if given.rest is not None:
        tokens = torch.cat((tokens, given.rest.tokens()[:, :channels]))
    return RowAsk(served, row.step, tokens, len(given.tokens), row.latents_ahead)
