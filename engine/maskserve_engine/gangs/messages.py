"""What goes through the pipe between the engine's process and a rank's."""

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


class DeviceFacts(NamedTuple):
    """What a rank says of its device."""

    costs: CostModel
    memory: MemoryTable


class Hello(NamedTuple):
    """A rank's first message: it can take steps."""

    device: DeviceFacts
    dtype: str
    """Of the model, as `[model] dtype` names it."""
    revision: str
    """Digest of the served weights."""


class RankCall(NamedTuple):
    """What a rank is to do."""

    number: int
    """One more than that of the call before."""
    verb: str
    """Name of a method of `rank.Rank`."""
    arguments: tuple[Any, ...]


class RankAnswer(NamedTuple):
    """To the call of the same number."""

    number: int
    value: Any
    error: str = ""
    """In one sentence; empty: there is none."""


@dataclass(frozen=True, slots=True)
class EntryLoad:
    """`LoadState` at the time of asking."""

    tier: str
    sizes: Floats
    missing: Floats


@dataclass(frozen=True, slots=True)
class EntryLoads:
    """`RowLoads` of a row that has ended."""

    loaded: dict[str, int]
    stalled: float


class RowPlace(NamedTuple):
    """Where a row is, for a rank that has it elsewhere."""

    row: str
    steps: int
    carried: tuple[Any, ...]
    """See `Adapter.carried`."""


class RowAfter(NamedTuple):
    """A row that has taken a step."""

    step: RowStep
    carried: tuple[Any, ...] | None
    """See `Adapter.carried`; None: it has taken its last step, or another rank tells."""
    result: Tensor | None = None
    """[C, h, w] of one that has taken its last step, and is let go."""
    loads: EntryLoads | None = None
    """Of the same, where it read entries."""
    estimate: Tensor | None = None
    """[C, h, w] where its client is shown one after this step."""
    kept: bool = False
    """Of one that primes: whether what it has recorded is in files."""


class StepAnswer(NamedTuple):
    """What a rank says of a step."""

    result: StepResult
    rows: dict[str, RowAfter]
    """By name; of a gang's ranks only the first tells them."""
    moves: list[tuple[str, float, float]]
    """See `Executor.take_moves`."""


class RankLostError(Exception):
    """The rank has ended."""


def packed(message: object) -> bytes:
    """As it goes through the pipe."""
    # Not by `Connection.send`: torch would have it share tensors' memory by files that stay open.
    written = io.BytesIO()
    pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _WAYS
    pickler.dump(message)
    return written.getvalue()


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's numbers alone, which are in host memory on the other side. torch would write an
    archive of all that it is a view of, in ten times as long.
    """
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return _rebuilt, (raw.numpy(), tensor.dtype, tuple(tensor.shape))


def _rebuilt(raw: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)


_WAYS = copyreg.dispatch_table | {Tensor: _reduced}


def send(pipe: Connection, message: object) -> None:
    """Raises OSError when nobody is at the other end."""
    pipe.send_bytes(packed(message))


def receive(pipe: Connection) -> Any:
    """Raises EOFError or OSError when nobody is at the other end."""
    return pickle.loads(pipe.recv_bytes())
