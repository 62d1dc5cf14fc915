"""Rows of a flow-matching transformer that takes ControlNets: their nets before each step, and what
a ControlNet service needs of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from maskserve_common.config import Config
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.forward import Transformer
from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningMessage
from maskserve_engine.families.control import NetBatch, RowControl
from maskserve_engine.families.mmdit.adapter import FlowAdapter
from maskserve_engine.families.mmdit.batch import FlowBatch, FlowWeights, nets_lookahead
from maskserve_engine.families.mmdit.control import FluxNetRow, FluxNets, NetTokens, controlled
from maskserve_engine.families.mmdit.preparation import FlowPrompt
from maskserve_engine.families.mmdit.rows import FlowRow, Row, all_tokens
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.loader import read_modules

W = TypeVar("W", bound=FlowWeights)


class ControlledBatch(FlowBatch[W]):
    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        self._controlled = tuple(
            (row, row.residuals)
            for row in rows
            if isinstance(row, FlowRow) and isinstance(row.residuals, RowControl)
        )
        self._nets = FluxNets() if self._controlled else None

    def begin_step(self, weights: W, at: int) -> Transformer:
        if self._nets is not None:
            self._run_nets(self._nets)
        return super().begin_step(weights, at)

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


class ControlledAdapter(FlowAdapter[W]):
    """Steps rows of edits, some of them with ControlNets."""

    shallowest = False
    """Whether `[controls] unequal_depths` is `shallowest`; passed on by
    `OpeningMessage.shallowest`."""
    weight_folder = Path(), ""
    """Folder of the model's weights, and their variant."""
    net_modules: ClassVar[tuple[str, ...]] = ()
    """Modules of the model that its ControlNets run, too."""
    _read_modules: Mapping[str, Any] | None = None

    @classmethod
    def load(cls, spec: ModelSpec, config: Config) -> Self:
        adapter = super().load(spec, config)
        adapter.shallowest = config.controls.unequal_depths == "shallowest"
        adapter.weight_folder = Path(config.model.path, "transformer"), config.model.variant
        return adapter

    @property
    def net_module_bytes(self) -> int:
        modules = [self.model.get_submodule(name) for name in self.net_modules]
        tensors = (x for module in modules for x in (*module.parameters(), *module.buffers()))
        return sum(tensor.numel() for tensor in tensors) * self.dtype.itemsize

    def modules_for(self, net: Any) -> Mapping[str, Any]:
        """Return `net_modules` by name, where a net lies; a service, whose model has no weights,
        reads them once.
        """
        if self.device.type != "meta" or net.device.type == "meta":
            return {name: self.model.get_submodule(name) for name in self.net_modules}
        if self._read_modules is None:
            modules = read_modules(self.model, self.net_modules, *self.weight_folder)
            self._read_modules = {
                name: module.to(net.device, net.dtype) for name, module in modules.items()
            }
        return self._read_modules

    def carried(self, row: Row) -> tuple[Any, ...] | None:
        """Return None if the row's ControlNets keep tensors that another rank would miss; see
        `FlowAdapter.carried`.
        """
        control = row.residuals if isinstance(row, FlowRow) else None
        missed = isinstance(control, RowControl) and control.missed
        return None if missed else super().carried(row)

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        prepared = self._preparation.prepared(job)
        if not prepared.controls:
            return None
        with torch.inference_mode():
            cis = torch.cat((row.prompt.cis, row.image.masked.cis))
            if row.image.unmasked is not None:
                cis = torch.cat((cis, row.image.unmasked.cis))
            message = OpeningMessage(
                tuple([OpenedControl.of(control) for control, _ in prepared.controls]),
                tuple([step.timestep for step in row.walk(0)]),
                self._nets_schedule(row, job),
                row.active,
                len(row.prompt.text),
                job.request.settings.guidance_scale,
                self.shallowest,
                row.prompt.pads,
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
                arrays |= {
                    f"{name}.{i}": array for name, array in self.net_prompt(job, prompt).items()
                }
            return Opening(message, arrays)

    def net_prompt(self, job: EditJob, prompt: FlowPrompt) -> dict[str, Tensor]:
        """Return a prompt as `FluxNetRow.of` reads it: `embeds`, and `pooled` if the model has it;
        `text_cis` where prompts of one edit differ in length.
        """
        pooled = {} if prompt.pooled is None else {"pooled": prompt.pooled}
        return {"embeds": prompt.embeds, **pooled}

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> FluxNetRow:
        with torch.inference_mode():
            return FluxNetRow.of(opening, nets)

    def net_batch(self) -> NetBatch:
        return NetBatch(FluxNets())
