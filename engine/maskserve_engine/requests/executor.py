"""The protocol between the engine's loop and the holder of the rows: plain data, rows by id.

The loop decides which rows take a step, by which plan, and which entries are loaded whole; an
executor carries it out. `LocalExecutor` runs rows in the engine's own process, `GangExecutor` in
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from maskserve_common.contracts.keys import Anchor
from maskserve_common.errors import EngineFailed
from maskserve_common.imaging.masks import TokenIds
from maskserve_engine.adapters.control_net_loader import NetFolder
from maskserve_engine.base.device_clock import Span
from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.cache.tier import Note
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.planning.flops import FeatureMap, Floats
from maskserve_engine.planning.two_stream import Plan
from maskserve_engine.scheduling.step_scheduler import Devices


@dataclass(frozen=True, slots=True)
class PlainRowSpec:
    """A row without a template. With a schedule, only its refresh steps compute all tokens."""

    job: EditJob
    key: str = ""
    """Cache key of the template whose references the row may read, if these do not depend on the
    row (`STILL`).
    """
    schedule: RefreshSchedule | None = None
    """Schedule of its refresh steps; None: it has none."""
    nbytes: int = 0
    """Bytes of the step cache that its refresh steps fill."""


@dataclass(frozen=True, slots=True)
class CachedRowSpec:
    """A row that reads its cached tokens from a template's entries."""

    job: EditJob
    noise_seed: int
    """Seed of the template's noise."""
    key: str
    """Cache key of the template."""
    anchors: tuple[Anchor | None, ...]
    """Anchor that each step reads; None: the step computes all tokens."""
    force: bool
    """Whether steps read their entries even if there is no room for them."""
    schedule: RefreshSchedule | None = None
    """Schedule of its step cache beside the entries, if there is room; None: there is none."""
    nbytes: int = 0
    """Bytes of that step cache."""


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
    """Cache key of the template."""


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """The region that an edit without a mask goes on with."""

    tokens: TokenIds
    schedule: RefreshSchedule
    """Its refresh steps; the first is the row's next step."""
    nbytes: int
    """Bytes of its step cache."""


RowSpec = PlainRowSpec | CachedRowSpec | PrimingRowSpec


class RowReport(NamedTuple):
    complete: bool = True
    """False: some of its entries cannot be read now; or there was no room for its step cache, and
    it is a dense row.
    """
    selection: bytes = b""
    """Digest of a cached row's selection: equal for rows that read the same tokens."""
    schedule: RefreshSchedule | None = None
    """Schedule of a cached row's step cache; None: there was no room for it, or none was
    planned.
    """


class Read(NamedTuple):
    """A cached row of a step; it reads the entry of its `anchors` at this step."""

    row: str
    whole: bool
    """Whether to load all tokens of the entry: rows read more of them than it has."""
    required: bool
    """Whether the row fails if its entry is lost; otherwise it computes all tokens."""
    text: bool = True
    """Whether the step computes the row's text."""


class LoadState(Protocol):
    """Progress of an entry's load; the same object for all rows that share the load."""

    @property
    def tier(self) -> str: ...

    @property
    def sizes(self) -> Floats:
        """[blocks, parts] bytes to load; `inf` for parts that are not kept."""
        ...

    @property
    def missing(self) -> Floats:
        """[blocks, parts] bytes that have not arrived."""
        ...


class RowLoads(Protocol):
    """Loads of a row that has ended."""

    @property
    def loaded(self) -> Mapping[str, int]:
        """Bytes moved for the row, by the tier in which they were found."""
        ...

    @property
    def stalled(self) -> float:
        """Seconds that its steps have waited for entries."""
        ...

    @property
    def out_of_memory(self) -> bool:
        """Whether steps computed more tokens because a step cache found no memory."""
        ...

    @property
    def refresh_errors(self) -> Mapping[int, float]:
        """Relative errors of its lookaheads, by refresh step; known when the device has done its
        steps.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepInput:
    """One model call."""

    number: int
    """Number of the step: its entries are loaded before those of later steps."""
    rows: tuple[str, ...]
    devices: tuple[int, ...] = (0,)
    """Devices of the worker that compute the step together."""
    reads: tuple[Read, ...] = ()
    """Rows that read an entry in this step, as `load` returned them."""
    maps: tuple[FeatureMap, ...] = ()
    """Feature maps that entries have, at the rows' size."""
    plan: Plan | None = None
    """How rows that read entries run each block; None: no row reads any."""
    next_plan: Plan | None = None
    """Plan by which entries of later steps are loaded."""
    measured: tuple[str, ...] = ()
    """Rows whose change from their source is measured after the step."""


class RowStep(NamedTuple):
    """The outcome of a step for one row."""

    row: str
    done: int
    """Steps of the row so far, this one included."""
    read: bool
    """Whether it read an entry in this step."""
    text: bool = True
    """Whether it computed the row's text in this step."""
    stale: bool = False
    """Whether it added a service's residuals requested one step ahead, for expected latents."""
    computed_references: bool = False
    """Whether it computed its references before this step."""
    looked_ahead: bool = False
    """Whether the row computed a lookahead in this step."""
    refresh_error: float | None = None
    """Lookahead error at this step, if the row's next refresh step depends on it."""
    change: Floats | None = None
    """[tokens] change of its predicted clean picture from its source, if the step measures it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. Each row is in `rows` or in `failed`."""

    rows: tuple[RowStep, ...]
    span: Span
    """Span on the device's clock; known when the device has done the step."""
    stalls: tuple[Span, ...] = ()
    """Spans in which the step waited for entries."""
    lost: tuple[str, ...] = ()
    """Rows that continued without their entry because it was lost; they do not read it again."""
    failed: Mapping[str, EngineFailed] = field(default_factory=dict)
    control_waits: tuple[float, ...] = ()
    """Seconds of each wait for a ControlNet service's residuals."""
    ranks: int = 1
    """Number of ranks that shared the step."""


StepDone = Callable[[StepResult], None]
"""Takes the result of a step, on the engine's thread."""


class Executor(Protocol):
    """Holds rows by id and steps them; called from the engine's thread alone."""

    @property
    def devices(self) -> Devices:
        """Devices of the worker on which no step can begin now."""
        ...

    def load_lora(self, adapter: str, factors: Mapping[str, Factors]) -> int:
        """Load an adapter to the rows' devices, under a unique name; from any thread.

        Args:
            adapter: its name.
            factors: by the model's layers.

        Returns:
            its bytes there.

        Raises:
            ValueError: it does not fit the model.
        """
        ...

    def drop_lora(self, adapter: str) -> None:
        """Remove an adapter that no row has; an unknown one is ignored."""
        ...

    def attach(self, row: str, adapters: Sequence[tuple[str, float]]) -> None:
        """Compute a row's next steps with these adapters, each with its scale, and with no
        others.
        """
        ...

    def load_net(self, net: str, folder: NetFolder) -> None:
        """Load a ControlNet to the rows' devices, under a unique name; from any thread.

        Args:
            net: its name, as `Control.net`.
            folder: folder of its files.

        Raises:
            ValueError: it does not fit the served model.
        """
        ...

    def drop_net(self, net: str) -> None:
        """Remove a ControlNet that no row has; an unknown one is ignored."""
        ...

    def switch_entries(self, row: str, key: str, anchors: Sequence[Anchor | None]) -> None:
        """Make a cached row read other entries from its next step on; arguments as in
        `CachedRowSpec`.
        """
        ...

    def make(self, row: str, spec: RowSpec) -> RowReport:
        """Make a row under a unique name; its ControlNets must be loaded.

        Raises whatever went wrong; there is no row then.
        """
        ...

    def refresh_at(self, row: str, schedule: RefreshSchedule) -> None:
        """Make a row with refresh steps follow another schedule from its next step on."""
        ...

    def narrow(self, row: str, region: RegionSpec) -> bool:
        """Make a row without a mask compute a region alone between its refresh steps. Return False
        if there is no room for its step cache: it goes on as before.
        """
        ...

    def load(
        self, reads: Sequence[Read], devices: tuple[int, ...] = (0,)
    ) -> Mapping[str, tuple[LoadState, ...]]:
        """Request the entry that each row's next step reads, on the devices that will take it, and
        a step cache beside it that lies in host memory. Rows that are missing from the result
        compute all tokens in that step.
        """
        ...

    def step(self, step: StepInput, done: StepDone) -> None:
        """Make one model call for all rows; an error of one row does not affect others.

        Args:
            step: the step, on devices that are free.
            done: receives the result at once, or later as a command of the engine; never for a step
                that was lost with its device. The rows are then as they were before it.

        Raises:
            RuntimeError: all rows have failed for several steps.
        """
        ...

    def result(self, row: str) -> HostCopy:
        """Return [C, h, w] latents of a row that has taken its last step."""
        ...

    def estimate(self, row: str) -> HostCopy:
        """Return [C, h, w] final latents predicted by the last step."""
        ...

    def keep_entry(self, row: str, key: str, note: Note) -> bool:
        """Store the entry that a priming row's last step has recorded, once per step; return False
        if no tier keeps it.
        """
        ...

    def release(self, row: str) -> RowLoads | None:
        """Release a row, if it exists; return a cached row's loads."""
        ...

    def idle(self) -> None:
        """Drop the state of the last step's rows: there is nothing to step."""
        ...

    def take_moves(self) -> list[tuple[str, float, float]]:
        """Return and clear the (tier, bytes, seconds) of the moves since the last call."""
        ...

    def close(self) -> None: ...
