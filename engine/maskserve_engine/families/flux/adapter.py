"""FLUX.1 (dev, schnell, Fill), where it differs from other flow-matching transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from maskserve_common.config import Config
from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.batch.forward import Transformer
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningMessage
from maskserve_engine.families.control import NetBatch, RowControl
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.families.mmdit.adapter import FlowAdapter
from maskserve_engine.families.mmdit.batch import FlowBatch, nets_lookahead
from maskserve_engine.families.mmdit.blocks import (
    FluxStep,
    Vectors,
    embed,
    precomputed_steps,
    vectors,
)
from maskserve_engine.families.mmdit.control import (
    FluxControlNet,
    FluxNetRow,
    FluxNets,
    NetTokens,
    controlled,
)
from maskserve_engine.families.mmdit.preparation import PATCH, Grid
from maskserve_engine.families.mmdit.rows import FlowRow, Row, all_tokens
from maskserve_engine.families.mmdit.weights import FluxWeights, places_of
from maskserve_engine.layers.low_rank import Adapters, Place, low_rank
from maskserve_engine.spec.family import FamilyModule
from maskserve_engine.spec.model_spec import ModelSpec

_CONTEXT = "context_embedder"


class FluxBatch(FlowBatch[FluxWeights]):
    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        self._controlled = tuple(
            (row, row.residuals)
            for row in rows
            if isinstance(row, FlowRow) and isinstance(row.residuals, RowControl)
        )
        self._nets = FluxNets() if self._controlled else None

    @staticmethod
    def precomputed_steps(passes: int) -> int:
        return precomputed_steps(passes)

    def begin_step(self, weights: FluxWeights, at: int) -> Transformer:
        if self._nets is not None:
            self._run_nets(self._nets)
        return super().begin_step(weights, at)

    def vectors(self, weights: FluxWeights, steps: slice) -> tuple[Vectors, ...]:
        timesteps = self.timesteps[steps]

        def at(timesteps: Tensor) -> tuple[Vectors, ...]:
            emb = embed(weights, timesteps, self.packed.pooled, self.packed.guidance)
            return vectors(weights, emb)

        if self.packed.layout.narrow.image_stream.vector_of is None:
            return at(timesteps)
        *step_vectors, zero = at(torch.cat((timesteps, torch.zeros_like(timesteps[:1]))))
        return tuple([vectors_of_step.with_timeless(zero) for vectors_of_step in step_vectors])

    def at_step(self, weights: FluxWeights, vectors: Vectors) -> FluxStep:
        return FluxStep(weights, vectors)

    def _run_nets(self, nets: FluxNets) -> None:
        net_rows = []
        for row, control in self._controlled:
            net_tokens = NetTokens(all_tokens(row), row.computed, row.active)
            times = [step.timestep for step in row.walk(0)]
            net_rows.append(controlled(control, net_tokens, times, row.step))
            ahead = nets_lookahead(row, control.schedule)
            if ahead is not None:
                net_tokens = NetTokens(ahead.tokens, ahead.computed, row.active)
                at = ahead.step
                net_rows.append(controlled(control.for_lookahead, net_tokens, times, row.step, at))
        nets.run(net_rows)


class FluxAdapter(FlowAdapter[FluxWeights]):
    family: ClassVar[FamilyModule] = flux
    transformer = "FluxTransformer2DModel"
    batches = FluxBatch
    text_places: ClassVar[tuple[str, ...]] = (_CONTEXT,)
    flow_sigmas = frozenset({"generate"})
    shallowest = False
    """Whether `[controls] unequal_depths` is `shallowest`; passed on by
    `OpeningMessage.shallowest`."""

    @classmethod
    def load(cls, spec: ModelSpec, config: Config) -> Self:
        adapter = super().load(spec, config)
        adapter.shallowest = config.controls.unequal_depths == "shallowest"
        return adapter

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        return replace(FluxWeights.of(model), placed_bytes=placed_bytes, graphs=graphs)

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model)

    def blank_prompt(self, tokens: int) -> Conditioning:
        blank = super().blank_prompt(tokens)
        if self.weights.time_text_embed.text_embedder is None:
            return blank
        width = self.spec.denoiser["pooled_projection_dim"]
        return {**blank, "pooled": np.zeros(width, np.float32)}

    def text(self, embeds: Tensor, grid: tuple[int, int], adapters: Adapters = ()) -> Tensor:
        embedder = self.weights.context_embedder
        assert embedder is not None, "ControlNets alone may lack it"
        if adapters:
            embedder = low_rank(_CONTEXT, embedder, (adapters,))
        return embedder(embeds, ((0, len(embeds)),))

    @staticmethod
    def ids(pictures: Sequence[Grid], text: int) -> Tensor:
        """Return [T + N, axes] positions of a prompt, and of the picture and its references, of
        these grids: here a picture's number, row and column. Families with others override this.
        """
        tokens = [
            torch.cartesian_prod(torch.tensor([number]), torch.arange(rows), torch.arange(columns))
            for number, (rows, columns) in enumerate(pictures)
        ]
        return torch.cat((torch.zeros(text, 3), *tokens))

    def positions(self, height: int, width: int, text: int, references: tuple[Grid, ...]) -> Tensor:
        ids = self.ids(((height, width), *references), text)
        # Each angle stands twice, side by side.
        cos, sin = self.model.pos_embed(*to_device([ids], self.device))
        return torch.complex(cos[:, ::2].contiguous(), sin[:, ::2].contiguous())

    def carried(self, row: Row) -> tuple[Any, ...] | None:
        """Return None if the row's ControlNets keep tensors that another rank would miss; see
        `FlowAdapter.carried`.
        """
        control = row.residuals if isinstance(row, FlowRow) else None
        missed = isinstance(control, RowControl) and control.missed
        return None if missed else super().carried(row)

    def control_net(self, model: Any) -> FluxControlNet:
        with torch.inference_mode():
            control_spec, channels = self.spec.control, self.spec.latent_channels * PATCH**2
            assert control_spec is not None, "nets of other models are refused"
            weights = self.weights_of(model, 0, None)
            return FluxControlNet.of(model, weights, self.model, channels, control_spec)

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        prepared = self._preparation.prepared(job)
        if not prepared.controls:
            return None
        with torch.inference_mode():
            cis = torch.cat((row.prompt.cis, row.image.masked.cis))
            if row.image.unmasked is not None:
                cis = torch.cat((cis, row.image.unmasked.cis))
            facts = OpeningMessage(
                tuple([OpenedControl.of(control) for control, _ in prepared.controls]),
                tuple([step.timestep for step in row.walk(0)]),
                self._nets_schedule(row, job),
                row.active,
                len(row.prompt.text),
                job.request.settings.guidance_scale,
                self.shallowest,
            )
            ids = None
            if row.image.unmasked is not None:
                ids = torch.cat((row.image.masked.ids, row.image.unmasked.ids)).cpu()
            pictures = [x if ids is None else x[ids] for _, x in prepared.controls]
            arrays = {
                "cis": torch.view_as_real(cis),
                **{f"picture.{i}": picture for i, picture in enumerate(pictures)},
            }
            prompts = prepared.inputs.prompt, prepared.inputs.negative
            for i, prompt in enumerate(prompts[: len(self._net_passes(row))]):
                assert prompt is not None, "a second pass has a negative prompt"
                arrays[f"embeds.{i}"] = prompt.embeds
                if prompt.pooled is not None:
                    arrays[f"pooled.{i}"] = prompt.pooled
            return Opening(facts, arrays)

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> FluxNetRow:
        with torch.inference_mode():
            return FluxNetRow.of(opening, nets)

    def net_batch(self) -> NetBatch:
        return NetBatch(FluxNets())
