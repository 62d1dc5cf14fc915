"""Ranks that take steps together: threads over real gloo groups, each with its own batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore, PrefixStore

from maskserve_benchmarks.steps.replay import Replay
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.sequence_parallel import GangExchange
from maskserve_engine.families.adapter import Adapter
from tests.support.cached_rows import Primed, assert_equal, cached

CPU = torch.device("cpu")
T = TypeVar("T")


class Rank:
    """One of several ranks over the same weights."""

    def __init__(self, adapter: Adapter, rank: int, count: int, store: Any, *, deals: bool) -> None:
        self.rank, self._count, self._store, self._deals = rank, count, store, deals
        self.adapter: Any = copy.copy(adapter)
        self.adapter.release()
        self.replay = Replay(self.adapter)
        self._gangs: dict[range, GangExchange] = {}

    def gang(self, of: range) -> GangExchange | None:
        """The exchange with these ranks; None: the rank is alone."""
        if len(of) == 1:
            return None
        if of not in self._gangs:
            prefix_store = PrefixStore(str(of), self._store)
            self._gangs[of] = GangExchange(
                prefix_store, self.rank - of.start, len(of), CPU, 20.0, deals=self._deals
            )
        return self._gangs[of]

    @property
    def all(self) -> GangExchange | None:
        return self.gang(range(self._count))

    def run(self, rows: Sequence[Any], kinds: Sequence[str]) -> list[Any]:
        """Take all steps of the rows together, and return their latents."""
        while live := [row for row in rows if row.step < row.steps]:
            self.replay.step(live, kinds, self.all)
        return [row.result().array() for row in rows]


def check_ranks(
    adapter: Adapter,
    jobs: Sequence[EditJob],
    primed: Sequence[Primed],
    kind: str,
    wholes: Sequence[EditJob] = (),
    *,
    deals: bool = False,
) -> None:
    """Check that two ranks give the results of one, for cached and dense rows.

    Args:
        adapter: of the model.
        jobs: edits of the cached rows; the first one has a dense row, too.
        primed: the template of each edit.
        kind: of the cached rows' blocks.
        wholes: edits without a mask.
        deals: whether ranks deal the passes of rows, instead of each pass's tokens.
    """

    def run(rank: Rank) -> list[Any]:
        rows: list[Any] = [cached(rank.replay, *pair) for pair in zip(jobs, primed, strict=True)]
        rows += [rank.adapter.dense_row(job) for job in (*jobs[:1], *wholes)]
        return rank.run(rows, (kind,) * adapter.blocks)

    [expected] = by_ranks(adapter, 1, run)
    for by_rank in by_ranks(adapter, 2, run, deals=deals):
        for one, other in zip(by_rank, expected, strict=True):
            assert_equal(one, other)


def by_ranks(
    adapter: Adapter, count: int, run: Callable[[Rank], T], *, deals: bool = False
) -> list[T]:
    """The result of each rank."""
    store = HashStore()
    ranks = [Rank(adapter, rank, count, store, deals=deals) for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, ranks))
