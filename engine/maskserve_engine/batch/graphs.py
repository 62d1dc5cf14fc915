"""Steps as CUDA graphs, one for each combination of bucket sizes.

Where a step's kernels run faster than the host can launch them, the step is recorded, in pieces:
between two pieces cached activations are copied to their places, because their addresses differ at
each step and the loader may still be at work. A piece reads and writes the memory that it was
recorded with, so inputs are copied there.

    copy in ► piece ► place block 0 ► piece ► place block 1 ► … ► piece ► copy out

Shapes must be those of the recording. So rows compute as many tokens as a bucket has (`bucket`),
and passes that share a step are padded together (`padding`).
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from maskserve_engine.layers.attention import missing_varlen

MOST_RECORDED = 128
"""Number of recorded steps that are kept; the least recently used one goes first."""
_TOLERANCE = 0.02
"""Largest accepted difference of a recorded step, as a share of the largest absolute answer."""
_INPUTS, _ALIGN = 2**26, 256
"""Bytes of inputs for which memory is taken at first, and at whose multiples tensors begin."""
_log = logging.getLogger(__name__)
P = TypeVar("P")


class Launcher:
    """Launches the kernels of a step at once; `_Recording` records them."""

    def between(self, action: Callable[[P], None], packed: P) -> None:
        action(packed)

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return an unwritten tensor; its content is valid until the next one of the same shape is
        taken.
        """
        return like.new_empty(shape)

    def open(self, tensor: Tensor, slot: int = 0) -> Tensor:
        """Return a tensor with this content that an action may read and change; valid until the
        next one of the same shape and slot is opened.
        """
        return tensor


class GraphPiece(Protocol):
    def replay(self) -> None: ...


class GraphCapture(Protocol):
    checks: bool
    """Whether each recorded step is compared once with the same step unrecorded."""

    def session(self) -> AbstractContextManager[None]: ...

    def begin(self) -> None: ...

    def end(self) -> GraphPiece: ...


class BatchStep(Protocol):
    @property
    def packed(self) -> Any:
        """The packed rows: one object as long as the rows are the same. Actions between pieces
        receive it.
        """
        ...

    @property
    def shapes(self) -> Hashable | None:
        """Key of all tensor shapes and kernel choices; None: the step cannot be recorded."""
        ...

    @property
    def common(self) -> bool:
        """Whether other steps will have these shapes, so that the first is recorded at once."""
        ...

    def copied(self, inputs: Inputs) -> Self:
        """Return the same step on copied tensors, which may lie in `inputs`, without entries."""
        ...

    def take(self, other: Self, *, all_inputs: bool) -> None:
        """Copy the inputs of another step of equal shapes into this one's tensors; `all_inputs`:
        also those that change with the packed rows only.

        Raises:
            EntryLost: an entry's load failed (`Handle.wait`).
        """
        ...

    def run(self, launcher: Launcher) -> Tensor: ...

    def answer_of(self, recorded: Tensor) -> Tensor:
        """Return a copy of this step's part of a recorded step's answer, whose end may be pads."""
        ...


class CudaCapture:
    """CUDA graphs that share a memory pool: one step runs at a time, and its answer is copied."""

    checks = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        gc.collect()  # freeing an earlier graph's tensor during a recording would end it
        caller_stream = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller_stream)
        with torch.cuda.stream(self._stream):
            yield
        caller_stream.wait_stream(self._stream)

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads load entries meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> GraphPiece:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph


class Inputs:
    """Memory that recorded steps share for their inputs: one step runs at a time, and copies them
    first.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self.used = 0
        """Bytes that hold inputs of the step that is being copied."""

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Allocate the step's next input, uninitialised, of the dtype and device of `like`."""
        nbytes, begin = prod(shape) * like.element_size(), -(-self.used // _ALIGN) * _ALIGN
        self.used = begin + nbytes
        if self._memory is None or len(self._memory) < self.used:
            # Steps recorded before keep the memory that was enough for them.
            self._memory = like.new_empty(max(_INPUTS, 2 * self.used), dtype=torch.uint8)
        return self._memory[begin : self.used].view(like.dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor, tuple(tensor.shape)).copy_(tensor)


class _Buffers:
    """Buffers written between pieces. All recorded steps share them, since they run one after
    another.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self.grown = False
        """Whether a buffer was replaced, so that earlier steps still use a smaller one."""

    def of(self, number: int, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the buffer of that number and dtype, cut to `shape`; it grows as needed."""
        name, count = (number, like.dtype), prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count:
            self.grown = self.grown or buffer is not None
            buffer = self._buffers[name] = like.new_empty(count)
        return buffer[:count].view(shape)


class _Recording(Launcher):
    def __init__(self, capture: GraphCapture, buffers: _Buffers) -> None:
        self._capture, self._all = capture, buffers
        self.pieces: list[GraphPiece] = []
        self.actions: list[Callable[[Any], None]] = []
        self._buffers: dict[tuple[int | None, tuple[int, ...], torch.dtype], Tensor] = {}

    def between(self, action: Callable[[P], None], packed: P) -> None:
        self.pieces.append(self._capture.end())
        self.actions.append(action)
        self._capture.begin()

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return one buffer per shape for all blocks: the graph keeps the buffers that actions
        write to.
        """
        return self._buffer(None, like, shape)

    def open(self, tensor: Tensor, slot: int = 0) -> Tensor:
        """Return a copy in one buffer per slot and shape: memory of a graph's own tensor would not
        be used again.
        """
        return self._buffer(slot, tensor, tuple(tensor.shape)).copy_(tensor)

    def _buffer(self, slot: int | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        name = slot, shape, like.dtype
        if name not in self._buffers:
            self._buffers[name] = self._all.of(len(self._buffers), like, shape)
        return self._buffers[name]


class _Memory:
    """Memory of all recorded steps, and the step whose inputs it holds."""

    def __init__(self) -> None:
        self.buffers, self.inputs = _Buffers(), Inputs()
        self.holder: RecordedStep | None = None


class RecordedStep:
    def __init__(self, capture: GraphCapture, memory: _Memory, step: BatchStep) -> None:
        self._memory, memory.inputs.used = memory, 0
        self._step: BatchStep = step.copied(memory.inputs)
        self._has_inputs = memory.inputs.used > 0
        self._packed = weakref.ref(step.packed)
        if self._has_inputs:
            memory.holder = self
        recording = _Recording(capture, memory.buffers)
        with capture.session():
            capture.begin()
            try:
                self._answer = self._step.run(recording)
            finally:
                last = capture.end()
        self._pieces = [*recording.pieces, last]
        self._actions = recording.actions

    def take(self, step: BatchStep) -> Tensor:
        """Return the model's answer to another step.

        Raises:
            EntryLost: an entry's load failed; the next step is not affected.
        """
        overwritten = self._has_inputs and self._memory.holder is not self
        self._step.take(step, all_inputs=overwritten or self._packed() is not step.packed)
        self._packed = weakref.ref(step.packed)
        if self._has_inputs:
            self._memory.holder = self
        for piece, action in zip(self._pieces, self._actions, strict=False):
            piece.replay()
            action(step.packed)
        self._pieces[-1].replay()
        return step.answer_of(self._answer)


class Graphs:
    """Recorded steps of one model.

    Args:
        capture: records them.
        rows: number of dense rows whose tokens the longest has, for steps whose rows are packed.
    """

    def __init__(self, capture: GraphCapture, rows: float = 1) -> None:
        self.rows = rows
        self._capture: GraphCapture | None = capture
        self._memory = _Memory()
        self._steps: OrderedDict[Hashable, RecordedStep | None] = OrderedDict()

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, rows: float = 1) -> Graphs | None:
        """Return graphs for a CUDA device; None elsewhere, or where attention needs the host for
        every row.
        """
        if device.type != "cuda" or missing_varlen(device, dtype) is not None:
            return None
        return cls(CudaCapture(device), rows)

    @property
    def records(self) -> bool:
        """Whether steps are recorded; False after a recording failed."""
        return self._capture is not None

    def answer(self, step: BatchStep) -> Tensor:
        """Return the model's answer. The first step of a shape runs unrecorded, which also
        initialises its kernels; the second is recorded, or the first if the shape is common.
        """
        name = None if self._capture is None else step.shapes
        if name is None:
            return step.run(Launcher())
        recorded = self._steps.get(name)
        if recorded is not None:
            self._steps.move_to_end(name)
            return recorded.take(step)
        answer = step.run(Launcher())
        is_first = name not in self._steps
        if is_first:
            self._steps[name] = None
            while len(self._steps) > MOST_RECORDED:
                self._steps.popitem(last=False)
        if step.common or not is_first:
            self._record(name, answer, step)
        return answer

    def _record(self, name: Hashable, answer: Tensor, step: BatchStep) -> None:
        """Record the step that gave `answer`. If the recording's answer differs, stop recording
        altogether.
        """
        assert self._capture is not None
        try:
            recorded = RecordedStep(self._capture, self._memory, step)
            if self._capture.checks:
                max_difference = (recorded.take(step) - answer).abs().max()
                if not max_difference <= _TOLERANCE * answer.abs().max():
                    raise RuntimeError(f"its answer is {float(max_difference):.3g} apart")
        except Exception:  # whatever a driver can raise; the model serves without
            _log.exception("steps are not recorded as CUDA graphs")
            self._capture = None
            self._steps.clear()
            return
        buffers = self._memory.buffers
        if buffers.grown:  # they are recorded again, and the smaller ones freed
            self._steps = OrderedDict.fromkeys(self._steps)
            buffers.grown = False
        self._steps[name] = recorded
        self._steps.move_to_end(name)
