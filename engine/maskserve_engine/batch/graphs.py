"""Steps as CUDA graphs, of one for each mix of buckets.

Where a step launches kernels faster than the host can ask for them, it is recorded, in pieces:
between two pieces cached activations are brought to their places, which takes other addresses at
each step and may wait for the loader. What a piece reads and writes lies where it was recorded;
what is given is copied there.

    copy in ► piece ► place block 0 ► piece ► place block 1 ► … ► piece ► copy out

Shapes must be those of the recording. So rows compute as many tokens as a bucket has (`bucket`).
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

KEPT = 16
"""Recorded steps; beyond them the one goes that was not taken for the longest time."""
_TOLERANCE = 0.02
"""Of the largest number in an answer: what a recorded step may differ from one that is not."""
_log = logging.getLogger(__name__)
P = TypeVar("P")


class AtOnce:
    """How kernels of a step are asked for: each as the step comes to it."""

    def between(self, action: Callable[[P], None], packed: P) -> None:
        """Something that is done anew at each step with the rows that take it."""
        action(packed)

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor that is not written yet, and not read once the next one of its shape is."""
        return like.new_empty(shape)


class GraphPiece(Protocol):
    """Kernels that were recorded."""

    def replay(self) -> None:
        """Launch them all."""
        ...


class GraphCapture(Protocol):
    """Records kernels."""

    checks: bool
    """Whether a recorded step is compared with one that is not, once."""

    def session(self) -> AbstractContextManager[None]:
        """Around all pieces of a step."""
        ...

    def begin(self) -> None: ...

    def end(self) -> GraphPiece:
        """What was asked for since `begin`."""
        ...


class BatchStep(Protocol):
    """One step of a batch: what it is given, and how it is asked for."""

    @property
    def packed(self) -> Any:
        """What rows give it: one object for as long as the same rows go on. What is done between
        pieces is given it.
        """
        ...

    @property
    def shapes(self) -> Hashable | None:
        """All that the shapes of its tensors, and its kernels, follow from; None: it has a way of
        its own and is not recorded.
        """
        ...

    def copied(self) -> Self:
        """The same in tensors of its own, which can take in what others have; without entries."""
        ...

    def take(self, other: Self, *, anew: bool) -> None:
        """Have what another step of the same shapes is given in the tensors of this one.

        Args:
            other: the step.
            anew: whether its rows are others than those of the last one.

        Raises:
            EntryLost: as `Handle.wait`.
        """
        ...

    def run(self, asking: AtOnce) -> Tensor:
        """The model's answer."""
        ...


class CudaCapture:
    """CUDA graphs that share their memory: one step runs at a time, and its answer is copied."""

    checks = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        gc.collect()  # a tensor of an earlier graph that goes during a recording would end it
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


class _Buffers:
    """What is written between pieces, for all recorded steps: they run one after the other."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], Tensor] = {}
        self.grown = False
        """Whether earlier steps hold smaller ones, which nobody else has any more."""

    def of(self, number: int, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The buffer of that number, or its beginning."""
        name, count = (number, like.dtype), prod(shape)
        buffer = self._held.get(name)
        if buffer is None or len(buffer) < count:
            self.grown = self.grown or buffer is not None
            buffer = self._held[name] = like.new_empty(count)
        return buffer[:count].view(shape)


class _Recording(AtOnce):
    """Kernels go into pieces, and what is between them is kept for later."""

    def __init__(self, capture: GraphCapture, buffers: _Buffers) -> None:
        self._capture, self._all = capture, buffers
        self.pieces: list[GraphPiece] = []
        self.actions: list[Callable[[Any], None]] = []
        self._own: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def between(self, action: Callable[[P], None], packed: P) -> None:
        self.pieces.append(self._capture.end())
        self.actions.append(action)
        self._capture.begin()

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """One for all blocks of a shape: what an action writes to is held as long as the graph."""
        name = shape, like.dtype
        if name not in self._own:
            self._own[name] = self._all.of(len(self._own), like, shape)
        return self._own[name]


class RecordedStep:
    """A step of some rows, to be taken again with others of the same shapes.

    Args:
        capture: records it.
        buffers: of all recorded steps.
        step: the first one.
    """

    def __init__(self, capture: GraphCapture, buffers: _Buffers, step: BatchStep) -> None:
        self._own: BatchStep = step.copied()
        self._of = weakref.ref(step.packed)
        recording = _Recording(capture, buffers)
        with capture.session():
            capture.begin()
            try:
                self._answer = self._own.run(recording)
            finally:
                last = capture.end()
        self._pieces = [*recording.pieces, last]
        self._actions = recording.actions

    def take(self, step: BatchStep) -> Tensor:
        """The model's answer to another step.

        Raises:
            EntryLost: as `Handle.wait`; the next step is not harmed by it.
        """
        self._own.take(step, anew=self._of() is not step.packed)
        self._of = weakref.ref(step.packed)
        for piece, action in zip(self._pieces, self._actions, strict=False):
            piece.replay()
            action(step.packed)
        self._pieces[-1].replay()
        return self._answer.clone()


class Graphs:
    """Recorded steps of a model.

    Args:
        capture: records them.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._capture: GraphCapture | None = capture
        self._buffers = _Buffers()
        self._seen: OrderedDict[Hashable, RecordedStep | None] = OrderedDict()

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> Graphs | None:
        """For a device; None where attention needs the host for every row."""
        if device.type != "cuda" or missing_varlen(device, dtype) is not None:
            return None
        return cls(CudaCapture(device))

    def answer(self, step: BatchStep) -> Tensor:
        """The model's. The first step of a mix of buckets is asked for kernel by kernel, which also
        makes what kernels need once; the second is recorded.
        """
        name = None if self._capture is None else step.shapes
        if name is None:
            return step.run(AtOnce())
        recorded = self._seen.get(name)
        if recorded is not None:
            self._seen.move_to_end(name)
            return recorded.take(step)
        answer = step.run(AtOnce())
        if name in self._seen:
            self._record(name, answer, step)
        else:
            self._seen[name] = None
            while len(self._seen) > KEPT:
                self._seen.popitem(last=False)
        return answer

    def _record(self, name: Hashable, answer: Tensor, step: BatchStep) -> None:
        """Record the step that gave `answer`. If it gives another, none is any more."""
        assert self._capture is not None
        try:
            recorded = RecordedStep(self._capture, self._buffers, step)
            if self._capture.checks:
                max_difference = (recorded.take(step) - answer).abs().max()
                if not max_difference <= _TOLERANCE * answer.abs().max():
                    raise RuntimeError(f"its answer is {float(max_difference):.3g} apart")
        except Exception:  # whatever a driver can raise; the model serves without
            _log.exception("steps are not recorded as CUDA graphs")
            self._capture = None
            self._seen.clear()
            return
        if self._buffers.grown:  # they are recorded again, and the smaller buffers let go
            self._seen = OrderedDict.fromkeys(self._seen)
            self._buffers.grown = False
        self._seen[name] = recorded
        self._seen.move_to_end(name)
