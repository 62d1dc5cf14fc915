"""A LoRA file as low-rank updates of the served model's layers, in any tool's format.

LoKr's and LoHa's products are low-rank updates, too (`maskserve_lora.products`). An OFT is none; it
is only fused.

The header determines the layers (`maskserve_lora.lora_plan`); this module reads the numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from torch import Tensor

from maskserve_common.files.safetensors_header import short
from maskserve_engine.adapters.oft import OftUpdate, oft_update_of
from maskserve_engine.layers.low_rank import Factors
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import PARTS, BadAdapter, header_of_file
from maskserve_lora.lora_plan import LayerUpdate, plan_of
from maskserve_lora.products import core_of

_log = logging.getLogger(__name__)

Parts = dict[str, dict[str, Factors]]
"""Updates by part (`lora_header.PARTS`) and the layer's dotted name in the model."""


class LayerChange(NamedTuple):
    """The update of one layer in float32."""

    part: str
    layer: str
    update: Factors | OftUpdate
    magnitude: Tensor | None = None
    """[out], the lengths of the layer's rows after the update; None: they follow from it."""


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
    for part, layer, factors, _ in changes_of(path, base, model, only):
        assert isinstance(factors, Factors), "an OFT is refused unless it is fused"
        parts.setdefault(part, {})[layer] = Factors(*(tensor.to(dtype) for tensor in factors))
    return parts


def changes_of(
    path: Path,
    base: BaseLayers,
    model: str,
    only: Container[str] = PARTS,
    *,
    fused: bool = False,
) -> Iterator[LayerChange]:
    """Yield the updates of a file on the host, one after the other.

    Args:
        path: file of the LoRA.
        base: layers of the served model.
        model: folder of the model, for the log.
        only: parts to read.
        fused: whether the updates are fused, so that a DoRA or an OFT is served.

    Raises:
        BadAdapter: it cannot be served.
        OSError: the file cannot be read.
    """
    try:
        plan = plan_of(header_of_file(path, fused=fused), base)
        with safetensors.safe_open(path, framework="pt") as opened:
            for update in plan.updates:
                if update.part in only:
                    yield _change(update, opened.get_tensor)
    except safetensors.SafetensorError as error:
        raise BadAdapter(f"is not a safetensors file: {error}") from error
    except BadAdapter as error:  # the check before its load has let it pass
        _log.warning("%s is not a LoRA of %s: it %s", path, model, error)
        raise


def _change(update: LayerUpdate, read: Callable[[str], Tensor]) -> LayerChange:
    """Return the update of a layer, with the scale in B."""
    names, scale = update.names, update.scale
    if update.rotation is not None:
        oft_update = oft_update_of(update, update.rotation, read)
        return LayerChange(update.part, update.layer, oft_update)
    if names.matrices:
        matrices = {role: read(name).float().flatten(1) for role, name in names.matrices}
        down, up = (_lokr if names.kind == "LoKr" else _loha)(matrices)
    else:
        down, up = read(names.down).float(), read(names.up).float()
        if names.core:
            down = torch.einsum("ijkl,jr->irkl", read(names.core).float(), down.flatten(1))
    if scale is None and names.alpha and update.inner_rank >= 0:
        scale = float(read(names.alpha)) / (update.inner_rank or len(down))
    magnitude = read(names.magnitude).float().flatten() if names.magnitude else None
    if update.rows:
        up = torch.cat([up[begin:end] for begin, end in update.rows])
        if magnitude is not None:
            magnitude = torch.cat([magnitude[begin:end] for begin, end in update.rows])
    if scale is not None:
        if not math.isfinite(scale):
            raise BadAdapter(f"has an alpha for {short(update.layer)} that is not a finite number")
        up = up * scale
    missing = update.inputs - down.shape[1]
    if missing:
        down = torch.nn.functional.pad(down, (0, missing))
    if update.kernel:
        down, up = down.view(-1, *update.kernel), up[..., None, None]
    return LayerChange(update.part, update.layer, Factors(down, up), magnitude)


def _lokr(matrices: Mapping[str, Tensor]) -> Factors:
    """Return factors of W1 ⊗ W2: (B1 A1) ⊗ (B2 A2) = (B1 ⊗ B2) (A1 ⊗ A2)."""
    (down1, up1), (down2, up2) = (_side(matrices, f"lokr_w{side}") for side in (1, 2))
    outputs, inputs = len(up1) * len(up2), down1.shape[1] * down2.shape[1]
    if len(down1) * len(down2) < min(outputs, inputs):
        return Factors(torch.kron(down1, down2), torch.kron(up1, up2))
    whole = torch.kron(up1 @ down1, up2 @ down2)
    return _of_whole(whole)


def _loha(matrices: Mapping[str, Tensor]) -> Factors:
    """Return factors of W1 ∘ W2: row i of B has the products of the numbers in row i of B1 and B2,
    and so have the columns of A.
    """
    (down1, up1), (down2, up2) = (_side(matrices, f"hada_w{side}") for side in (1, 2))
    if len(down1) * len(down2) < min(len(up1), down1.shape[1]):
        up = torch.einsum("or,os->ors", up1, up2).flatten(1)
        return Factors(torch.einsum("ri,si->rsi", down1, down2).flatten(0, 1), up)
    return _of_whole((up1 @ down1) * (up2 @ down2))


def _side(matrices: Mapping[str, Tensor], name: str) -> Factors:
    if (whole := matrices.get(name)) is not None:
        return _of_whole(whole)
    left, right = matrices[f"{name}_a"], matrices[f"{name}_b"]
    if (core := matrices.get(core_of(name))) is None:
        return Factors(right, left)
    cores = core.view(len(left), len(right), -1)
    return Factors(torch.einsum("ijk,jr->irk", cores, right).flatten(1), left.T.contiguous())


def _of_whole(whole: Tensor) -> Factors:
    """Return a matrix as factors of which one, of the smaller rank, has ones on its diagonal."""
    outputs, inputs = whole.shape
    if outputs < inputs:
        return Factors(whole, torch.eye(outputs))
    return Factors(torch.eye(inputs), whole)
