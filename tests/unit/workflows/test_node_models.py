"""A node server's models: loaded at need, one at a time, within a budget, and drained first."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maskserve_common.config import ConfigError
from maskserve_common.config_file import config_of
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_workflows.node_folders import revision_of
from maskserve_workflows.node_models import NodeModels
from maskserve_workflows.node_request import ModelSetup, NodeRequest, Nodes, one_by_one
from maskserve_workflows.node_types import NodeModel
from maskserve_workflows.nodes import NODE_FILES
from tests.support.eventually import eventually

KINDS = {"find": "clipseg", "enlarge": "swin2sr"}


def write_folder(path: Path, text: str) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(text)
    (path / "model.safetensors").write_bytes(bytes(100))


class Server:
    """Models of 100 bytes each, whose loads and calls the test lets go on."""

    def __init__(
        self,
        tmp_path: Path,
        device_bytes: int = 250,
        load: str = "use",
        kinds: Mapping[str, str] = KINDS,
    ) -> None:
        self.loads: list[str] = []
        self.loading = 0
        self.ran: list[list[str]] = []
        self.may_load, self.may_run = threading.Event(), threading.Event()
        self.broken: set[str] = set()
        for name, kind in kinds.items():
            write_folder(tmp_path / name, json.dumps({"model_type": kind}))
        nodes = {name: str(tmp_path / name) for name in kinds}
        config = config_of({"nodes": {**nodes, "device_bytes": device_bytes, "load": load}})
        self.models = NodeModels(config, self._open)
        self.results: dict[str, Any] = {}

    def _open(self, model: NodeModel, setup: ModelSetup) -> Nodes:
        name = model.name
        if name == "pictures":
            return self._Nodes(self)
        assert not self.loading, "two are loaded at once"
        self.loading += 1
        self.loads.append(name)
        try:
            assert self.may_load.wait(10)
            if name in self.broken:
                raise ValueError("has no weights")
        finally:
            self.loading -= 1
        return self._Nodes(self)

    class _Nodes:
        def __init__(self, server: Server) -> None:
            self._server = server

        def run(self, calls: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
            assert self._server.may_run.wait(10)
            self._server.ran.append([call.settings["name"] for call in calls])
            return one_by_one(self._run, calls)

        def _run(self, request: NodeRequest) -> dict[str, Any]:
            if request.settings["name"] == "bad":
                raise InvalidRequest("name", "is bad")
            return {"said": request.settings["name"]}

    def call(self, model: str, name: str) -> None:
        def done(result: Any, seconds: float) -> None:
            self.results[name] = result

        self.models.call(model, NodeRequest(model, {}, {"name": name}), done)

    def states(self) -> dict[str, tuple[str, int]]:
        records = self.models.record()["models"]
        return {record["name"]: (record["state"], record["queue"]) for record in records}

    def load_s(self) -> float:
        """Seconds of a load of `find`."""
        [load_seconds] = [
            x["load_s"] for x in self.models.record()["models"] if x["name"] == "find"
        ]
        return float(load_seconds)

    def wait(self, *names: str) -> None:
        eventually("they are answered", lambda: set(names) <= set(self.results))


def test_models_are_loaded_at_first_use_one_at_a_time(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.states()["find"] == ("absent", 0)
    server.call("find", "a")
    server.call("enlarge", "b")
    eventually("one loads", lambda: server.loads == ["find"])
    assert server.states()["find"] == ("loading", 1)
    assert server.states()["enlarge"] == ("loading", 1)
    server.may_load.set()
    server.may_run.set()
    server.wait("a", "b")
    assert (server.loads, server.results) == (
        ["find", "enlarge"], {"a": {"said": "a"}, "b": {"said": "b"}},
    )  # fmt: skip
    eventually("none waits", lambda: set(server.states().values()) == {("ready", 0)})
    server.models.close()


def test_calls_that_came_meanwhile_share_one(tmp_path: Path) -> None:
    server = Server(tmp_path, load="start")
    server.may_load.set()
    eventually("they are there", lambda: sorted(server.loads) == ["enlarge", "find"])
    for name in ("a", "b", "bad", "c"):
        server.call("find", name)
    server.may_run.set()
    server.wait("a", "b", "bad", "c")
    assert len(server.ran) <= 2  # those that had come as its thread began, and all others
    assert isinstance(server.results.pop("bad"), InvalidRequest)
    assert server.results == {name: {"said": name} for name in "abc"}
    server.models.close()


def test_what_has_to_go_drains_first(tmp_path: Path) -> None:
    """Calls behind the one that waits for room wait, too: else the loaded one would never go."""
    server = Server(tmp_path, device_bytes=150)
    server.may_load.set()
    server.call("find", "a")
    eventually("it is there", lambda: server.states()["find"] == ("ready", 1))
    server.call("enlarge", "b")
    server.call("find", "c")
    assert server.states() == {
        "pictures": ("ready", 0),
        "find": ("ready", 2),
        "enlarge": ("absent", 1),
    }
    assert server.loads == ["find"]
    server.may_run.set()
    server.wait("a", "b", "c")
    assert server.loads == ["find", "enlarge", "find"]
    assert server.ran == [["a"], ["b"], ["c"]]
    server.models.close()


def test_what_cannot_be_loaded_is_told_and_others_go_on(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.may_load.set()
    server.may_run.set()
    server.broken.add("find")
    server.call("find", "a")
    server.call("enlarge", "b")
    server.wait("a", "b")
    assert isinstance(server.results["a"], EngineFailed)
    assert "model find has no weights" in str(server.results["a"])
    assert server.results["b"] == {"said": "b"}
    server.broken.clear()
    server.call("find", "c")  # it is tried again
    server.wait("c")
    assert server.results["c"] == {"said": "c"}
    server.models.close()


def test_a_model_that_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    server = Server(tmp_path, device_bytes=99)
    server.call("find", "a")
    server.wait("a")
    with pytest.raises(EngineFailed, match="model find has 100 bytes, and there is room for 99"):
        raise server.results["a"]
    assert server.loads == []
    server.models.close()


def test_what_a_model_needs_is_loaded_once_and_beside_it(tmp_path: Path) -> None:
    """A GroundingDINO had a SAM of its own beside the one that is served."""
    kinds = {"find": "grounding-dino", "segment": "sam", "enlarge": "swin2sr"}
    server = Server(tmp_path, device_bytes=200, kinds=kinds)
    server.may_load.set()
    server.may_run.set()
    server.call("find", "a")
    server.wait("a")
    server.call("segment", "b")
    server.wait("b")
    assert sorted(server.loads) == ["find", "segment"]
    assert sum(record["bytes"] for record in server.models.record()["models"]) == 300
    server.call("enlarge", "c")
    server.wait("c")
    server.call("find", "d")
    server.wait("d")
    assert server.loads[2:] in (["enlarge", "find"], ["enlarge", "segment"])
    server.models.close()
    small = Server(tmp_path, device_bytes=150, kinds=kinds)
    small.call("find", "a")
    small.wait("a")
    with pytest.raises(
        EngineFailed, match="find and segment has 200 bytes, and there is room for 15"
    ):
        raise small.results["a"]
    assert small.loads == []
    small.models.close()


def test_a_revision_tells_weights_and_code_apart(tmp_path: Path) -> None:
    model = NODE_FILES.classes("find")[0]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_folder(folder, "{}")
    first, copy = (revision_of(model, str(folder)) for folder in folders)
    assert first == copy == revision_of(model, str(folders[0])) != revision_of(model)
    server = Server(tmp_path)
    records = {record["name"]: record for record in server.models.record()["models"]}
    assert records["find"]["revision"] != records["enlarge"]["revision"]
    (folders[1] / "model.safetensors").write_bytes(bytes(99) + b"x")
    assert revision_of(model, str(folders[1])) != first
    code = tmp_path / "find.py"
    code.write_text("other code")
    assert revision_of(replace(model, file=str(code)), str(folders[0])) != first


def test_what_is_placed_is_loaded_and_what_nothing_needs_goes(tmp_path: Path) -> None:
    server = Server(tmp_path, device_bytes=150)
    server.may_load.set()
    server.models.place(["find", "boat"])
    eventually("it is there", lambda: server.states()["find"] == ("ready", 0))
    server.models.place(["find"])
    assert server.loads == ["find"]
    server.call("find", "a")
    server.models.place(["enlarge"])  # a call runs
    assert server.states()["find"] == ("ready", 1)
    assert server.states()["enlarge"] == ("absent", 0), "nothing waits for it"
    server.may_run.set()
    server.wait("a")
    eventually("it has ended", lambda: server.states()["find"] == ("ready", 0))
    server.models.place(["enlarge"])
    eventually("it is there", lambda: server.states()["enlarge"] == ("ready", 0))
    assert server.states()["find"] == ("absent", 0)
    server.models.place([])
    assert server.states()["enlarge"] == ("absent", 0)
    server.call("enlarge", "b")  # it is loaded again
    server.wait("b")
    assert server.loads == ["find", "enlarge", "enlarge"]
    server.models.close()


def test_what_is_placed_is_loaded_with_what_it_needs(tmp_path: Path) -> None:
    kinds = {"find": "grounding-dino", "segment": "sam", "enlarge": "swin2sr"}
    server = Server(tmp_path, device_bytes=200, kinds=kinds)
    server.may_load.set()
    guess = server.load_s()
    server.models.place(["enlarge", "find"])
    eventually("one is there", lambda: server.states()["enlarge"] == ("ready", 0))
    assert server.loads == ["enlarge"], "there is no room for the other"
    server.models.place(["find"])
    eventually("it is there", lambda: server.states()["find"] == ("ready", 0))
    assert sorted(server.loads) == ["enlarge", "find", "segment"]
    records_by_name = {record["name"]: record for record in server.models.record()["models"]}
    assert {name: record["needs_bytes"] for name, record in records_by_name.items()} == {
        "pictures": 0, "find": 200, "segment": 100, "enlarge": 100,
    }  # fmt: skip
    assert server.load_s() != guess, "it is measured"
    server.models.place(["find"])
    assert server.states()["segment"] == ("ready", 0), "`find` needs it"
    server.models.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "bert"}', "nodes.find: .* is a bert; accepted: clipseg, grounding-dino"),
        ('{"model_type": "grounding-dino"}', "nodes.find: a grounding-dino needs nodes.segment"),
        ("no", "nodes.find: .*config.json is not valid JSON"),
        (None, "nodes.find: cannot read .*config.json: No such file"),
    ],
)
def test_a_folder_of_another_class_is_told_at_start(
    tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        write_folder(tmp_path, text)
    config = config_of({"nodes": {"find": str(tmp_path)}})
    with pytest.raises(ConfigError, match=words):
        NodeModels(config, lambda model, setup: pytest.fail("it is loaded"))
