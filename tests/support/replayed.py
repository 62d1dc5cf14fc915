"""CUDA graphs on a CPU: operations are written down as they are done, and done again on the same
memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Piece(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations, each with what it was given and what it made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert not func.name().startswith("aten::_local_scalar_dense"), "the host waits"
        self.done.append((func, args, kwargs or {}, _tensors(out)))
        return out

    def replay(self) -> None:
        for func, args, kwargs, made in self.done:
            given = {_memory(each) for each in _tensors((args, kwargs))}
            if (
                made
                and all(_memory(each) in given for each in made)
                and not func._schema.is_mutable
            ):
                continue  # views
            again = _tensors(func(*args, **kwargs))
            for old, new in zip(made, again, strict=True):
                if _memory(old) not in given:
                    old.copy_(new)


class Replayed:
    """`graphs.GraphCapture`. What a recording has computed is spoiled behind it, so that a step
    reads what its own operations have written.
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
        for _, args, kwargs, made in piece.done:
            given = {_memory(each) for each in _tensors((args, kwargs))}
            for each in made:
                if _memory(each) not in given and each.is_floating_point():
                    each.fill_(torch.nan)
        return piece


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
