"""Keeps what a tile's convolutions and norms read round it in a feature map, by one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from maskserve_engine.layers.kernels import operation, stand_in

_POSITIONS = 128
"""Positions that a program reads at once."""


@operation("keep_ring", mutates_args=("ring", "moments"))
def keep_ring(
    x: Tensor,
    at_ring: Tensor,
    ring: Tensor,
    moments: Sequence[Tensor],
    region: Sequence[int],
    box: Sequence[int],
    groups: int,
) -> None:
    """Keep a ring, and the moments of the positions outside a box.

    Args:
        x: [C, h, w].
        at_ring: [n] positions in the region.
        ring: [C, n]; written to.
        moments: means and population variances, [groups] float32 each; written to. Empty: no norm
            reads the map.
        region: top, left and columns of the region.
        box: top, bottom, left and right.
        groups: groups of the norms.
    """
    import triton

    from maskserve_engine.layers.keep_ring_kernel import keep_ring_kernel

    x, channels = x.contiguous(), len(x) // groups
    keep_ring_kernel[(groups,)](
        x,
        at_ring,
        ring,
        *(moments or (ring, ring)),
        len(at_ring),
        x.shape[1] * x.shape[2],
        x.shape[2],
        *region,
        *box,
        channels=channels,
        positions=_POSITIONS,
        block=triton.next_power_of_2(channels),
        norms=bool(moments),
    )


@stand_in("keep_ring")
def _(*_: object) -> None:
    return None
