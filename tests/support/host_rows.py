"""Host memory for rows' step caches, without a store of entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskserve_engine.batch.step_cache import NetStepCaches
from maskserve_engine.cache.host_cache import HostMemory
from maskserve_engine.cache.loader import EntryLost, HostMover, Loader
from maskserve_engine.layers import keep_tokens

Edit = Callable[[NetStepCaches | None], NDArray[np.float32]]
"""Latents of one edit whose ControlNets' step caches lie where the caches say."""


@contextmanager
def host_store(budget_bytes: int = 2**28) -> Iterator[Any]:
    """The part of a `Store` that step caches use; nothing is left in it."""
    loader = Loader(HostMover())
    store = SimpleNamespace(rows=HostMemory(budget_bytes), loader=loader)
    yield store
    loader.close()
    assert store.rows.booked == 0


def check_net_caches(run: Edit, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Check that nets' step caches change no byte of an edit: in host memory from the start, moved
    there at the call of `encode` that finds no memory, and that without host memory the edit says
    that it found none.
    """
    expected, encode = run(None), keep_tokens.encode
    with host_store() as store:
        caches = NetStepCaches(store, on_host=True)
        np.testing.assert_array_equal(run(caches), expected)
        assert caches.loaded["host"] > 0
        assert not caches.out_of_memory
        caches.release()
    calls = 0

    def scarce(x: Any, format: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise torch.OutOfMemoryError("no memory for a step cache")
        return encode(x, format)

    monkeypatch.setattr(keep_tokens, "encode", scarce)
    with host_store() as store:
        caches = NetStepCaches(store, on_host=False)
        np.testing.assert_array_equal(run(caches), expected)
        assert calls > call
        assert caches.loaded["host"] > 0
        assert not caches.out_of_memory
        caches.release()
    calls = 0
    with host_store(0) as store:
        caches = NetStepCaches(store, on_host=False)
        run(caches)
        assert caches.out_of_memory
        caches.release()


def check_lost_net_caches(run: Callable[[NetStepCaches], Callable[[], bool]]) -> None:
    """Check that an edit goes on whose nets' step caches do not arrive.

    Args:
        run: returns a call that takes a step, and returns whether there is a further one.
    """
    with host_store() as store:
        caches, lost = NetStepCaches(store, on_host=True), 0
        step = run(caches)

        def broken(*_: Any) -> Any:
            raise RuntimeError("the link is broken")

        store.loader.mover.move = broken
        more = True
        while more:
            try:
                more = step()
            except EntryLost:
                assert caches.lost
                caches.lose()
                lost += 1
        assert lost > 0
        caches.release()
