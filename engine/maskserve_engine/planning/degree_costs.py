"""Seconds of one row's step on several devices that share its tokens (Ulysses: two all-to-alls per
block, before and after attention), from counted FLOPs, bytes and calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from maskserve_common.line_fit import Line
from maskserve_engine.planning.flops import ModelWork, RowTokens

DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ExchangeCosts:
    bytes_per_second: float = 450e9
    """Bytes that one device sends per second; the default is NVLink 4 in one direction."""
    call_seconds: float = 20e-6
    """Seconds that every call takes beside its bytes."""
    value_bytes: int = 2
    """Bytes per number sent."""

    def seconds(self, work: ModelWork, row: RowTokens, degree: int) -> float:
        """Return the seconds of all calls of a step; each lasts as long as the device that sends or
        receives most.
        """
        bytes_sent = sent_bytes(work, row, degree, self.value_bytes) * busiest(work.heads, degree)
        return bytes_sent / self.bytes_per_second + calls(work, degree) * self.call_seconds


def calls(work: ModelWork, degree: int) -> int:
    """Return the number of all-to-all calls of a step."""
    return 2 * len(work.blocks) * work.copies if degree > 1 else 0


def sent_bytes(work: ModelWork, row: RowTokens, degree: int, value_bytes: int = 2) -> float:
    """Return the mean bytes that one of `degree` devices sends in a step: q, k and v before
    attention and the output after it, of the tokens that the row computes, to the devices of their
    heads or tokens. Cached entries are cut by head and stay where they are.
    """
    text = row.text if work.joint else 0.0
    values = sum(4.0 * (row.active[b.level] + text) * b.width for b in work.blocks)
    return values * work.copies * value_bytes / degree * (degree - 1) / degree


def most_heads(heads: int, degree: int) -> float:
    """Return the share of attention heads on the device with most; 1 / `degree`
    where they divide.
    """
    return math.ceil(heads / degree) / heads if heads else 1 / degree


def busiest(heads: int, degree: int) -> float:
    """Return how many times the mean of `sent_bytes` the busiest device sends or receives: 1 where
    heads divide.

    A device has the share s of the heads and 1 / degree of the tokens. It sends 3 (1 - s) numbers
    of each of its tokens before attention and s of each other token after it, and receives s and 1
    - s instead, in units of the model's width.
    """
    if not heads or degree == 1:
        return 1.0
    most, token_share = [], 1 / degree
    for share in (most_heads(heads, degree), heads // degree / heads):
        most.append(3 * (1 - share) * token_share + share * (1 - token_share))
        most.append(3 * share * (1 - token_share) + (1 - share) * token_share)
    return max(most) / (4 * token_share * (1 - token_share))


def uneven_flops(work: ModelWork, row: RowTokens, kind: str, degree: int) -> float:
    """Return the FLOPs that the device with most heads computes beyond an even share of a row's
    step.
    """
    beyond = most_heads(work.heads, degree) - 1 / degree
    return beyond * work.attention_flops(row, kind) if beyond else 0.0


def seconds_by_degree(
    work: ModelWork,
    row: RowTokens,
    kind: str,
    compute: Line,
    exchange: ExchangeCosts,
    degrees: tuple[int, ...] = DEGREES,
) -> tuple[float, ...]:
    """Return the seconds of a step of `row` alone at each of `degrees`.

    Args:
        work: the model at the image's size.
        row: its tokens; all of them for a dense row.
        kind: how its blocks run: "dense" or "kv".
        compute: seconds of a step against FLOPs on one device; every device pays the fixed part.
        exchange: costs of the calls between devices.
        degrees: numbers of devices.
    """
    flops = work.step_flops([row], kind)
    return tuple(
        compute.seconds(flops / k + uneven_flops(work, row, kind, k))
        + exchange.seconds(work, row, k)
        for k in degrees
    )
