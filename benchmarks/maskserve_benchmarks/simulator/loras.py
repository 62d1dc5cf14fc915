"""The LoRAs of one simulated worker: the production resource cache, and loads that take virtual
time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from maskserve_common.config import Config, ModelConfig
from maskserve_common.contracts.request import Lora
from maskserve_common.errors import MaskserveError
from maskserve_common.files.adapter_folder import AdapterFile
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Loaded
from maskserve_common.resources.resource_states import ResourceStates
from maskserve_common.routing.adapters import AdapterView
from maskserve_engine.adapters.lora_loader import LORAS
from maskserve_engine.requests.loras import Loras

NBYTES = 125 << 20
"""Bytes of a file with rank 16 on every linear layer of FLUX's blocks, in half precision."""


@dataclass(frozen=True, slots=True)
class LoraTiers:
    """Places of LoRAs, and whether routing knows them."""

    slots: int = 16
    """Number of LoRAs that a device holds: `[adapters] device_bytes` of 2 GB."""
    host_slots: int = 64
    known: bool = True
    """Whether the policy sees which worker holds which LoRAs."""


class WorkerLoras:
    """The LoRAs of one worker's edits, and the edits that wait for them.

    Args:
        tiers: capacity of the tiers.
        at: schedules a call of a method with an argument.
    """

    def __init__(
        self, tiers: LoraTiers, at: Callable[[float, Callable[..., None], object], None]
    ) -> None:
        self._tiers, self._at = tiers, at
        self._source = _Source(self, tiers.host_slots)
        budget = {LORAS.name: tiers.slots * NBYTES}
        resource_states = ResourceStates(
            1, budget, lambda evicted: self._loras.record_eviction(evicted)
        )
        config = Config(model=ModelConfig(dtype="bfloat16"))  # bytes = file size
        self._loras = Loras(config, resource_states, self._source, lambda *_: None, Observations())
        self._costs = LORAS.estimates
        """Costs that a worker reports before it has measured; every load takes exactly what routing
        expects."""
        self._arrivals: dict[str, float] = {}
        """Name → arrival time, for LoRAs that are loading."""
        self._now = 0.0
        self.loads: dict[str, int] = {"host": 0, "storage": 0}

    def hold(self, edit: str, names: tuple[str, ...], now: float) -> float:
        """Keep LoRAs for an edit until `release`; return the time at which all of them are ready.

        Raises:
            Overloaded: there is no room besides the LoRAs of edits in flight.
        """
        self._now = now
        self._loras.hold(edit, [Lora(name=name, version=name) for name in names])
        return max((self._arrivals.get(name, now) for name in names), default=now)

    def release(self, edit: str, now: float) -> None:
        self._now = now
        self._loras.release(edit)

    def view(self) -> AdapterView | None:
        """Return the LoRAs as a worker's record lists them for routers; None: routers do not know
        them.
        """
        if not self._tiers.known:
            return None
        adapters = {adapter.name: adapter for adapter in self._loras.listed()}
        return AdapterView(adapters, self._costs, self._loras.typical_bytes())

    def begin_load(self, lora: Lora) -> None:
        """Start a load; the resource cache calls this through its source."""
        source = self._source.where(lora.name)
        self.loads[source] += 1
        self._arrivals[lora.name] = self._now + self._costs[source].seconds(NBYTES)
        self._at(self._arrivals[lora.name], self._finish_load, (lora, source))

    def _finish_load(self, now: float, load: object) -> None:
        assert isinstance(load, tuple)
        lora, source = load
        seconds = self._costs[source].seconds(NBYTES)
        del self._arrivals[lora.name]
        self._source.keep(lora.name)
        self._loras.record_arrival(lora, Loaded("", NBYTES, seconds, NBYTES, source))


class _Source:
    """The host's memory, which evicts the least recently used LoRA, in front of a storage with all
    LoRAs.
    """

    def __init__(self, owner: WorkerLoras, slots: int) -> None:
        self._owner, self._slots = owner, slots
        self._on_host: OrderedDict[str, AdapterFile] = OrderedDict()
        self._files: tuple[AdapterFile, ...] = ()

    def where(self, name: str) -> str:
        return "host" if name in self._on_host else "storage"

    def keep(self, name: str) -> None:
        self._on_host[name] = AdapterFile(Path(name), name, name, "", NBYTES, 0.0)
        self._on_host.move_to_end(name)
        if len(self._on_host) > self._slots:
            self._on_host.popitem(last=False)
        self._files = tuple(self._on_host.values())

    def half_bytes(self, lora: Lora) -> int:
        return self.file_bytes(lora)

    def file_bytes(self, lora: Lora) -> int:
        return NBYTES

    def typical_bytes(self) -> float:
        return NBYTES

    def on_host(self) -> tuple[AdapterFile, ...]:
        return self._files

    def load(self, lora: Lora, done: Callable[[Loaded | MaskserveError], None]) -> None:
        self._owner.begin_load(lora)

    def close(self) -> None:
        pass
