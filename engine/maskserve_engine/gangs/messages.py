"""Messages in the pipe between the engine's process and a rank's."""

from __future__ import annotations

import copyreg
import io
import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_common.contracts.memory_table import MemoryTable
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.flops import Floats
from maskserve_engine.requests.executor import RowStep, StepResult


class DeviceDescription(NamedTuple):
    costs: CostModel
    memory: MemoryTable


class Hello(NamedTuple):
    """A rank's first message: it is ready for steps."""

    device: DeviceDescription
    dtype: str
    """Data type of the model, as `[model] dtype` names it."""
    revision: str
    """Digest of the served weights."""


class RankCall(NamedTuple):
    number: int
    """Number of the call, one more than that of the call before."""
    verb: str
    """Name of a method of `rank.Rank`."""
    arguments: tuple[Any, ...]


class RankAnswer(NamedTuple):
    number: int
    value: Any
    error: str = ""
    """Error in one sentence; empty: none."""


@dataclass(frozen=True, slots=True)
class EntryLoad:
    """A `LoadState` at the time of the rank's answer."""

    tier: str
    sizes: Floats
    missing: Floats


@dataclass(frozen=True, slots=True)
class EntryLoads:
    """`RowLoads` of a row that has ended."""

    loaded: dict[str, int]
    stalled: float
    out_of_memory: bool
    refresh_errors: dict[int, float]


class RowPlace(NamedTuple):
    """A row's state, for a rank that does not have it yet."""

    row: str
    steps: int
    carried: tuple[Any, ...]
    """See `Adapter.carried`."""


class RowAfter(NamedTuple):
    """A row that has taken a step."""

    step: RowStep
    carried: tuple[Any, ...] | None
    """See `Adapter.carried`; None: the row has taken its last step, or another rank sends it."""
    result: Tensor | None = None
    """[C, h, w] latents of a row that has taken its last step and was released."""
    loads: EntryLoads | None = None
    """Loads of that row; None: it read no entries."""
    estimate: Tensor | None = None
    """[C, h, w] preview latents, if the client gets one after this step."""
    entry_stored: bool = False
    """Whether the entry that a priming row recorded is in files."""


class StepAnswer(NamedTuple):
    result: StepResult
    rows: dict[str, RowAfter]
    """Outcomes by row name; in a gang only the first rank sends them."""
    moves: list[tuple[str, float, float]]
    """See `Executor.take_moves`."""


class RankLostError(Exception):
    """The rank's process has ended."""


def pack(message: object) -> bytes:
    # Not by `Connection.send`: torch would have it share tensors' memory by files that stay open.
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(message)
    return buffer.getvalue()


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a tensor to its numbers, in host memory of the receiver. torch would archive the whole
    storage behind a view, which takes ten times as long.
    """
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return _rebuild, (raw.numpy(), tensor.dtype, tuple(tensor.shape))


def _rebuild(raw: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)


_REDUCERS = copyreg.dispatch_table | {Tensor: _reduce}


def send(pipe: Connection, message: object) -> None:
    """Send a message.

    Raises:
        OSError: the other end is closed.
    """
    pipe.send_bytes(pack(message))


def receive(pipe: Connection) -> Any:
    """Return the next message.

    Raises:
        EOFError: the other end is closed.
        OSError: the other end is closed.
    """
    return pickle.loads(pipe.recv_bytes())
