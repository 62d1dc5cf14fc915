"""OFT: a file's orthogonal blocks, and the weights they rotate (`maskserve_lora.rotations`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from maskserve_common.files.safetensors_header import short
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.lora_plan import LayerUpdate
from maskserve_lora.rotations import COLUMNS, RESCALE, PeftKeys, Rotation


class OftUpdate(NamedTuple):
    """An OFT of one layer, in float32."""

    blocks: Tensor
    """[n, b, b] factors of the weight's rows, or of its columns, of which one may rotate all."""
    of_rows: bool
    lengths: Tensor | None = None
    """[out] factors of the rows; None: they keep their lengths."""

    def applied(self, weight: Tensor) -> Tensor:
        """Return a layer's new weight; `weight` is float32."""
        blocks, flat = self.blocks.to(weight.device), weight.flatten(1)
        if not self.of_rows:
            columns = flat.unflatten(1, (-1, blocks.shape[1]))
            blocks = blocks.expand(columns.shape[1], -1, -1)
            return torch.einsum("oni,nij->onj", columns, blocks).reshape(weight.shape)
        rows = torch.bmm(blocks, flat.unflatten(0, blocks.shape[:2])).view_as(weight)
        if self.lengths is None:
            return rows
        return rows * self.lengths.to(weight.device).view(-1, *[1] * (weight.dim() - 1))


def oft_update_of(
    update: LayerUpdate, rotation: Rotation, read: Callable[[str], Tensor]
) -> OftUpdate:
    """Read an OFT of a layer.

    Args:
        update: plan of the layer.
        rotation: shape of the OFT in the file.
        read: returns a tensor of the file.

    Raises:
        BadAdapter: its numbers are too large, or its alpha is none.
    """
    names = dict(update.names.matrices)
    lengths = None
    if rotation.of_rows:
        alpha = float(read(update.names.alpha)) if update.names.alpha else 0.0
        if not math.isfinite(alpha):
            raise BadAdapter(f"has an alpha for {short(update.layer)} that is not a finite number")
        row_rotations = []
        for begin, end in update.rows:
            blocks, which = rotation.within(begin, end)
            bound = alpha * blocks.number * blocks.side
            row_rotations.append(_of_rows(read(names[blocks.role]).float(), bound)[which])
        rotations = torch.cat(row_rotations)
        if RESCALE in names:
            all_lengths = read(names[RESCALE]).float().flatten()
            lengths = torch.cat([all_lengths[begin:end] for begin, end in update.rows])
    else:
        rotations = _of_columns(read(names[COLUMNS]).float(), rotation.side, update.peft)
        if update.kernel and not update.names.of_peft:  # OneTrainer's
            rotations = rotations.mT
    if not bool(rotations.isfinite().all()):
        raise BadAdapter(f"has numbers for {short(update.layer)} that are too large for a rotation")
    return OftUpdate(rotations.mT, rotation.of_rows, lengths)


def _of_rows(numbers: Tensor, bound: float) -> Tensor:
    """Return R = (I + Q) (I - Q)⁻¹; a bound above 0 is that of the norm of all blocks' Q."""
    skew = numbers - numbers.mT
    if bound > 0:
        skew = skew * min(1.0, bound / (float(torch.linalg.vector_norm(skew)) + 1e-8))
    one = torch.eye(skew.shape[1])
    return torch.linalg.solve(one - skew, one + skew, left=False)


def _of_columns(numbers: Tensor, side: int, peft: PeftKeys) -> Tensor:
    """Return R as PEFT does: (I + Q)⁻¹ (I - Q), or the first terms of a series that is its inverse:
    I + 2 Q + 2 Q² + …, the last with one for two.
    """
    upper = torch.zeros(len(numbers), side, side)
    rows, columns = torch.triu_indices(side, side, 1)
    upper[:, rows, columns] = numbers
    skew = upper - upper.mT
    if peft.coft:
        bound = peft.eps / math.sqrt(len(skew))
        norms = torch.linalg.matrix_norm(skew, keepdim=True)
        skew = torch.where(norms <= bound, skew, skew * (bound / norms))
    one = torch.eye(side)
    if not peft.use_cayley_neumann:
        return torch.linalg.solve(one + skew, one - skew, left=False)
    terms = peft.num_cayley_neumann_terms
    rotations = one.expand_as(skew).clone()
    if terms > 1:
        rotations += 2 * skew
    if terms > 2:
        power = skew @ skew
        rotations += 2 * power
        for _ in range(3, terms - 1):
            power = power @ skew
            rotations += 2 * power
        rotations += power @ skew
    return rotations
