"""A LoRA file as low-rank updates of the served model's layers, in any tool's format.

The header determines the layers (`maskserve_lora.lora_plan`); this module reads the numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from maskserve_common.files.safetensors_header import short
from maskserve_engine.layers.low_rank import Factors
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import PARTS, BadAdapter, header_of_file
from maskserve_lora.lora_plan import LayerUpdate, plan_of

_log = logging.getLogger(__name__)

Parts = dict[str, dict[str, Factors]]
"""Updates by part (`lora_header.PARTS`) and the layer's dotted name in the model."""


def read_lora(
    path: Path,
    base: BaseLayers,
    model: str,
    dtype: torch.dtype = torch.float32,
    only: Container[str] = PARTS,
) -> Parts:
    """Read a file on the host.

    Args:
        path: file of the LoRA.
        base: layers of the served model.
        model: folder of the model, for the log.
        dtype: dtype of the factors; alphas are multiplied in float32 before.
        only: parts to read.

    Raises:
        BadAdapter: it cannot be served.
        OSError: the file cannot be read.
    """
    parts: Parts = {}
    try:
        plan = plan_of(header_of_file(path), base)
        with safetensors.safe_open(path, framework="pt") as opened:
            for update in plan.updates:
                if update.part in only:
                    factors = _factors(update, opened.get_tensor)
                    cast = Factors(*(tensor.to(dtype) for tensor in factors))
                    parts.setdefault(update.part, {})[update.layer] = cast
    except safetensors.SafetensorError as error:
        raise BadAdapter(f"is not a safetensors file: {error}") from error
    except BadAdapter as error:  # the check before its load has let it pass
        _log.warning("%s is not a LoRA of %s: it %s", path, model, error)
        raise
    return parts


def _factors(update: LayerUpdate, read: Callable[[str], Tensor]) -> Factors:
    """Return float32 factors, with the scale in B."""
    names, scale = update.names, update.scale
    down, up = read(names.down).float(), read(names.up).float()
    if scale is None and names.alpha:
        scale = float(read(names.alpha)) / len(down)
    if update.rows:
        up = torch.cat([up[begin:end] for begin, end in update.rows])
    if scale is not None:
        if not math.isfinite(scale):
            raise BadAdapter(f"has an alpha for {short(update.layer)} that is not a finite number")
        up = up * scale
    missing = update.inputs - down.shape[1]
    if missing:
        down = torch.nn.functional.pad(down, (0, missing))
    return Factors(down, up)
