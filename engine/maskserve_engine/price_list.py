"""What rows cost on this worker: counted work, and a line through the steps it has taken."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from maskserve_core.config import Config, cores
from maskserve_core.contracts.facts import ModelFacts, anchor_stride
from maskserve_core.contracts.pricing import Pricing
from maskserve_core.contracts.status_record import RowStatus
from maskserve_core.planning.cost_model import CostModel, Line, estimate, fit
from maskserve_core.planning.entry_bytes import FORMATS
from maskserve_core.planning.flops import flux_work
from maskserve_core.planning.flops_unet import unet_work
from maskserve_core.routing.estimate import pricing_of
from maskserve_engine.stages.loader import device_of, dtype_of

PRICED = {"flux": flux_work, "unet": unet_work}
"""Family -> what counts its work."""
_WINDOW = 256
_EVERY = 32
"""Steps between two fits: one takes a tenth of a millisecond."""
_VARIED = 0.1
"""Below this coefficient of variation a line through the steps has no slope to speak of."""


class PriceList:
    """Prices in seconds, from an estimate of the device at first.

    Args:
        config: of this worker.
        facts: of the served model.
    """

    def __init__(self, config: Config, facts: ModelFacts) -> None:
        device, dtype = device_of(config), str(dtype_of(config)).removeprefix("torch.")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        costs = estimate(name, dtype, cores=config.model.torch_threads or cores())
        self._line = costs.compute
        side = facts.native_resolution // facts.vae_scale_factor
        cache, steps = config.cache, config.model.num_inference_steps
        stride = min(anchor_stride(cache.stride, facts), steps)
        self._flops = pricing_of(
            PRICED[facts.family](facts.denoiser, side, side),
            CostModel("FLOPs", Line(0.0, 1.0), costs.loads),
            FORMATS[dtype if cache.entry_format == "model" else cache.entry_format],
            text=facts.text_tokens(config.model.max_sequence_length),
            anchors=math.ceil(steps / stride),
            steps_per_anchor=stride,
        )
        """Prices with FLOPs in place of seconds of computation."""
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._new = 0
        self.pricing = self._priced()

    def measured(self, rows: Sequence[RowStatus], seconds: float) -> None:
        """A step of `rows` took so long, loading apart."""
        work = sum(
            self._flops.row(row.active_tokens, row.total_tokens, cached=row.kind == "cached")[0]
            for row in rows
        )
        self._samples.append((work, seconds))
        self._new += 1
        if self._new >= _EVERY:
            self._new = 0
            self._line = self._fitted()
            self.pricing = self._priced()

    def _fitted(self) -> Line:
        """Through the samples; with nothing but equal steps among them, the line so far, scaled."""
        flops, seconds = np.array(self._samples).T
        if flops.std() > _VARIED * flops.mean():
            return fit(flops.tolist(), seconds.tolist())
        scale = float(seconds.mean()) / self._line.seconds(float(flops.mean()))
        return Line(self._line.fixed * scale, self._line.per_unit * scale)

    def _priced(self) -> Pricing:
        return self._flops.with_compute(self._line.fixed, self._line.per_unit)
