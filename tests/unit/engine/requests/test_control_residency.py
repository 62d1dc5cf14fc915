"""Which ControlNets are on the device: what makes room for what, and what records say of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.status_record import AdapterStatus, WorkerStatus
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Loaded
from maskserve_common.resources.resource_states import Resource, ResourceStates
from maskserve_engine.adapters.control_net_loader import CONTROL_NETS
from maskserve_engine.requests.control_nets import EditControlNets

ROOM = 10


class Folder:
    """`ControlNetSource` of nets of given sizes; a load ends when it is told to."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.loads: list[str] = []
        self.lost: set[str] = set()
        """Went with the service that held them."""

    def device_bytes(self, control: ResolvedControl) -> int:
        return self.sizes[control.name]

    def typical_bytes(self) -> float:
        return sum(self.sizes.values()) / len(self.sizes)

    def config(self, control: ResolvedControl) -> Mapping[str, Any]:
        return {}

    def holds(self, control: ResolvedControl) -> bool:
        return control.name not in self.lost

    def load(
        self, control: ResolvedControl, done: Callable[[Loaded | MaskserveError], None]
    ) -> None:
        self.loads.append(control.name)
        self.lost.discard(control.name)

    def close(self) -> None:
        """It has nothing open."""


class Rig:
    def __init__(self, **sizes: int) -> None:
        self.folder = Folder(sizes)
        self.dropped: list[str] = []
        self.resource_states = ResourceStates(8, {CONTROL_NETS.name: ROOM}, self._drop)
        self.observations = Observations()
        self.nets = EditControlNets(
            self.resource_states, self.folder, lambda *_: None, self.observations
        )

    def _drop(self, resource: Resource) -> None:
        self.dropped.append(resource.name)
        self.nets.record_eviction(resource)

    def arrive(self, name: str, seconds: float = 1.0) -> None:
        nbytes = self.folder.sizes[name]
        self.nets.record_arrival(control(name), Loaded(f"sha of {name}", nbytes, seconds, nbytes))

    def edit(self, *names: str) -> tuple[str, ...]:
        """An edit from its begin to its end; what had to be brought."""
        absent = self.nets.hold("edit", [control(name) for name in names])
        for net in absent:
            self.arrive(net.name)
        self.nets.release("edit")
        return tuple(net.name for net in absent)


def control(name: str) -> ResolvedControl:
    return ResolvedControl(name=name, version=name, image=0)


def test_what_is_used_least_of_late_per_byte_makes_room() -> None:
    rig = Rig(often=4, seldom=4, new=4)
    for _ in range(5):
        rig.edit("often")
    rig.edit("seldom")  # the one used last, and yet the one to go
    assert rig.edit("new") == ("new",)
    assert rig.dropped == ["seldom"]
    assert rig.edit("often") == ()


def test_uses_of_long_ago_count_less() -> None:
    rig = Rig(past=5, now=5, new=5)
    for _ in range(50):
        rig.edit("past")
    for _ in range(10_000):
        rig.edit("now")
    for _ in range(20):
        rig.edit("past", "now")
    rig.edit("now")
    rig.edit("new")
    assert rig.dropped == ["past"]


def test_a_large_one_needs_more_uses_to_stay_than_a_small_one() -> None:
    rig = Rig(large=8, small=2, new=2)
    for _ in range(3):
        rig.edit("large")
    rig.edit("small")
    rig.edit("small")
    rig.edit("new")
    assert rig.dropped == ["large"]


def test_what_an_edit_holds_is_never_dropped_and_who_comes_later_is_told_so() -> None:
    rig = Rig(a=6, b=6)
    rig.nets.hold("first", [control("a")])
    rig.arrive("a")
    with pytest.raises(Overloaded, match="no room for ControlNet b beside those of running edits"):
        rig.nets.hold("second", [control("b")])
    assert rig.dropped == []
    rig.nets.release("first")
    assert rig.nets.hold("second", [control("b")]) == (Resource(CONTROL_NETS.name, "b"),)
    assert rig.dropped == ["a"]


def test_records_list_what_is_here_and_what_is_coming_and_count_the_rest() -> None:
    rig = Rig(a=6, b=4, c=5)
    assert rig.nets.listed() == ()
    assert rig.nets.typical_bytes() == 5
    rig.nets.hold("one", [control("a"), control("b")])
    rig.arrive("b", seconds=2.0)
    listed = rig.nets.listed()
    assert listed == (AdapterStatus("a", "coming", 6), AdapterStatus("b", "device", 4, "sha of b"))
    assert rig.nets.listed() is listed
    rig.nets.record_failure(control("a"), EngineFailed("it is broken"))
    assert rig.nets.listed() == (AdapterStatus("b", "device", 4, "sha of b"),)
    rig.nets.release("one")
    rig.edit("c")
    rig.edit("a")  # what has failed is tried anew; only now has something to go
    assert rig.dropped == ["c"]
    assert rig.nets.counters == {
        "controlnet_load_failures_total": 1,
        "controlnet_evictions_total": 1,
    }
    took = [
        value for name, value, _ in rig.observations.take() if name == "controlnet_load_seconds"
    ]
    assert took == [2.0, 1.0, 1.0]


def test_what_went_with_its_service_is_brought_anew() -> None:
    rig = Rig(a=6)
    rig.edit("a")
    rig.folder.lost.add("a")
    assert rig.edit("a") == ("a",)
    assert rig.folder.loads == ["a", "a"]


def test_loads_are_priced_by_what_they_took() -> None:
    rig = Rig(a=2, b=8)
    worker_status = WorkerStatus(
        "w", "m", "ready", 4, 16, controlnet_loads=rig.nets.costs.published
    )
    assert (
        WorkerStatus.from_json(worker_status.to_json()).controlnet_loads == CONTROL_NETS.estimates
    )
    for name, seconds in (("a", 1.2), ("b", 1.8)):
        rig.nets.hold(name, [control(name)])
        rig.arrive(name, seconds)
    cost = rig.nets.costs.published["storage"]
    assert cost.seconds(2) == pytest.approx(1.2)
    assert cost.seconds(8) == pytest.approx(1.8)


def test_counts_match_whatever_edits_ask_for() -> None:
    rng = random.Random(0)
    sizes = {f"net{i}": rng.randint(1, 6) for i in range(8)}
    rig = Rig(**sizes)
    for _ in range(500):
        names = rng.sample(sorted(sizes), rng.randint(1, 3))
        try:
            rig.edit(*names)
        except Overloaded:
            assert sum(sizes[name] for name in names) > ROOM
            for net in rig.nets.listed():
                if net.tier == "coming":  # it goes on although its edit was refused
                    rig.arrive(net.name)
        rig.resource_states.check_integrity()
        listed = rig.nets.listed()
        assert (
            sum(net.nbytes for net in listed)
            == rig.resource_states.nbytes(CONTROL_NETS.name)
            <= ROOM
        )
