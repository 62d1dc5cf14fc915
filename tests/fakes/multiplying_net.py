"""A ControlNet that adds multiples of its inputs (`service_process.Family`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from maskserve_engine.control_link.opening import Opening

PLACES = 5


def residual(sample: Tensor, place: int) -> Tensor:
    """The residual at a place: eight times as wide as the sample."""
    return torch.cat([sample * (place + part + 1) for part in range(8)], dim=-1)


class MultiplyingNet:
    spec = None

    def read(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def control_net(self, model: Any) -> Any:
        return model

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> Opening:
        return opening

    def net_batch(self) -> MultiplyingNet:
        return self

    def run(self, steps: Sequence[Any], send: Callable[[Sequence[Any]], object]) -> None:
        for place in range(PLACES):
            added = [residual(step.sample, place) for step in steps]
            send([(number, place, place, tensor) for number, tensor in enumerate(added)])
