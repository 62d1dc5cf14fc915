"""How the rows of a UNet get their ControlNets, which run beside it or at a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskserve_common.contracts.settings import acting
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.control_link.opening import OpenedControl, Opening, OpeningMessage
from maskserve_engine.control_link.served import ServedRow
from maskserve_engine.families.control import NetBatch, OpenedRows, RowControl, ServedControl
from maskserve_engine.families.unet.control import UnetControlNet, UnetNetRow, UnetNets
from maskserve_engine.families.unet.preparation import UnetPreparation
from maskserve_engine.families.unet.rows import UnetRow


class UnetControls(OpenedRows):
    """Base of a UNet's adapter: what its ControlNets need of a row."""

    model: Any
    dtype: torch.dtype
    _preparation: UnetPreparation

    def control_net(self, model: Any) -> UnetControlNet:
        with torch.inference_mode():
            return UnetControlNet.of(model, self.model, self.spec.latent_channels)

    def set_control(self, row: Any, control: RowControl[Any]) -> None:
        row.control = control

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        acts = acting(job.controls, row.steps)
        if not acts:
            return None
        with torch.inference_mode():
            text, micro, pictures = self._net_inputs(row, job, acts)
            arrays = {"texts": text}
            arrays |= {f"micro.{i}": tensor for i, tensor in enumerate(micro)}
            arrays |= {f"picture.{i}": tensor for i, tensor in enumerate(pictures)}
            if row.inactive is not None:
                active = row.inactive.active
                arrays |= {f"active.{i}": torch.from_numpy(active[i]) for i in range(len(active))}
            controls = tuple([OpenedControl.of(tensor) for tensor in acts])
            timesteps = tuple(row.precomputed_timesteps)
            message = OpeningMessage(controls, timesteps, self._nets_schedule(row, job))
            return Opening(message, arrays)

    def _nets_schedule(self, row: UnetRow, job: EditJob) -> RefreshSchedule:
        """Return the schedule of the row's ControlNets. In a row without a template they compute
        all tokens when the base does.
        """
        if row.refresh_schedule is not None:
            return replace(row.refresh_schedule, refresh_steps=frozenset())
        return self.net_schedule(job, job.controls)

    def serve_control(self, row: Any, served: ServedRow) -> None:
        row.control = ServedControl.of(served, 1 if row.guidance is None else 2)

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> UnetNetRow:
        return UnetNetRow.of(opening, nets)

    def net_batch(self) -> NetBatch:
        return NetBatch(UnetNets())

    def _net_inputs(
        self, row: Any, job: EditJob, acts: Sequence[ControlInput]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return a net's inputs for an edit, in host memory: the passes' texts, SDXL's
        micro-conditioning, and the control pictures.
        """
        prompts = [job.conditioning]
        if row.guidance is not None:
            assert job.negative is not None, "guided rows have a negative prompt"
            prompts.append(job.negative)
        texts = [self._preparation.texts(item, job) for item in prompts]
        text, *micro = [torch.stack(item) for item in zip(*texts, strict=True)]
        return text, micro, [self._picture(item) for item in acts]

    def _picture(self, control: ControlInput) -> Tensor:
        """Return [1, 3, H, W] from 0 to 1."""
        pixels = torch.from_numpy(control.picture).permute(2, 0, 1)[None]
        return (pixels.float() / 255).to(self.dtype)
