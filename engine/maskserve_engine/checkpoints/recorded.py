"""Tensors that know their shape and how to compute their values, but hold none.

diffusers maps the names of a checkpoint with all of its tensors at once, and splits, joins and
copies them as it does. Over recorded tensors the same map runs without memory, and the results are
computed afterwards, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class RecordedTensor(torch.Tensor):
    """A tensor on torch's device `meta`, with the function that computes its values."""

    plain: torch.Tensor
    """The same shape and dtype, without the function."""
    values: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, plain: torch.Tensor, values: Callable[[], torch.Tensor]) -> RecordedTensor:
        """Return a recorded tensor with the shape of `plain`, a tensor on device `meta`."""
        recorded: RecordedTensor = torch.Tensor._make_subclass(cls, plain)
        recorded.plain, recorded.values = plain, values
        return recorded

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on shapes and record it."""
        kwargs = kwargs or {}
        result = func(*_mapped(args, _plain), **_mapped(kwargs, _plain))

        def values() -> Any:
            return func(*_mapped(args, _values), **_mapped(kwargs, _values))

        if isinstance(result, torch.Tensor):
            return cls.of(result, values)
        if isinstance(result, Sequence) and any(isinstance(x, torch.Tensor) for x in result):
            return tuple(cls.of(part, _item(values, i)) for i, part in enumerate(result))
        return result


def _item(values: Callable[[], Any], index: int) -> Callable[[], torch.Tensor]:
    def item() -> torch.Tensor:
        part: torch.Tensor = values()[index]
        return part

    return item


def _plain(tensor: RecordedTensor) -> torch.Tensor:
    return tensor.plain


def _values(tensor: RecordedTensor) -> torch.Tensor:
    return tensor.values()


def _mapped(value: Any, form: Callable[[RecordedTensor], torch.Tensor]) -> Any:
    """Return arguments of an operation with each recorded tensor in another form."""
    if isinstance(value, RecordedTensor):
        return form(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, form) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, form) for key, item in value.items()}
    return value
