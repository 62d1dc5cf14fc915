"""Kernels that Triton compiles, and plans of cuDNN: a GPU makes each once, slowly."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from maskserve_studies.kernels.launch_log import Recorder

_ADDRESS = 2**40
_real_data_ptr = Tensor.data_ptr


class FirstCalls:
    """Inside this context, `keys` gets the key of each kernel and plan on a fake device.

    Kernels' launchers run as on a GPU, and Triton itself says by which arguments a kernel is
    compiled anew.
    """

    def __init__(self) -> None:
        self.keys: set[Hashable] = set()
        self._patches = ExitStack()
        self._binders: dict[JITFunction[Any], Any] = {}

    def __enter__(self) -> FirstCalls:
        record = Recorder._record

        def recorded(recorder: Recorder, name: str, writes: bool, inputs: Any, *rest: Any) -> None:
            record(recorder, name, writes, inputs, *rest)
            args, kwargs = rest[-2:]
            if name.startswith("scaled_dot_product_attention"):
                layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in inputs]
                self.keys.add(("attention", *layouts))
            elif name.startswith("maskserve.") and "addresses" not in name:
                launcher = getattr(torch.ops.maskserve, name.split(".")[1]).default
                key = torch._C.DispatchKey.CompositeExplicitAutograd
                launcher._op_dk(key, *args, **kwargs)

        for owner, name, new in (
            (Recorder, "_record", recorded),
            (Tensor, "data_ptr", _data_ptr),
            (JITFunction, "run", self._run),
        ):
            self._patches.enter_context(patch.object(owner, name, new))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()

    @property
    def _run(self) -> Any:
        def run(
            kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any
        ) -> None:
            binder = self._binders.get(kernel)
            if binder is None:
                binder = create_function_from_signature(
                    kernel.signature, kernel.params, BaseBackend
                )
                self._binders[kernel] = binder
            _, specialization, _ = binder(*args, **kwargs)
            self.keys.add((kernel.__name__, *map(str, specialization)))

        return run


def _data_ptr(tensor: Tensor) -> int:
    """Return an address as aligned as on a GPU, 0 for an empty tensor."""
    if not isinstance(tensor, FakeTensor):
        return _real_data_ptr(tensor)
    if not tensor.untyped_storage().nbytes():
        return 0
    return _ADDRESS + tensor.storage_offset() * tensor.element_size()
