"""CFG parallelism over packed rows: the passes of a step are dealt to the ranks that take it.

Under classifier-free guidance a row is two passes of the model that know nothing of one another
until their answers are mixed. So each rank computes some passes, whole, and at the end of a step
all tell one another what the model has answered: one exchange per step, of the size of latents,
where `sequence_parallel` has two per block. Every rank then moves every row by the same bytes.

A row's passes go to different ranks; a row of one pass goes to the rank that has the least to do.
What a rank keeps of a row with anchors of its own is of the passes that it has computed: these go
to the same ranks at every step, whatever rows are beside them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor

from maskserve_engine.batch.sequence_parallel import Exchange


def dealt(
    rows: Sequence[Sequence[float]], count: int, stays: Sequence[str | None]
) -> tuple[int, ...]:
    """The rank of each pass, row by row.

    Args:
        rows: what each of a row's passes costs, in any unit; the prompt's first.
        count: of the ranks; a row has no more passes.
        stays: the name of each row whose passes go where the name says; None: anywhere.
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
    """The passes of a batch that one rank computes; kept for as long as the batch is.

    Args:
        rows: as of `dealt`, equal on all ranks.
        stays: likewise.
        exchange: between them.

    Raises:
        ValueError: a row has more passes than there are ranks.
    """

    def __init__(
        self, rows: Sequence[Sequence[float]], stays: Sequence[str | None], exchange: Exchange
    ) -> None:
        if max(map(len, rows)) > exchange.count:
            raise ValueError(f"{exchange.count} ranks are fewer than a row's passes")
        self.exchange = exchange
        self._ranks = dealt(rows, exchange.count, stays)
        self.own = tuple([i for i, rank in enumerate(self._ranks) if rank == exchange.rank])
        """Numbers of the passes that are computed here, among all."""

    def gather(self, answer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """What the model has answered to every pass.

        Args:
            answer: to the rank's own passes, one behind the other; its dtype is everybody's.
            sizes: numbers in the answer to each pass.

        Returns:
            per pass, flat.
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
