"""Count how often an edit's adapter is not on the device, under the popularity that Katz measured
(§3.1).

The paper gives two points for ControlNets: the first 5 of service A's 47 take 98 % of the calls,
and the first 8 of service B's 94 take 95 %. It prints no such point for LoRAs, whose tail is
longer. Calls are drawn independently by the Zipf law through each point. The product's cache
(`Loras`, `ResourceStates`) holds as many adapters as the point names, all of one size. A load ends
before the next call. The report also has the misses of least-recently-used eviction for the same
calls, and the share of the calls beyond the first 5 or 8.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Sequence

from maskserve_benchmarks.adapter_calls import SERVICES, Service, draw_calls
from maskserve_benchmarks.reports import table
from maskserve_common.config import Config, ModelConfig
from maskserve_common.contracts.request import Lora
from maskserve_common.errors import MaskserveError
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Loaded
from maskserve_common.resources.resource_states import Resource, ResourceStates
from maskserve_engine.adapters.lora_loader import LORAS
from maskserve_engine.requests.loras import Loras

NBYTES = 1000
WARM = 0.1
"""Share of the first calls that are not counted."""


def misses(service: Service, calls: Sequence[int]) -> tuple[float, float]:
    """The production classes' share of calls that wait for their adapter, and their loads per call.
    The share leaves out the first calls. The loads include those that no call has asked for yet.
    """
    resource_states = ResourceStates(
        1, {LORAS.name: service.slots * NBYTES}, lambda evicted: loras.record_eviction(evicted)
    )
    loader = _ImmediateLoader()
    config = Config(model=ModelConfig(dtype="bfloat16"))  # so that a file's bytes are its size
    loras = Loras(config, resource_states, loader, lambda lora, outcome: None, Observations())
    misses_counted = 0
    for number, adapter in enumerate(calls):
        lora = Lora(name=f"a{adapter}", version=f"v{adapter}")
        is_loaded = resource_states.state(Resource(LORAS.name, lora.version)) == "ready"
        loras.hold("edit", (lora,))
        loader.arrive(loras)
        loras.release("edit")
        loader.arrive(loras)
        misses_counted += not is_loaded and number >= WARM * len(calls)
    resource_states.check_integrity()
    assert len(loras.names()) == service.slots
    return misses_counted / (len(calls) * (1 - WARM)), loader.loads / len(calls)


def misses_of_lru(slots: int, calls: Sequence[int]) -> float:
    """The same with least-recently-used eviction."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses_counted = 0
    for number, adapter in enumerate(calls):
        misses_counted += adapter not in cache and number >= WARM * len(calls)
        cache[adapter] = None
        cache.move_to_end(adapter)
        if len(cache) > slots:
            cache.popitem(last=False)
    return misses_counted / (len(calls) * (1 - WARM))


class _ImmediateLoader:
    """A loader that finishes its loads when `arrive` is called."""

    def __init__(self) -> None:
        self.loads = 0
        self._pending: list[Lora] = []

    def arrive(self, loras: Loras) -> None:
        while self._pending:
            self.loads += 1
            loaded = Loaded("", NBYTES, 0.0, NBYTES, "storage")
            loras.record_arrival(self._pending.pop(), loaded)

    def half_bytes(self, lora: Lora) -> int:
        return self.file_bytes(lora)

    def file_bytes(self, lora: Lora) -> int:
        return NBYTES

    def typical_bytes(self) -> float:
        return 0.0

    def on_host(self) -> tuple[()]:
        return ()

    def load(self, lora: Lora, done: Callable[[Loaded | MaskserveError], None]) -> None:
        self._pending.append(lora)

    def close(self) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--calls", type=int, default=200_000)
    args = parser.parse_args()
    rows = []
    for service in SERVICES:
        calls = draw_calls(service, args.calls, 0)
        misses_counted, loads = misses(service, calls)
        lru, beyond = misses_of_lru(service.slots, calls), 1 - service.share
        rows.append(
            [service.name, *(f"{value:.3f}" for value in (misses_counted, lru, beyond, loads))]
        )
    print(table(["service", "misses", "of an LRU", "beyond the first", "loads a call"], rows))
    return 0
