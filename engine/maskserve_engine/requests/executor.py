"""What the loop asks of whoever holds the rows, and what it is told: plain data, rows by id.

The loop decides (which rows, which plan, what is read whole), an executor does it. `LocalExecutor`
runs rows in the engine's own process; another may run them elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from maskserve_common.contracts.keys import Anchor
from maskserve_common.errors import EngineFailed
from maskserve_engine.adapters.control_net_loader import NetFolder
from maskserve_engine.base.device_clock import Span
from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.batch.own_anchors import OwnPlan
from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.cache.tier import Note
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.planning.flops import FeatureMap, Floats
from maskserve_engine.planning.two_stream import Plan
from maskserve_engine.scheduling.step_scheduler import Devices


@dataclass(frozen=True, slots=True)
class DenseRowSpec:
    """A row that computes all tokens."""

    job: EditJob
    key: str = ""
    """Of the template whose references it may read, where they see nothing of a row (`STILL`)."""


@dataclass(frozen=True, slots=True)
class CachedRowSpec:
    """A row that computes the active tokens and reads entries for the others."""

    job: EditJob
    noise_seed: int
    """Of the template's noise."""
    key: str
    """Of the template."""
    anchors: tuple[Anchor | None, ...]
    """Per step what it reads; None: it computes all tokens."""
    sure: bool
    """Whether a step may not go without its entry for want of room."""
    own: OwnPlan | None = None
    """What it keeps of its own beside them, where there is room; None: nothing."""
    nbytes: int = 0
    """That this takes."""


@dataclass(frozen=True, slots=True)
class PrimingRowSpec:
    """A row that computes a template's entries, one anchor per step; see `Adapter.priming_row`."""

    job: EditJob
    anchors: tuple[Anchor, ...]
    prompt: Conditioning
    noise_seed: int
    kinds: tuple[frozenset[str], ...]
    format: str
    key: str
    """Of the template."""


@dataclass(frozen=True, slots=True)
class AnchoredRowSpec:
    """A row whose own dense steps are the anchors of the others."""

    job: EditJob
    plan: OwnPlan
    nbytes: int
    """That its anchors leave."""
    key: str = ""
    """As of `DenseRowSpec`."""


RowSpec = DenseRowSpec | AnchoredRowSpec | CachedRowSpec | PrimingRowSpec


class RowMade(NamedTuple):
    """A row that was made."""

    complete: bool = True
    """False: some of the entries that it is to read are not there now; or there was no room for
    what its own anchors leave, and it is a dense row."""
    selection: bytes = b""
    """Of a cached row: equal for rows that read the same tokens."""
    own: OwnPlan | None = None
    """Of a cached row: what it keeps of its own, if there was room for that."""


class Read(NamedTuple):
    """A cached row of a step; the entry is that of its `anchors` at this step."""

    row: str
    whole: bool
    """Bring in all tokens of the entry: rows read more of them than there are."""
    required: bool
    """The row fails where its entry is lost; else it computes all tokens."""
    text: bool = True
    """Whether the step computes the row's text."""


class LoadState(Protocol):
    """How far an entry has come in; the same object for all rows that share a load."""

    @property
    def tier(self) -> str:
        """That it lies in."""
        ...

    @property
    def sizes(self) -> Floats:
        """[blocks, parts] bytes that travel; `inf` for what is not kept."""
        ...

    @property
    def missing(self) -> Floats:
        """The same of what has not arrived."""
        ...


class RowLoads(Protocol):
    """What a row has read, once it has ended."""

    @property
    def loaded(self) -> Mapping[str, int]:
        """Bytes that travelled for it, by the tier in which they were found."""
        ...

    @property
    def stalled(self) -> float:
        """Seconds that its steps have waited."""
        ...


@dataclass(frozen=True, slots=True)
class StepInput:
    """One model call."""

    number: int
    """Of the step: what it reads travels before what later steps read."""
    rows: tuple[str, ...]
    devices: tuple[int, ...] = (0,)
    """Of the worker, that compute them together."""
    reads: tuple[Read, ...] = ()
    """Of the rows that read an entry in this step, as `load` has found them."""
    maps: tuple[FeatureMap, ...] = ()
    """That entries have, of the model at the rows' size."""
    plan: Plan | None = None
    """How rows that read entries run each block; None: no row reads any."""
    ahead: Plan | None = None
    """By which the entries of the steps to come are brought in."""


class RowStep(NamedTuple):
    """A row that has taken the step."""

    row: str
    done: int
    """Its steps so far, this one among them."""
    skipped: int
    """Of those the ones that left all blocks but the first out."""
    read: bool
    """Whether it read an entry in this step."""
    text: bool = True
    """Whether it computed the row's text in this step."""
    stale: bool = False
    """Whether it added what a ControlNet service says of other latents than the step's own."""
    made: bool = False
    """Whether it made its references before this step."""
    foresaw: bool = False
    """Whether it computed an anchor of its own beside the step's tokens."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of the rows. Each is in `rows` or in `failed`."""

    rows: tuple[RowStep, ...]
    span: Span
    """On the device's clock; known when the device has done the step."""
    stalls: tuple[Span, ...] = ()
    """Where it waited for entries."""
    lost: tuple[str, ...] = ()
    """Rows that went on without the entry that they were to read; they do not read it again."""
    failed: Mapping[str, EngineFailed] = field(default_factory=dict)
    control_waits: tuple[float, ...] = ()
    """Seconds that it waited for what a ControlNet service says, each time."""
    ranks: int = 1
    """That shared it."""


StepDone = Callable[[StepResult], None]
"""Takes what became of a step, on the engine's thread."""


class Executor(Protocol):
    """Holds rows by id and steps them; called from the engine's thread alone."""

    @property
    def devices(self) -> Devices:
        """Of the worker, those that can begin no step now."""
        ...

    def bring(self, adapter: str, factors: Mapping[str, Factors]) -> int:
        """Bring an adapter to the rows' devices, under a name that no other has; from any thread.

        Args:
            adapter: its name.
            factors: by the model's layers.

        Returns:
            its bytes there.

        Raises:
            ValueError: it does not fit the model.
        """
        ...

    def drop(self, adapter: str) -> None:
        """Let go of an adapter that no row has; one that is not there may be named."""
        ...

    def attach(self, row: str, adapters: Sequence[tuple[str, float]]) -> None:
        """Have a row's next steps computed with these adapters, each with its scale, and with no
        others.
        """
        ...

    def bring_net(self, net: str, folder: NetFolder) -> None:
        """Bring a ControlNet to the rows' devices, under a name that no other has; from any thread.

        Args:
            net: its name, as `Control.net`.
            folder: where it lies.

        Raises:
            ValueError: it does not fit the served model.
        """
        ...

    def drop_net(self, net: str) -> None:
        """Let go of a ControlNet that no row has; one that is not there may be named."""
        ...

    def read(self, row: str, key: str, anchors: Sequence[Anchor | None]) -> None:
        """Have a cached row read other entries from its next step on; as of `CachedRowSpec`."""
        ...

    def make(self, row: str, spec: RowSpec) -> RowMade:
        """Make a row under a name that no other has; the ControlNets that act on it are there.

        Raises whatever went wrong; there is no row then.
        """
        ...

    def load(
        self, reads: Sequence[Read], devices: tuple[int, ...] = (0,)
    ) -> Mapping[str, LoadState]:
        """Have each row turn to what its next step reads, on the devices that will take it. Rows
        that are not in the answer compute all tokens in that step.
        """
        ...

    def step(self, step: StepInput, done: StepDone) -> None:
        """One model call for all rows; what goes wrong with one row costs nobody else.

        Args:
            step: on devices that are free.
            done: told at once, or as a command of the engine's later. Never told of a step that
                was lost with its device: its rows are as they were before it.

        Raises:
            RuntimeError: nothing but failures for several steps.
        """
        ...

    def result(self, row: str) -> HostCopy:
        """[C, h, w] latents of a row that has taken its last step."""
        ...

    def estimate(self, row: str) -> HostCopy:
        """[C, h, w] latents as they would end, judged by the last step."""
        ...

    def keep_entry(self, row: str, key: str, note: Note) -> bool:
        """Put what the last step of a priming row has recorded into the store, once per step;
        False when no tier keeps it.
        """
        ...

    def release(self, row: str) -> RowLoads | None:
        """Let go of a row, if there is one; what a cached row has read."""
        ...

    def idle(self) -> None:
        """There is nothing to step: keep nothing of the last step's rows."""
        ...

    def take_moves(self) -> list[tuple[str, float, float]]:
        """(tier, bytes, seconds) of what has travelled to the rows since this was asked last."""
        ...

    def close(self) -> None:
        """There will be no more steps."""
        ...
