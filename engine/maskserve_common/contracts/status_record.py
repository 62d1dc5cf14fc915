"""The status record, which a worker publishes about itself (design §4, §5).

A reader takes records of its own `VERSION` only. Within a version fields may be added: unknown keys
are skipped, absent ones take their defaults.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, Self, TypeVar

import msgspec

from maskserve_common.contracts.memory_table import MemoryTable
from maskserve_common.contracts.pricing import Pricing
from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.reuse_levels import RefreshStrides
from maskserve_common.contracts.semantics import NO_DENSE_STEPS, DenseSteps

VERSION = 2
ADAPTERS_LISTED = 256
BUSY_SHARE = 0.8
"""Share of its time that a server should be busy; the rest is for bursts. The chart uses it too."""
Kind = Literal["dense", "cached", "prime"]
AdapterTier = Literal["device", "coming", "host"]
State = Literal["loading", "ready", "draining", "stopped", "failed"]
_Record = TypeVar("_Record")
_ENDED: tuple[State, ...] = ("stopped", "failed")


class RowStatus(msgspec.Struct):
    """A row of the running batch, or an edit that waits for one.

    The writer keeps it while the row lives; only `steps_left` changes.
    """

    request_id: str
    kind: Kind
    active_tokens: int
    """Tokens computed per step; equal to `total_tokens` for a dense row. Both count twice for an
    edit with a negative prompt, whose steps run the model twice."""
    total_tokens: int
    steps_left: int
    template_id: str = ""
    priority: int = 0
    due_ns: int = 0
    """Time by which its last step must end for the response to be in time, on the host's
    time.monotonic_ns; 0: no due time."""
    controls: tuple[tuple[str, float], ...] = ()
    """ControlNets of the row, each with the share of the steps in which it acts."""
    adapter_bytes: int = 0
    """Bytes of the files of the LoRAs that its steps are computed with."""
    dense_share: float = 0.0
    """Share of a cached row's steps that compute all tokens."""
    own: bool = False
    """Whether a cached row reads its step cache at these steps, and loads nothing."""


@dataclass(frozen=True, slots=True)
class Served:
    """Properties of the served model that decide how much work an edit is."""

    native_resolution: int
    """Side of the square whose area bounds the model's input, in pixels."""
    token_pixels: int
    """Pixels per token along one side."""
    num_inference_steps: int
    """Default number of steps."""
    cache: bool = True
    """Whether cached rows are served."""
    dense_above_ratio: float = 1.0
    """Mask ratio from which a row runs dense even on a hit."""
    mask_ring: int = 0
    """Default ring, in tokens."""
    dense_sides: bool = False
    """Whether a row that computes a whole side of the picture runs dense even on a hit."""
    dense_steps: DenseSteps = NO_DENSE_STEPS
    """First steps of a cached row that compute all tokens."""
    step_interval: int = 1
    """Default `step_interval`."""
    own_stride: float = 0.0
    """Share of its steps from one refresh step to the next, for an edit whose template is not
    ready; 0: all steps compute all tokens.
    """
    promised_stride: float = 0.0
    """`own_stride` of an edit with `reuse_floor`."""
    own_by_error: bool = False
    """`RefreshStrides.by_error`."""
    error_steps: int = 0
    """`RefreshStrides.least_steps`."""
    own_ring: int = 0
    """`RefreshSpec.ring`; 0 where no steps leave a ring out."""
    own_over_template: bool = False
    """Whether an edit with refresh steps reads no template, even if it is ready."""
    due_ms: tuple[int, ...] = ()
    """Due times by size of edits without `deadline_ms` (`due_times.due_by_size`)."""
    skipping: str = ""
    """Semantics of a model whose edits may have reuse levels; empty: they have none."""
    edit_kinds: tuple[EditKind, ...] = ("inpaint",)
    """Kinds of edits that the model makes."""
    references: bool = False
    """Whether it sees a source as references at every step, so that an edit without a mask follows
    an instruction; otherwise such an edit begins at its noised source (`strength` below 1)."""
    most_pictures: int = 1
    """Most pictures in IMAGE."""

    @property
    def refresh_strides(self) -> RefreshStrides:
        return RefreshStrides(
            self.own_stride, self.promised_stride, self.own_by_error, self.error_steps
        )


class NodeStatus(msgspec.Struct):
    """A part of a worker that runs a model of its own, step by step, or a service that runs one for
    it.
    """

    name: str
    """Such as `denoiser`; no other node of the worker has it. The address of a service."""
    model: str
    state: State


class TemplateChanges(msgspec.Struct, frozen=True):
    """Changes of a worker's templates since a version that the reader has."""

    version: str
    """Version after the changes."""
    since: str = ""
    """Version of the reader; empty: it has none, and `added` lists all templates."""
    added: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Tier -> `entries_id`."""
    removed: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


class ValuesHeld(msgspec.Struct, frozen=True):
    """Values that lie in the folder of a host."""

    host: str = ""
    """Name of the host whose processes share the folder; empty: none."""
    count: int = 0
    bytes: int = 0


class AdapterStatus(msgspec.Struct, frozen=True):
    """An adapter on a worker."""

    name: str
    tier: AdapterTier
    """Nearest tier that has it; `coming`: it is loading to the device."""
    nbytes: int
    """Bytes of the adapter's file."""
    digest: str = ""
    """sha256 of its file; empty while it is loading."""


class AdapterTierTotal(msgspec.Struct, frozen=True):
    """Total of a tier's adapters."""

    count: int
    nbytes: int


class LoadCost(msgspec.Struct, frozen=True):
    """Seconds until an adapter can be used, `fixed + per_byte` times its file's bytes."""

    fixed: float
    per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.fixed + self.per_byte * nbytes


class Stamp(NamedTuple):
    """Sequence number and times that the writer adds to a record."""

    sequence: int
    wall_ns: int
    monotonic_ns: int


class WorkerStatus(msgspec.Struct):
    """One record. Sizes are bytes, stamps nanoseconds; the stamps and the sequence number are the
    writer's.
    """

    worker: str
    model: str
    state: State
    max_rows: int
    max_waiting: int
    devices: int = 1
    """Each device has a batch of `max_rows`, with an equal part of the edits."""
    sequence: int = 0
    """Counts the records of one writer from 1."""
    wall_ns: int = 0
    """time.time_ns when written: for people and other hosts."""
    monotonic_ns: int = 0
    """time.monotonic_ns when written: comparable across the processes of one host."""
    running: tuple[RowStatus, ...] = ()
    waiting: tuple[RowStatus, ...] = ()
    tier_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Tier -> bytes of entries."""
    counters: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Totals since the worker started, named like the metrics without their prefix."""
    templates: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Tier (`device`, `host`, `disk`, `remote`) -> `entries_id` of the templates that it has."""
    served: Served | None = None
    """None before the model is known."""
    pricing: Pricing | None = None
    """Prices of rows on this worker; None before they are known."""
    memory: MemoryTable | None = None
    """Memory of the worker's device; None before the model is loaded."""
    adapters: tuple[AdapterStatus, ...] = ()
    """The adapters that were used last, at most `ADAPTERS_LISTED`."""
    adapter_tiers: Mapping[str, AdapterTierTotal] = msgspec.field(default_factory=dict)
    """Tier -> its adapters in all."""
    typical_adapter_bytes: float = 0.0
    """Bytes of the file of any other adapter, averaged over all that the worker knows."""
    adapter_loads: Mapping[str, LoadCost] = msgspec.field(default_factory=dict)
    """`host` or `storage` -> recently measured cost to load an adapter from it to the device.
    Empty: the worker serves none.
    """
    controlnets: tuple[AdapterStatus, ...] = ()
    """ControlNets that are ready or loading, with their bytes on the device."""
    typical_controlnet_bytes: float = 0.0
    """Bytes of any other ControlNet on the device, averaged over all that the worker knows."""
    controlnet_loads: Mapping[str, LoadCost] = msgspec.field(default_factory=dict)
    """Costs of loading ControlNets, by source: always `storage`."""
    nodes: tuple[NodeStatus, ...] = ()
    """Stages and engine of an edit's steps; `state` is that of the engine that runs them. Empty in
    records of versions without nodes.
    """
    services: tuple[NodeStatus, ...] = ()
    """Services that run stages or ControlNets of the worker, by address; their model is the stage,
    or `controlnet`. One that is away does not keep the worker from taking edits."""
    values: ValuesHeld = ValuesHeld()
    """Values in files, at the time when the record is read."""
    version: int = VERSION

    @property
    def takes_edits(self) -> bool:
        """Whether every node is ready, and the engine that runs them."""
        return self.state == "ready" and all(node.state == "ready" for node in self.nodes)

    @property
    def ended(self) -> str | None:
        """Return a description of what has ended for good; None: nothing has."""
        if self.state in _ENDED:
            return f"engine has {self.state}"
        ended_nodes = [node for node in self.nodes if node.state in _ENDED]
        return (
            f"{ended_nodes[0].name} ({ended_nodes[0].model}) has {ended_nodes[0].state}"
            if ended_nodes
            else None
        )

    def age_s(self, now_ns: int | None = None) -> float:
        """Seconds since the record was written; only on the host that wrote it."""
        return ((time.monotonic_ns() if now_ns is None else now_ns) - self.monotonic_ns) / 1e9

    def to_json(self) -> bytes:
        """Compact UTF-8 JSON of every field."""
        return _encode(self)

    @classmethod
    def from_json(cls, raw: bytes | str) -> Self:
        """Read what `to_json` wrote, as this class has it.

        Raises:
            ValueError: not a record of this version.
        """
        try:
            status: Self = _decoder(cls).decode(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"not a status record: {error}") from error
        if status.version != VERSION:
            raise ValueError(f"not a status record: version {status.version}; known: {VERSION}")
        return status


_encode = msgspec.json.Encoder().encode


@cache
def _decoder(kind: type[_Record]) -> msgspec.json.Decoder[_Record]:
    return msgspec.json.Decoder(kind)
