"""The data of a row that a ControlNet service gets once, before the row's first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs
from safetensors.torch import load, save
from torch import Tensor

from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.batch.transfer import moved

_NO_PICTURE = np.zeros((0, 0, 3), np.uint8)


class OpenedControl(msgspec.Struct, frozen=True):
    """A ControlNet's weight in one edit; its picture is among the arrays."""

    net: str
    scale: float
    start: float
    end: float
    mode: int | None

    @classmethod
    def of(cls, control: ControlInput) -> OpenedControl:
        return cls(control.net, control.scale, control.start, control.end, control.mode)

    @property
    def input(self) -> ControlInput:
        """The control as rows use it, without the picture."""
        return ControlInput(self.net, _NO_PICTURE, self.scale, self.start, self.end, self.mode)


class OpeningMessage(msgspec.Struct, frozen=True):
    """Everything but the arrays; sent as JSON."""

    controls: tuple[OpenedControl, ...]
    """ControlNets that act on the row."""
    timesteps: tuple[float, ...]
    schedule: RefreshSchedule
    """Schedule of the row's refresh steps, as in `families.control.RowControl`."""
    active: int = 0
    """FLUX: image tokens that a step with cached tokens computes; 0: all steps
    compute all tokens.
    """
    text: int = 0
    """FLUX: text tokens of the prompt."""
    guidance: float | None = None
    """FLUX: guidance_scale."""
    shallowest: bool = False
    """FLUX: whether all its ControlNets use the depth of the shallowest (`common_depth`)."""
    pads: int = 0
    """Z-Image: text tokens that stand beside the picture (`RowInput.pads`)."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Opening of one row; its family defines which arrays there are. `picture.N` is the picture of
    control N.
    """

    spec: OpeningMessage
    arrays: dict[str, Tensor]

    def of_nets(self, numbers: range) -> Opening:
        """Return the opening with only these of its controls."""
        controls = tuple([self.spec.controls[number] for number in numbers])
        arrays = {name: x for name, x in self.arrays.items() if not name.startswith("picture.")}
        pictures = {
            f"picture.{at}": self.arrays[f"picture.{number}"]
            for at, number in enumerate(numbers)
            if f"picture.{number}" in self.arrays
        }
        return Opening(structs.replace(self.spec, controls=controls), {**arrays, **pictures})

    def on(self, device: torch.device) -> Opening:
        """Return a copy with its numbers on a device, moved in one transfer; ids stay in host
        memory.
        """
        host_floats = {
            name: x
            for name, x in self.arrays.items()
            if x.is_floating_point() and x.device.type == "cpu"
        }
        return Opening(self.spec, {**self.arrays, **moved(host_floats, device)})

    def packed(self) -> tuple[dict[str, Any], bytes]:
        """Return JSON objects and the arrays as safetensors bytes."""
        arrays = {name: x.detach().cpu().contiguous() for name, x in self.arrays.items()}
        return msgspec.to_builtins(self.spec), save(arrays)

    @classmethod
    def unpacked(cls, spec: object, arrays: bytes) -> Opening:
        """Read back the result of `packed`.

        Raises:
            ValueError: the data is no opening.
        """
        try:
            return cls(msgspec.convert(spec, OpeningMessage), load(arrays))
        except Exception as error:
            raise ValueError(f"the row's opening cannot be read: {error}") from error
