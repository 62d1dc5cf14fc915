"""Where models of node servers come to lie, in virtual time: servers that load what is asked."""

from __future__ import annotations

import random
from typing import Any

import pytest

from maskserve_workflows.live_placement import LivePlacement

LOOK_S = 5.0
SIZES = {"a": 1, "b": 1, "c": 1}


class Server:
    """Loads what a call needs, or it is told to; of what has to go the least recently used first.

    Args:
        models: bytes by name.
        room: bytes that are loaded at a time.
        load_s: seconds of a load.
    """

    def __init__(self, models: dict[str, int], room: int, load_s: float = 0.5) -> None:
        self.models, self.room, self.load_s = models, room, load_s
        self.ready: list[str] = []
        self.broken: set[str] = set()
        self.loads, self.free_at = 0, 0.0
        self.seconds: dict[str, float] = {}
        self.ended = dict.fromkeys(models, 0)
        self.under_way: list[tuple[float, str]] = []

    def call(self, model: str, now: float, run_s: float) -> None:
        begin = max(now, self.free_at)
        if model not in self.ready:
            while (
                sum(self.models[loaded_model] for loaded_model in self.ready) + self.models[model]
                > self.room
            ):
                self.ready.pop(0)
            begin += self.load_s
            self.loads += 1
        self.ready = [loaded_model for loaded_model in self.ready if loaded_model != model] + [
            model
        ]
        self.seconds[model], self.free_at = run_s, begin + run_s
        self.under_way.append((self.free_at, model))

    def place(self, models: frozenset[str]) -> None:
        kept_models = [loaded_model for loaded_model in self.ready if loaded_model in models]
        for model in sorted(models - set(kept_models) - self.broken):
            if (
                sum(self.models[loaded_model] for loaded_model in kept_models) + self.models[model]
                <= self.room
            ):
                kept_models.append(model)
                self.loads += 1
        self.ready = kept_models

    def record(self, now: float) -> dict[str, Any]:
        records = []
        while self.under_way and self.under_way[0][0] <= now:
            self.ended[self.under_way.pop(0)[1]] += 1
        for name, nbytes in self.models.items():
            state = "ready" if name in self.ready else "failed" if name in self.broken else "absent"
            model_record = {
                "name": name,
                "state": state,
                "bytes": nbytes,
                "ended": self.ended[name],
            }
            records.append(
                {**model_record, "seconds": self.seconds.get(name, 0.0), "load_s": self.load_s}
            )
        return {"device_bytes": self.room, "models": records}


class Site:
    """Servers and a router, or several that look in turn."""

    def __init__(self, *servers: Server, routers: int = 1) -> None:
        self.servers = {f"s{number}": server for number, server in enumerate(servers)}
        self.routers = [LivePlacement() for _ in range(routers)]
        self.dead: set[str] = set()
        self.now, self.rng = 0.0, random.Random(1)
        self.changes: list[float] = []
        self.went: list[tuple[str, str]] = []

    def run(self, seconds: float, run_s: float = 0.1, **loads: float) -> None:
        """Poisson calls of these loads, each at whichever router; looks between."""
        end_s = self.now + seconds
        calls = []
        for model, load in loads.items():
            at = self.now
            while load and (at := at + self.rng.expovariate(load / run_s)) < end_s:
                calls.append((at, model))
        looks = [(self.now + n * LOOK_S, "") for n in range(int(seconds / LOOK_S))]
        for at, model in sorted(calls + looks):
            self.now = at
            router = self.rng.choice(self.routers)
            if not model:
                for live_router in self.routers:
                    self.look(live_router)
                continue
            alive = sorted(set(self.servers) - self.dead)
            name = min(
                alive,
                key=lambda n: router.score(model, n, max(0.0, self.servers[n].free_at - self.now)),
            )
            router.count_call(model, name)
            self.servers[name].call(model, at, run_s)
            self.went.append((model, name))
        self.now = end_s

    def look(self, router: LivePlacement) -> None:
        records = {
            name: None if name in self.dead else server.record(self.now)
            for name, server in self.servers.items()
        }
        for name, models in router.observe(records, self.now).items():
            self.changes.append(self.now)
            self.servers[name].place(models)

    @property
    def ready(self) -> list[set[str]]:
        return [set(server.ready) for server in self.servers.values()]

    @property
    def loads(self) -> int:
        return sum(server.loads for server in self.servers.values())


@pytest.mark.parametrize("routers", [1, 3])
def test_all_routers_tell_how_many_servers_calls_keep_busy(routers: int) -> None:
    """Each sees what the others ask for, too."""
    site = Site(Server(SIZES, 3), Server(SIZES, 3), routers=routers)
    assert site.routers[0].busy() == {}
    site.run(200, a=1.2, b=0.3)
    for router in site.routers:
        assert router.busy() == pytest.approx({"a": 1.2, "b": 0.3, "c": 0.0}, abs=0.2)
    site.run(300)
    assert max(site.routers[-1].busy().values()) < 0.02


@pytest.mark.parametrize("routers", [1, 3])
def test_calls_come_to_where_the_placement_is_and_stay(routers: int) -> None:
    site = Site(Server(SIZES, 2), Server(SIZES, 2), routers=routers)
    site.run(200, a=1.0, b=0.3, c=0.1)
    assert sorted(map(sorted, site.ready)) == [["a", "b"], ["a", "c"]]
    loads, site.changes, site.went = site.loads, [], []
    site.run(300, a=1.0, b=0.3, c=0.1)
    assert (site.loads, site.changes) == (loads, [])
    where = {
        model: {name for called_model, name in site.went if called_model == model}
        for model in SIZES
    }
    assert (len(where["a"]), len(where["b"]), len(where["c"])) == (2, 1, 1)
    assert max(server.free_at for server in site.servers.values()) < site.now + 2.0


def test_scores_alone_load_again_and_again() -> None:
    """Calls that overflow evict what the next one needs: why there are placements."""

    class ScoreAlone(LivePlacement):
        def score(
            self, model: str, server: str, queue_s: float, nbytes: int = 0, byte_s: float = 0.0
        ) -> tuple[int, float]:
            return 0, super().score(model, server, queue_s, nbytes, byte_s)[1]

        def observe(self, records: Any, now: float) -> dict[str, frozenset[str]]:
            super().observe(records, now)
            return {}

    site = Site(Server(SIZES, 2), Server(SIZES, 2))
    site.routers = [ScoreAlone()]
    site.run(200, a=0.7, b=0.6, c=0.4)
    loads = site.loads
    site.run(300, a=0.7, b=0.6, c=0.4)
    assert site.loads > loads + 10


def test_what_is_asked_for_now_takes_the_place_of_what_was() -> None:
    site = Site(Server(SIZES, 2), Server(SIZES, 2))
    site.run(200, a=1.0, b=0.3, c=0.1)
    site.run(200, a=0.1, b=0.3, c=1.0)
    assert sorted(map(sorted, site.ready)) == [["a", "c"], ["b", "c"]]
    assert max(server.free_at for server in site.servers.values()) < site.now + 2.0


def test_where_not_all_models_fit_an_idle_one_makes_room() -> None:
    sizes = {"a": 5, "b": 6, "c": 8}
    site = Site(Server(sizes, 8), Server(sizes, 6))
    site.servers["s0"].ready, site.servers["s1"].ready = ["a"], ["b"]
    site.run(200, a=1.6)
    assert site.ready == [{"a"}, {"a"}]


def test_servers_that_are_not_busy_are_left_alone() -> None:
    """However lopsided: loads of little calls come and go."""
    site = Site(Server(SIZES, 2), Server(SIZES, 2))
    for seed in range(20):
        site.run(60, **{name: random.Random(seed).choice([0.05, 0.2]) for name in SIZES})
    assert site.changes == []
    assert site.loads == 3


def test_a_model_whose_load_takes_longer_than_it_is_worth_stays_where_it_is() -> None:
    quick, slow = (Site(*(Server(SIZES, 2, load_s) for _ in range(2))) for load_s in (0.5, 100.0))
    for site in (quick, slow):
        for server, letters in zip(site.servers.values(), ("ab", "bc"), strict=True):
            server.ready = list(letters)
        site.run(200, a=1.0, b=0.1, c=0.1)
    assert quick.changes
    assert not slow.changes


def test_of_a_server_that_dies_the_others_take_over() -> None:
    site = Site(*(Server(SIZES, 2) for _ in range(3)))
    site.run(200, a=1.0, b=0.8, c=0.3)
    site.dead.add("s0")
    site.servers["s0"].ready = []
    site.went = []
    site.run(200, a=0.8, b=0.4, c=0.3)
    assert {name for _, name in site.went} == {"s1", "s2"}
    assert set().union(*site.ready[1:]) == set(SIZES)
    loads, site.changes = site.loads, []
    site.run(200, a=0.8, b=0.4, c=0.3)
    assert (site.loads, site.changes) == (loads, [])
    site.dead.clear()
    site.run(200, a=1.0, b=0.8, c=0.3)
    assert site.ready[0], "it is back, and has something to do"


def test_one_server_is_left_as_it_is() -> None:
    site = Site(Server(SIZES, 2))
    site.run(200, a=0.5, b=0.4, c=0.3)
    assert site.changes == []


def test_a_model_that_no_server_has_has_the_last_place_everywhere() -> None:
    site = Site(Server(SIZES, 2), Server({"a": 1}, 2))
    site.run(20, a=0.1)
    router = site.routers[0]
    assert {router.score("d", name, 1.5) for name in site.servers} == {(3, 1.5)}
    router.count_call("d", "s0")  # it is asked all the same, and says that it has none
    assert router.score("b", "s0", 0.0) < router.score("b", "s1", 0.0)
    assert LivePlacement().score("a", "s0", 2.0) == (3, 2.0)


@pytest.mark.parametrize("why", ["it failed there", "it is too large"])
def test_a_call_goes_last_to_where_its_model_cannot_be_loaded(why: str) -> None:
    """One that has room beside: of the other a model has to go for it."""
    cannot, other_server = Server({**SIZES, "d": 2}, 3), Server({**SIZES, "d": 2}, 3)
    other_server.ready = ["a", "b", "c"]
    if why == "it failed there":
        cannot.broken = {"d"}
    else:
        cannot.room = 1
    router = LivePlacement()
    router.observe({"x": cannot.record(0.0), "y": other_server.record(0.0)}, 0.0)
    assert router.score("d", "y", 9.0) < router.score("d", "x", 0.0)


def test_what_a_server_lacks_or_could_not_load_is_not_placed_there() -> None:
    sizes = {**SIZES, "huge": 9}
    site = Site(Server(sizes, 2), Server({"b": 1}, 2), Server(sizes, 2))
    site.servers["s0"].broken, site.servers["s2"].broken = {"c"}, {"a", "c"}
    site.servers["s0"].ready, site.servers["s2"].ready = ["a", "b"], ["b"]
    site.run(200, a=0.2, b=1.5)
    assert "b" in site.ready[1]
    assert "a" not in site.ready[2]


def test_a_call_goes_to_who_would_be_done_first() -> None:
    loaded_server, slow, loading_server = (
        Server(SIZES, 3),
        Server(SIZES, 3),
        Server(SIZES, 3, load_s=3.0),
    )
    loaded_server.ready = slow.ready = ["a"]
    loaded_server.seconds["a"], slow.seconds["a"] = 0.1, 0.5
    records = {
        name: s.record(0.0)
        for name, s in zip("xyz", (loaded_server, slow, loading_server), strict=True)
    }
    records["z"]["models"][0]["state"] = "loading"
    router = LivePlacement()
    assert router.observe(records, 0.0) == {}
    assert router.score("a", "x", 0.0) == (0, pytest.approx(0.1))
    assert router.score("a", "x", 1.0, 5, 0.1) == (0, pytest.approx(1.6))
    assert router.score("a", "x", 1.0) > router.score("a", "y", 0.0)
    assert router.score("a", "z", 0.0) == (0, pytest.approx(3.0))
    assert router.score("b", "x", 0.0) == (1, pytest.approx(0.5))
    router.count_call("b", "x")
    router.count_call("c", "x")
    assert router.score("b", "x", 0.0) == (0, pytest.approx(0.5))
    full = Server({**SIZES, "d": 1}, 3).record(0.0)
    router.observe({"x": full, "y": full}, 5.0)
    for name in SIZES:
        router.count_call(name, "x")
    assert router.score("d", "y", 2.0) < router.score("d", "x", 0.0), "nothing has to go for it"


def test_a_server_that_was_started_anew_counts_from_the_start() -> None:
    """`a` keeps it busy all the time, so that the other one is to have it, too."""
    router, first, second = LivePlacement(), Server({"a": 1}, 1), Server({"a": 1}, 1)
    first.seconds["a"], first.ready = 0.1, ["a"]
    changes: dict[str, frozenset[str]] = {}
    for now_s, ended in ((0.0, 1000), (5.0, 1050), (10.0, 50), (15.0, 100)):
        first.ended["a"] = ended
        changes = router.observe({"x": first.record(now_s), "y": second.record(now_s)}, now_s)
        assert bool(changes) == (now_s > 0.0)
    assert changes == {"y": {"a"}}
