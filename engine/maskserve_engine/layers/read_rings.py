"""Reads the surroundings of a tile from all feature maps of an entry, in one kernel: the positions
of each map's ring, and the moments of its groups outside the box.
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
"""Fields of a map: addresses of data, scales, groups, ids, ring and box positions; numbers of
positions in the region, the ring and the box; channels; offsets of its ring and its moments; its
number; positions of the whole map."""
POSITIONS, BLOCK = 64, 16
"""Positions and channels that a program handles at once."""


class RingMap(NamedTuple):
    coded: Coded
    """[tokens, channels], both halves concatenated."""
    ids: Tensor | None
    """[halves · region] tokens that lie in the region; None: exactly these tokens are stored."""
    region: int
    """Positions of a half."""
    ring: Tensor
    """[n] ring positions in the region."""
    box: Tensor | None
    """[box] box positions in the region; None: no norm reads the map."""
    whole: int
    """Positions of the whole map."""
    number: int
    to_ring: int
    """Offset of its [halves, C, n] in the buffer of rings."""
    to_moments: int
    """Offset of its [2, halves, groups], means then variances, in the buffer of moments."""


def ring_table(maps: Sequence[RingMap]) -> Tensor:
    """Return the kernel's [maps, FIELDS] int64 table, in host memory, for maps of one format. The
    tensors that it points to must outlive it.
    """
    map_tensors = [
        (
            ring_map.coded.data,
            ring_map.coded.scale,
            ring_map.coded.groups,
            ring_map.ids,
            ring_map.ring,
            ring_map.box,
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
            0 if ring_map.box is None else len(ring_map.box),
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
        rings: buffer of rings, in the model's dtype; written to.
        moments: buffer of moments, float32; written to.
        totals: [maps · halves, 2 · groups] float32 of the whole maps: means, then variances.
        table: `ring_table`, on the device.
        halves: halves of the entry.
        format: storage format of the maps.
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
