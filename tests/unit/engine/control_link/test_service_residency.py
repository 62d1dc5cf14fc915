"""Which ControlNets a service keeps for its denoisers, and what makes room for what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from maskserve_common.config import Config, ControlsConfig, ModelConfig
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_common.resources.loading import Done, Loaded
from maskserve_engine.control_service.service import ControlNetService
from maskserve_engine.families.adapter import Adapter

ROOM = 10


class Source:
    """A loader whose loads end when they are told to; a name's last digit is its bytes."""

    def __init__(self, config: Config, spec: object, place: Any) -> None:
        self._place = place
        self.under_way: dict[str, Done] = {}

    def device_bytes(self, control: ResolvedControl) -> int:
        return int(control.name[-1])

    def typical_bytes(self) -> float:
        return 0.0

    def holds(self, control: ResolvedControl) -> bool:
        return True

    def load(self, control: ResolvedControl, done: Done) -> None:
        assert control.name not in self.under_way
        self.under_way[control.name] = done

    def arrive(self, name: str) -> None:
        self._place(name, self)
        self.under_way.pop(name)(Loaded(f"sha of {name}", int(name[-1]), 1.0, int(name[-1])))

    def fail(self, name: str) -> None:
        self.under_way.pop(name)(EngineFailed("it is broken"))

    def read(self) -> Source:
        return self

    def to(self, device: object) -> Source:
        return self

    def close(self) -> None:
        """It has nothing open."""


class Family:
    spec = None

    def control_net(self, model: object) -> object:
        return model


@dataclass
class Rig:
    service: ControlNetService
    source: Source

    def attach(self) -> str:
        return self.service.sessions.attach("float32").session

    def load(self, session: str, name: str) -> list[Loaded | MaskserveError]:
        """The list that gets the answer of the load once there is one."""
        loadeds: list[Loaded | MaskserveError] = []
        self.service.sessions.load(
            session, ResolvedControl(name=name, version=name, image=0), loadeds.append
        )
        return loadeds

    def load_now(self, session: str, name: str) -> list[Loaded | MaskserveError]:
        loaded = self.load(session, name)
        if name in self.source.under_way:
            self.source.arrive(name)
        return loaded


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    config = Config(
        model=ModelConfig(device="cpu", dtype="float32"),
        controls=ControlsConfig(device_bytes=ROOM),
    )
    service = ControlNetService(
        config, tmp_path / "controls", cast(Any, Source), cast(Adapter, Family())
    )
    yield Rig(service, cast(Source, service.sessions._loader))
    service.close()
    service.sessions.resource_states.check_integrity()


def test_all_who_ask_for_one_are_told_when_its_one_load_ends(rig: Rig) -> None:
    one, other = rig.attach(), rig.attach()
    answers = [rig.load(one, "a4"), rig.load(other, "a4"), rig.load(one, "a4")]
    assert answers == [[], [], []]
    rig.source.arrive("a4")
    assert [
        [answer.digest for answer in some if isinstance(answer, Loaded)] for some in answers
    ] == [["sha of a4"]] * 3
    assert rig.load(other, "a4") != []
    assert rig.service.sessions.counts()["nets"] == 1


def test_what_any_denoiser_holds_stays_and_what_none_holds_makes_room(rig: Rig) -> None:
    one, other = rig.attach(), rig.attach()
    rig.load_now(one, "a5")
    rig.load_now(other, "a5")
    rig.load_now(one, "b4")
    rig.service.sessions.drop(one, "a5")
    with pytest.raises(Overloaded, match="no room for ControlNet c5"):
        rig.load(one, "c5")
    rig.service.sessions.drop(other, "a5")
    assert rig.load(one, "c5") == []
    rig.source.arrive("c5")
    assert set(rig.service.sessions.family_nets) == {"b4", "c5"}


def test_a_session_that_its_denoiser_has_not_heard_of_goes(rig: Rig) -> None:
    sessions = rig.service.sessions
    connected, lost, recent = (rig.attach() for _ in range(3))
    sessions.connected(connected)
    rig.load_now(lost, "a10")
    for name in (connected, lost):
        sessions._sessions[name].opened -= 61.0
    assert sessions.counts()["sessions"] == 2
    assert set(sessions._sessions) == {connected, recent}
    assert rig.load(connected, "b5") == []  # there is room again


def test_the_least_used_per_byte_goes_first(rig: Rig) -> None:
    session = rig.attach()
    for _ in range(5):
        rig.load_now(session, "often4")
        rig.service.sessions.drop(session, "often4")
    rig.load_now(session, "seldom4")  # the one used last, and yet the one to go
    rig.service.sessions.drop(session, "seldom4")
    rig.load_now(session, "new4")
    assert set(rig.service.sessions.family_nets) == {"often4", "new4"}


def test_a_load_that_fails_is_told_and_tried_anew_and_holds_nothing(rig: Rig) -> None:
    session = rig.attach()
    loaded = rig.load(session, "a9")
    rig.source.fail("a9")
    assert [str(error) for error in loaded] == ["[ENGINE_FAILED] it is broken"]
    assert rig.load_now(session, "b9")
    rig.service.sessions.drop(session, "b9")
    assert rig.load_now(session, "a9")


def test_a_session_that_ends_lets_go(rig: Rig) -> None:
    one, other = rig.attach(), rig.attach()
    rig.load_now(one, "a9")
    with pytest.raises(Overloaded):
        rig.load(other, "b9")
    rig.service.sessions.end(one)
    assert rig.load_now(other, "b9")


def test_threads_that_load_and_evict_keep_the_counts(rig: Rig) -> None:
    names, stop = ["a3", "b3", "c4", "d5"], threading.Event()

    def arrive_all() -> None:
        while not stop.is_set():
            for name in list(rig.source.under_way):
                rig.source.arrive(name)

    thread = threading.Thread(target=arrive_all)
    thread.start()

    def use(session: str, seed: int) -> None:
        for turn in range(60):
            name = names[(seed + turn * (seed + 1)) % len(names)]
            try:
                rig.load(session, name)
            except Overloaded:
                continue
            finally:
                rig.service.sessions.drop(session, name)

    users = [threading.Thread(target=use, args=(rig.attach(), n)) for n in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    stop.set()
    thread.join()
    for name in list(rig.source.under_way):
        rig.source.arrive(name)
    rig.service.sessions.resource_states.check_integrity()
    assert sum(int(name[-1]) for name in rig.service.sessions.family_nets) <= ROOM
