"""Seconds of one row's step on several devices that share its tokens (Ulysses: two all-to-alls per
block, before and after attention), from counted FLOPs, bytes and calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from maskserve_core.planning.cost_model import Line
from maskserve_core.planning.flops import ModelWork, RowTokens

DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ExchangeCosts:
    """What an all-to-all costs."""

    bytes_per_second: float = 450e9
    """That a device sends; NVLink 4 in one direction."""
    call_seconds: float = 20e-6
    """Of one call, however small."""
    value_bytes: int = 2
    """Of a number that is sent."""

    def seconds(self, work: ModelWork, row: RowTokens, degree: int) -> float:
        """Of all calls of a step."""
        if degree == 1:
            return 0.0
        calls = 2 * len(work.blocks) * work.copies
        return sent_bytes(work, row, degree, self.value_bytes) / self.bytes_per_second + (
            calls * self.call_seconds
        )


def sent_bytes(work: ModelWork, row: RowTokens, degree: int, value_bytes: int = 2) -> float:
    """That one of `degree` devices sends in a step: q, k and v before and the output after
    attention, of the tokens that the row computes, each to where its heads or tokens are. Cached
    entries are cut by head and stay where they are.
    """
    text = row.text if work.joint else 0.0
    values = sum(4.0 * (row.active[b.level] + text) * b.width for b in work.blocks)
    return values * work.copies * value_bytes / degree * (degree - 1) / degree


def seconds_by_degree(
    work: ModelWork,
    row: RowTokens,
    kind: str,
    compute: Line,
    exchange: ExchangeCosts,
    degrees: tuple[int, ...] = DEGREES,
) -> tuple[float, ...]:
    """Seconds of a step of `row` by itself at each of `degrees`.

    Args:
        work: the model at the image's size.
        row: its tokens; all of them for a dense row.
        kind: how its blocks run: "dense" or "kv".
        compute: seconds of a step against FLOPs on one device; what is fixed is paid by each.
        exchange: what the calls between them cost.
        degrees: numbers of devices.
    """
    flops = work.step_flops([row], kind)
    return tuple(compute.seconds(flops / k) + exchange.seconds(work, row, k) for k in degrees)
