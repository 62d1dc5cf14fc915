"""CFG parallelism over packed rows: the ranks that take a step deal its passes among themselves.

Under classifier-free guidance a row is two independent passes of the model until their answers are
mixed. Each rank computes whole passes, and at the end of a step all ranks exchange the model's
answers: one exchange per step, of the size of latents, where `sequence_parallel` has two per block.
Every rank then moves every row by the same bytes.

A row's passes go to different ranks; a row of one pass goes to the least loaded rank. The passes of
a row with a step cache go to the same ranks at every step, because the cache stays where it was
computed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor

from maskserve_engine.batch.sequence_parallel import Exchange


def assign_passes(
    rows: Sequence[Sequence[float]], count: int, stays: Sequence[str | None]
) -> tuple[int, ...]:
    """Return the rank of each pass, row by row.

    Args:
        rows: cost of each of a row's passes, in any unit; the prompt's pass first.
        count: number of ranks; no row has more passes.
        stays: name of each row whose passes always go to the ranks that the name selects; None:
            to any rank.
    """
    loads = [0.0] * count
    ranks: dict[tuple[int, int], int] = {}
    numbers = range(len(rows))
    for number in sorted(numbers, key=lambda number: (stays[number] is None, -max(rows[number]))):
        costs, name = rows[number], stays[number]
        passes, free = list(range(len(costs))), list(range(count))
        if name is None:
            passes.sort(key=lambda at: -costs[at])
            free.sort(key=lambda rank: loads[rank])
        else:
            first = zlib.crc32(name.encode()) % count
            free = free[first:] + free[:first]
        for at, rank in zip(passes, free, strict=False):
            ranks[number, at] = rank
            loads[rank] += costs[at]
    return tuple([ranks[pass_key] for pass_key in sorted(ranks)])


class PassShare:
    """Passes of a batch that one rank computes; the object lives as long as the batch.

    Raises:
        ValueError: a row has more passes than there are ranks.
    """

    def __init__(
        self, rows: Sequence[Sequence[float]], stays: Sequence[str | None], exchange: Exchange
    ) -> None:
        if max(map(len, rows)) > exchange.count:
            raise ValueError(f"{exchange.count} ranks are fewer than a row's passes")
        self.exchange = exchange
        self._ranks = assign_passes(rows, exchange.count, stays)
        self.passes = tuple([i for i, rank in enumerate(self._ranks) if rank == exchange.rank])
        """Numbers of this rank's passes among all passes of the batch."""

    def gather(self, answer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Exchange the model's answers and return the answer to every pass, flat; `sizes` are
        elements by pass.
        """
        count = self.exchange.count
        travelling = [i for rank in range(count) for i, at in enumerate(self._ranks) if at == rank]
        of_ranks = [
            sum(size for size, at in zip(sizes, self._ranks, strict=True) if at == rank)
            for rank in range(count)
        ]
        outputs = self.exchange.all_to_all([answer] * count, of_ranks)
        parts = outputs.split([sizes[i] for i in travelling])
        return [part for _, part in sorted(zip(travelling, parts, strict=True), key=_first)]


def _first(pair: tuple[int, Tensor]) -> int:
    return pair[0]
