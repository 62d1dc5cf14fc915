"""Steps of a UNet as CUDA graphs, of one for each mix of buckets.

By count a UNet's step launches so many short kernels that the host takes longer to ask for them
than the device to run them. So a step is recorded, in pieces: between two pieces cached activations
are brought to their places, which takes other addresses at each step and may wait for the loader.
What a piece reads and writes lies where it was recorded; what is given is copied there.

    copy in ► piece ► place block 0 ► piece ► place block 1 ► … ► piece ► copy out

Shapes must be those of the recording: passes compute as many tokens as their buckets have
(`levels`), and tiles have sides of buckets, too; where a tile lies, and what is read round it, is
copied in. Whatever has addresses or a way of its own (LoRAs, ControlNets, priming rows, projected
blocks) is asked for kernel by kernel, as without graphs.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from maskserve_engine.families.unet.forward import AtOnce, PackedPasses, forward
from maskserve_engine.families.unet.weights import UnetWeights
from maskserve_engine.layers.attention import missing_varlen

KEPT = 16
"""Recorded steps; beyond them the one goes that was not taken for the longest time."""
_TOLERANCE = 0.02
"""Of the largest number in an answer: what a recorded step may differ from one that is not."""
_log = logging.getLogger(__name__)


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
        own = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(own)
        with torch.cuda.stream(self._stream):
            yield
        own.wait_stream(self._stream)

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads load entries meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> GraphPiece:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph


class _Recording(AtOnce):
    """Kernels go into pieces, and what is between them is kept for later."""

    def __init__(self, capture: GraphCapture) -> None:
        self._capture = capture
        self.pieces: list[GraphPiece] = []
        self.actions: list[Callable[[PackedPasses], None]] = []
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def between(self, action: Callable[[PackedPasses], None], packed: PackedPasses) -> None:
        self.pieces.append(self._capture.end())
        self.actions.append(action)
        self._capture.begin()

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """One for all blocks of a shape: what an action writes to is held as long as the graph."""
        name = shape, like.dtype
        if name not in self._buffers:
            self._buffers[name] = like.new_empty(shape)
        return self._buffers[name]


class RecordedStep:
    """A step of some passes, to be taken again with others of the same shapes.

    Args:
        capture: records it.
        weights: of the model.
        packed: the first passes; their prompts are projected already.
        sample: as of `forward`, and so are the others.
    """

    def __init__(
        self,
        capture: GraphCapture,
        weights: UnetWeights,
        packed: PackedPasses,
        sample: Tensor,
        timesteps: Tensor,
        kinds: Sequence[str],
    ) -> None:
        self._own = packed.copied()
        self._of = weakref.ref(packed)
        self._sample, self._timesteps = sample.clone(), timesteps.clone()
        recording = _Recording(capture)
        with capture.session():
            capture.begin()
            try:
                self._answer = forward(
                    weights, self._own, self._sample, self._timesteps, kinds, asking=recording
                )
            finally:
                last = capture.end()
        self._pieces = [*recording.pieces, last]
        self._actions = recording.actions

    def take(self, packed: PackedPasses, sample: Tensor, timesteps: Tensor) -> Tensor:
        """The model's output for every pass.

        Raises:
            EntryLost: as `Handle.wait`; the next step is not harmed by it.
        """
        self._sample.copy_(sample)
        self._timesteps.copy_(timesteps)
        if self._of() is not packed:
            self._own.take(packed)
            self._of = weakref.ref(packed)
        self._own.turn_to(packed)
        for piece, action in zip(self._pieces, self._actions, strict=False):
            piece.replay()
            action(packed)
        self._pieces[-1].replay()
        return self._answer.clone()


class Graphs:
    """Recorded steps of a UNet.

    Args:
        capture: records them.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._capture: GraphCapture | None = capture
        self._seen: OrderedDict[Hashable, RecordedStep | None] = OrderedDict()

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> Graphs | None:
        """For a device; None where attention needs the host for every row."""
        if device.type != "cuda" or missing_varlen(device, dtype) is not None:
            return None
        return cls(CudaCapture(device))

    def forward(
        self,
        weights: UnetWeights,
        packed: PackedPasses,
        sample: Tensor,
        timesteps: Tensor,
        kinds: Sequence[str],
    ) -> Tensor:
        """As `forward.forward`. The first step of a mix of buckets is asked for kernel by kernel,
        which also makes what kernels need once; the second is recorded.
        """
        if self._capture is None or not packed.plain or "project" in kinds:
            return forward(weights, packed, sample, timesteps, kinds)
        name = packed.shapes, tuple(sample.shape), tuple(kinds) if any(packed.rests) else ()
        recorded = self._seen.get(name)
        if recorded is not None:
            self._seen.move_to_end(name)
            return recorded.take(packed, sample, timesteps)
        answer = forward(weights, packed, sample, timesteps, kinds)
        if name in self._seen:
            self._record(name, answer, weights, packed, sample, timesteps, kinds)
        else:
            self._seen[name] = None
            while len(self._seen) > KEPT:
                self._seen.popitem(last=False)
        return answer

    def _record(
        self,
        name: Hashable,
        answer: Tensor,
        weights: UnetWeights,
        packed: PackedPasses,
        sample: Tensor,
        timesteps: Tensor,
        kinds: Sequence[str],
    ) -> None:
        """Record the step that gave `answer`. If it gives another, none is any more."""
        assert self._capture is not None
        try:
            recorded = RecordedStep(self._capture, weights, packed, sample, timesteps, kinds)
            if self._capture.checks:
                apart = (recorded.take(packed, sample, timesteps) - answer).abs().max()
                if not apart <= _TOLERANCE * answer.abs().max():
                    raise RuntimeError(f"its answer is {float(apart):.3g} apart")
        except Exception:  # whatever a driver can raise; the model serves without
            _log.exception("UNet steps are not recorded as CUDA graphs")
            self._capture = None
            self._seen.clear()
            return
        self._seen[name] = recorded
        self._seen.move_to_end(name)
