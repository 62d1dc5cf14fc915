"""CUDA graphs on a CPU: operations are recorded, and run again on the same memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from maskserve_benchmarks.steps.replay import Replay
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch import row_updates
from maskserve_engine.cache.loader import EntryLost
from maskserve_engine.layers import attention, low_rank
from maskserve_engine.layers.kernels import operation
from tests.support.cached_rows import Primed, cached


class _Piece(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations, each with its inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert not func.name().startswith("aten::_local_scalar_dense"), "the host waits"
        self.done.append((func, args, kwargs or {}, _tensors(out)))
        return out

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.done:
            memories = {_memory(tensor) for tensor in _tensors((args, kwargs))}
            if (
                outputs
                and all(_memory(tensor) in memories for tensor in outputs)
                and not func._schema.is_mutable
            ):
                continue  # views
            tensors = _tensors(func(*args, **kwargs))
            for old, new in zip(outputs, tensors, strict=True):
                if _memory(old) not in memories:
                    old.copy_(new)


class Replayed:
    """Stands for `graphs.GraphCapture`. The outputs of a recording are overwritten after it, so
    that a step must read the outputs of its own replay.
    """

    checks = True

    def __init__(self) -> None:
        self.recorded = 0
        self._piece: _Piece | None = None

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None:
        self._piece = _Piece()
        self._piece.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> _Piece:
        piece = self._piece
        assert piece is not None
        piece.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.recorded += 1
        for _, args, kwargs, outputs in piece.done:
            inputs = {_memory(tensor) for tensor in _tensors((args, kwargs))}
            for tensor in outputs:
                if _memory(tensor) not in inputs and tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        return piece


class HalfReplayed(Replayed):
    """Loses the later half of each recording, so that its answers are wrong."""

    def end(self) -> _Piece:
        piece = super().end()
        piece.done = piece.done[: len(piece.done) // 2]
        return piece


@operation("attend_rows")
def attend_rows(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor) -> Tensor:
    """Attention of rows that end where these tensors say when it runs, as on a GPU. Queries behind
    all rows are not answered.
    """
    out = torch.full_like(q, torch.nan)
    rows = zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True)
    for queries, keys in rows:
        at, to = slice(*queries), slice(*keys)
        heads = (x[None].transpose(1, 2) for x in (q[at], k[to], v[to]))
        out[at] = F.scaled_dot_product_attention(*heads).transpose(1, 2)[0]
    return out


def attend_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU run padded steps, which need variable-length attention."""

    def varlen(q: Tensor, k: Tensor, v: Tensor, rows: attention.Segments) -> Tensor:
        answer: Tensor = attend_rows(q, k, v, rows.q_ends, rows.k_ends)
        return answer

    monkeypatch.setattr(attention, "varlen", varlen)


@operation("add_updates_on_a_cpu", mutates_args=("out",))
def add_updates_on_a_cpu(
    out: Tensor, x: Tensor, tiles: Tensor, slices: Tensor, ends: Tensor, scales: Tensor, first: int
) -> None:
    """Add what the kernels of `shrink_expand` add, by the tables as they are when it runs."""
    for row, begin, end in tiles.tolist():
        for at in range(*ends[row : row + 2].tolist()):
            down, up, ranks, stride, low, high = slices[at].tolist()
            a = _at(down, x, (ranks, x.shape[1]), (x.shape[1], 1))
            b = _at(up, x, (high - low, ranks), (stride, 1))
            inside = slice(max(low, first), min(high, first + out.shape[1]))
            added = x[begin:end] @ a.T @ b[inside.start - low : inside.stop - low].T
            out[begin:end, inside.start - first : inside.stop - first] += scales[at] * added


def _at(address: int, like: Tensor, shape: tuple[int, int], strides: tuple[int, int]) -> Tensor:
    """Return the numbers of a matrix at an address."""
    count = (shape[0] - 1) * strides[0] + shape[1]
    memory = (ctypes.c_char * (count * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(shape, strides)


def _add_map_updates(
    out: Tensor, x: Tensor, *tables: Tensor, side: int, stride: int, padding: int, most: int
) -> None:
    """Add the updates of a convolution, as products of each position's square of the map."""
    squares = F.unfold(x, side, 1, padding, stride)  # [P, in · side · side, places]
    squares = squares.unflatten(1, (x.shape[1], -1)).transpose(1, 2).flatten(1, 2)
    flat = squares.transpose(1, 2).flatten(0, 1).contiguous()
    added = out.new_zeros(len(flat), out.shape[1])
    add_updates_on_a_cpu(added, flat, *tables, 0)
    out += added.unflatten(0, (len(out), -1)).transpose(1, 2).view_as(out)


@contextmanager
def update_kernels_on_a_cpu() -> Iterator[None]:
    """Let a CPU add LoRAs by tables, as a GPU does."""

    def add(*tensors: Tensor, most: int, first: int = 0) -> None:
        add_updates_on_a_cpu(*tensors, first)

    with pytest.MonkeyPatch.context() as patch:
        for module in (low_rank, row_updates):
            patch.setattr(module, "has_kernels", lambda _: True)
        patch.setattr(row_updates, "add_slices", add)
        patch.setattr(row_updates, "add_map_slices", _add_map_updates)
        yield


def finish_behind_a_lost_entry(
    adapter: Any, job: EditJob, primed: Primed, rest: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Run a cached edit to its end. Its fourth step loses its entry in the middle and runs again.
    Returns the row.

    Args:
        adapter: of recorded steps.
        job: the edit.
        primed: its template.
        rest: class of a cached row's cached tokens; it reads entries.
        monkeypatch: of the test.
    """
    replay, kinds, source = Replay(adapter), ("kv",) * adapter.blocks, rest.source
    row = cached(replay, job, primed)
    for _ in range(3):
        replay.step([row], kinds)

    def lost(inactive: Any, block: int, *args: Any) -> Any:
        if block == 1:
            raise EntryLost("gone")
        return source(inactive, block, *args)

    with monkeypatch.context() as patch:
        patch.setattr(rest, "source", lost)
        with pytest.raises(EntryLost):
            replay.step([row], kinds)
    assert row.step == 3
    while row.step < row.steps:
        replay.step([row], kinds)
    return row


def _tensors(tree: Any) -> list[Tensor]:
    return [tree_leave for tree_leave in tree_leaves(tree) if isinstance(tree_leave, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
