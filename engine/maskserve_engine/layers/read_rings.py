"""What is read round a tile, of all feature maps of an entry, in one kernel: the positions of each
map's ring, and the means and variances of its groups outside of the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskserve_engine.cache.entries import GROUP, Coded
from maskserve_engine.layers.kernels import addresses, operation, stand_in

FIELDS = 14
"""Of a map: addresses of data, scales, groups, ids, ring and own; positions in the region, the ring
and the box; channels; where its ring and its moments go; its number; and positions of the whole
map."""
POSITIONS, BLOCK = 64, 16
"""Positions and channels that a program has at once."""


class RingMap(NamedTuple):
    """One map, and where what is read of it goes."""

    coded: Coded
    """[tokens, channels], both halves one behind the other."""
    ids: Tensor | None
    """[halves · region] tokens of it that lie in the region; None: they are just these."""
    region: int
    """Positions of a half."""
    ring: Tensor
    """[n] positions of the region."""
    own: Tensor | None
    """[box] positions of the region; None: no norm reads the map."""
    whole: int
    """Positions of the whole map."""
    number: int
    """Of the map."""
    to_ring: int
    """In the buffer of rings, where its [halves, C, n] begin."""
    to_moments: int
    """In the buffer of moments, where its [2, halves, groups] begin: means, then variances."""


def ring_table(maps: Sequence[RingMap]) -> Tensor:
    """[maps, FIELDS] int64 in host memory: what the kernel is told of maps, all of one format. The
    tensors that it points to must outlive it.
    """
    map_tensors = [
        (
            ring_map.coded.data,
            ring_map.coded.scale,
            ring_map.coded.groups,
            ring_map.ids,
            ring_map.ring,
            ring_map.own,
        )
        for ring_map in maps
    ]
    present_tensors = [tensor for of_map in map_tensors for tensor in of_map if tensor is not None]
    tensor_addresses = iter(addresses(present_tensors).numpy().tolist())
    rows = [
        [
            *(0 if tensor is None else next(tensor_addresses) for tensor in of_map),
            ring_map.region,
            len(ring_map.ring),
            0 if ring_map.own is None else len(ring_map.own),
            ring_map.coded.channels,
            ring_map.to_ring,
            ring_map.to_moments,
            ring_map.number,
            ring_map.whole,
        ]
        for of_map, ring_map in zip(map_tensors, maps, strict=True)
    ]
    return torch.from_numpy(np.array(rows, np.int64))


@operation("read_rings", mutates_args=("rings", "moments"))
def read_rings(
    rings: Tensor, moments: Tensor, totals: Tensor, table: Tensor, halves: int, format: str
) -> None:
    """Read all maps of a table.

    Args:
        rings: the buffer of rings, in the model's dtype; written to.
        moments: the buffer of moments, float32; written to.
        totals: [maps · halves, 2 · groups] float32 of the whole maps: means, then variances.
        table: `ring_table`, on the device.
        halves: of the entry.
        format: of the maps.
    """
    from maskserve_engine.layers.read_rings_kernel import read_rings_kernel

    groups = totals.shape[1] // 2
    read_rings_kernel[(len(table), halves, groups)](
        rings,
        moments,
        totals,
        table,
        halves,
        fields=FIELDS,
        norm_groups=groups,
        positions=POSITIONS,
        block=BLOCK,
        kind=format,
        group=GROUP,
    )


@stand_in("read_rings")
def _(*_: object) -> None:
    return None
