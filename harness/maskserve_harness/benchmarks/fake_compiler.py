"""torch.compile for a GPU that is not there: inductor writes its kernels, Triton makes machine code
of them for compute capability 9.0, and each call of one is logged as any other kernel's.

Inductor asks the device and its driver what they are; here they say they are an H100's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as settings
from torch import Tensor
from torch._dynamo import device_interface
from torch._inductor import select_algorithm
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch.utils._triton import has_triton

from maskserve_engine.families.flux.compiled import CompiledSegments
from maskserve_engine.families.flux.weights import FluxWeights
from maskserve_harness.benchmarks.fake_cuda import DEVICE, PROPERTIES, FakeCuda
from maskserve_harness.benchmarks.launch_log import WEIGHTS, size_of

_SEGMENTS = ("before_double", "after_double", "before_single", "after_single")


class FakeCompiler:
    """The segments of a model's blocks, compiled; make and call them inside `cuda`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.machine_code: dict[str, int] = {}
        """Bytes of each kernel that was made."""
        self._segment = ""

    def compile(self, weights: FluxWeights) -> CompiledSegments:
        """Takes half a minute."""
        segments = CompiledSegments()
        with self.cuda.unrecorded(), self._pretend():
            segments.warm_up(weights)
        for name in _SEGMENTS:
            setattr(segments, name, partial(self._call, name, getattr(segments, name)))
        return segments

    def _call(self, name: str, segment: Callable[..., Any], *args: Any) -> Any:
        self._segment = f"compiled.{name}"
        with self.cuda.unrecorded(), self._pretend():
            return segment(*args)

    @contextmanager
    def _pretend(self) -> Iterator[None]:
        from triton.runtime.driver import driver

        def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
            return torch.empty_strided(size, stride, dtype=dtype, device=DEVICE)

        def set_to(where: Any, **values: Any) -> None:
            for name, value in values.items():
                stack.enter_context(patch.object(where, name, value, create=True))

        with ExitStack() as stack:
            # Libraries ask as they are imported, and what is found is kept.
            has_triton.cache_clear()
            stack.callback(has_triton.cache_clear)
            set_to(
                torch.cuda,
                _lazy_init=lambda: None,
                _get_device_properties=lambda _=None: PROPERTIES,
                _DeviceGuard=lambda _: nullcontext(),
                is_available=lambda: False,  # dynamo would save its random state
                current_device=lambda: 0,
                set_device=lambda _: None,
            )
            set_to(device_interface, caching_worker_device_properties={"cuda": [PROPERTIES]})
            set_to(
                device_interface.CudaInterface,
                is_available=staticmethod(lambda: True),
                is_bf16_supported=staticmethod(lambda including_emulation=False: True),
            )
            set_to(torch._C, _cuda_getCurrentRawStream=lambda _: 0)
            guards = torch._C._dynamo.guards
            set_to(guards, _empty_strided_cuda=empty, _reinterpret_tensor=torch.as_strided)
            set_to(driver, _active=_Driver())
            # It would look for patterns with random tensors on the device.
            set_to(joint_graph, lazy_init=lambda _=None: None)
            set_to(triton_helpers, set_driver_to_gpu=lambda: None)
            set_to(triton_heuristics.CachingAutotuner, precompile=self._make, run=self._launch)
            for name in ("mm", "addmm"):
                set_to(select_algorithm.extern_kernels, **{name: partial(self._product, name)})
            stack.enter_context(
                settings.patch(
                    compile_threads=1, fx_graph_cache=False, use_static_triton_launcher=False
                )
            )
            yield

    @property
    def _make(self) -> Callable[..., None]:
        made = self.machine_code

        def precompile(kernel: Any, *_: Any, **__: Any) -> None:
            compiled = kernel._precompile_config(kernel.configs[0]).kernel
            made[kernel.fn.__name__] = len(compiled.asm["cubin"])

        return precompile

    @property
    def _launch(self) -> Callable[..., None]:
        compiler = self

        def run(kernel: Any, *args: Any, **_: Any) -> None:
            named = dict(zip(kernel.fn.arg_names, args, strict=False))
            touched = prod(size for name, size in named.items() if name.endswith("numel"))
            nbytes = 0
            for name, each in named.items():
                if isinstance(each, Tensor):  # of a larger one it reads or writes a part
                    times = 2 if name.startswith("in_out") else 1
                    nbytes += times * min(each.numel(), touched) * each.element_size()
            compiler._log(kernel.fn.__name__, nbytes)

        return run

    def _product(self, name: str, *given: Tensor, out: Tensor, **_: Any) -> None:
        x, weight = given[-2:]
        log = self.cuda.log
        log.nbytes[WEIGHTS] += size_of(weight)
        self._log(name, size_of(x) + size_of(out), "linear.__call__")

    def _log(self, kernel: str, nbytes: int, place: str | None = None) -> None:
        log, place = self.cuda.log, place or self._segment
        log.kernels[kernel] += 1
        log.places[place] += 1
        log.nbytes[place] += nbytes


class _Driver:
    """Triton's, of the same device."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * PROPERTIES.major + PROPERTIES.minor, PROPERTIES.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return DEVICE
