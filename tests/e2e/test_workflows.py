"""Workflows over a router, a worker and a node server, beside an interpreter in this process."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from maskserve_client.client import Client
from maskserve_core.config import LimitsConfig
from maskserve_core.config_file import config_of
from maskserve_core.workflows.definition import Workflow, each, repeat
from maskserve_core.workflows.nodes import (
    NODE_TYPES,
    best,
    edit,
    enlarge,
    find,
    invert,
    outline,
    shows,
    split,
)
from maskserve_core.workflows.passes import compiled
from maskserve_core.workflows.pictures import PictureNodes, encode_mask
from maskserve_core.workflows.plan import NodeCall, WorkflowPlan, dump_plan
from maskserve_core.workflows.run import seed_of
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.fakes.pictures import encode, scene
from tests.support.eventually import eventually
from tests.support.workflows import interpret

SIDE = 64
SOURCE = encode(scene(SIDE, SIDE))
STEPS, SEED = 4, 11


def two_regions() -> bytes:
    mask = np.zeros((SIDE, SIDE), np.bool_)
    mask[4:20, 4:20] = mask[40:60, 40:60] = True
    return encode_mask(mask)


def plans() -> list[WorkflowPlan]:
    """Workflows of every kind of node and loop."""
    with Workflow("regions", "Each region by itself.") as regions:
        image, prompt = regions.picture("image"), regions.text("prompt")
        with each(split(regions.mask("mask")), most=4, carry=image) as one:
            one.carried = edit(one.picture, one.mask, prompt)
        regions.gives(image=one.carried)
    with Workflow("tries", "Until one will do.") as tries:
        image, mask = tries.picture("image"), tries.mask("mask")
        with repeat(most=2) as again:
            with each(2) as one:
                made = edit(image, mask, "a red star")
                pictures = one.all(made)
                verdicts = one.all(shows(made, mask, "a red star", enough=1.0))
            chosen = best(pictures, verdicts)
            again.until(chosen.verdict)
            picture, verdict = again.best(chosen.picture), again.best(chosen.verdict)
        tries.gives(image=enlarge(picture), verdict=verdict)
    with Workflow("named", "What is found, or not.") as named:
        image = named.picture("image")
        found = find(image, named.text("name"), threshold=1.0)
        named.gives(image=edit(outline(image), invert(found), "a star"))
    return [compiled(flow.plan) for flow in (regions, tries, named)]


class Site:
    """What serves."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        assert supervisor.router is not None
        self.url = supervisor.router.grpc_url

    def run(self, workflow: str, **inputs: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Outputs and META of a workflow, by an unmodified client."""
        settings = {"num_inference_steps": STEPS, "seed": SEED, **inputs.pop("settings", {})}
        given = {**inputs, "settings": json.dumps(settings)}
        with grpcclient.InferenceServerClient(self.url) as client:
            tensors = []
            for key, value in given.items():
                raw = value.encode() if isinstance(value, str) else value
                tensor = grpcclient.InferInput(key.upper(), [1], "BYTES")
                tensor.set_data_from_numpy(np.array([raw], np.object_))
                tensors.append(tensor)
            answer = client.infer(workflow, tensors)
        found = {each.name: answer.as_numpy(each.name)[0] for each in answer.get_response().outputs}
        return found, json.loads(found.pop("META"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans, and models of nodes."""
    folder = tmp_path_factory.mktemp("workflows")
    from tests.fakes.tiny_nodes import build_enlarge, build_find

    build_find(folder / "find")
    build_enlarge(folder / "big")
    (folder / "nodes.toml").write_text(
        f'[model]\ndevice = "cpu"\ntorch_threads = 1\n[nodes]\nfind = "{folder / "find"}"\n'
        f'enlarge = "{folder / "big"}"\n'
    )
    for plan in plans():
        (folder / f"{plan.name}.json").write_bytes(dump_plan(plan))
    return folder


@pytest.fixture(scope="module")
def site(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    base = free_base_port(2)
    options = ServeOptions(
        model=str(model),
        base_port=base,
        router=True,
        router_port=base + 10,
        nodes=folder / "nodes.toml",
        workflows=folder,
        log_dir=tmp_path_factory.mktemp("workflow-logs"),
    )
    with Supervisor(options) as supervisor:
        yield Site(supervisor)


class InProcess:
    """Nodes called one by one: edits at the worker, the others here."""

    def __init__(self, site: Site, folder: Path) -> None:
        from maskserve_engine.nodes.enlarge import EnlargeNodes
        from maskserve_engine.nodes.find import FindNodes

        config = config_of(
            {
                "model": {"device": "cpu", "torch_threads": 1},
                "nodes": {"find": str(folder / "find"), "enlarge": str(folder / "big")},
            }
        )
        self._nodes: dict[str, Any] = {
            "pictures": PictureNodes(LimitsConfig()),
            "find": FindNodes(config),
            "enlarge": EnlargeNodes(config),
        }
        self._url = site.supervisor.workers[0].grpc_url

    def __call__(self, key: str, call: NodeCall, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = NODE_TYPES[call.node]
        if call.node == "edit":
            own = {name: value for name, value in call.settings.items() if name != "cache"}
            with Client(self._url) as client:
                made = client.edit(
                    inputs["image"],
                    inputs["mask"],
                    inputs["prompt"],
                    num_inference_steps=STEPS,
                    seed=seed_of(SEED, key),
                    reproducible=True,
                    **own,
                )
            return {"picture": made.encoded}
        table: Any = kind.settings(**call.settings)
        settings = {name: getattr(table, name) for name in kind.settings.__struct_fields__}
        made_here: Mapping[str, Any] = self._nodes[kind.model].run(call.node, inputs, settings)
        return made_here


def test_a_run_gives_the_bytes_of_an_interpreter_in_process(site: Site, folder: Path) -> None:
    node = InProcess(site, folder)
    by_name = {plan.name: plan for plan in plans()}
    exact = {"settings": {"reproducible": True}}
    asked = {"image": SOURCE, "mask": two_regions(), "prompt": "a red star"}
    found, meta = site.run("regions", **asked, **exact)
    assert found == {"IMAGE": interpret(by_name["regions"], asked, node)["image"]}
    keys = [told["key"] for told in meta["nodes"]]
    assert sorted(keys) == [
        "each-1/compose[0]", "each-1[0]/edit-1", "each-1[1]/edit-1", "split-1",
    ]  # fmt: skip
    assert (meta["workflow"], meta["digest"]) == ("regions", by_name["regions"].digest)
    asked = {"image": SOURCE, "mask": two_regions()}
    found, meta = site.run("tries", **asked, **exact)
    expected = interpret(by_name["tries"], asked, node)
    assert found["IMAGE"] == expected["image"]
    verdict = json.loads(found["VERDICT"])
    assert verdict == {"score": expected["verdict"].score, "passed": expected["verdict"].passed}


def test_a_workflow_is_a_model_of_its_name(site: Site) -> None:
    with grpcclient.InferenceServerClient(site.url) as client:
        assert client.is_model_ready("regions")
        told = client.get_model_metadata("regions", as_json=True)
        assert [each["name"] for each in told["inputs"]] == ["IMAGE", "PROMPT", "MASK", "SETTINGS"]
        assert [each["name"] for each in told["outputs"]] == ["IMAGE", "META"]
        config = client.get_model_config("regions", as_json=True)["config"]
        assert config["platform"] == "maskserve_workflow"
    assert site.supervisor.router is not None
    with urllib.request.urlopen(f"{site.supervisor.router.http_url}/v1/workflows") as answer:
        listed = {each["name"]: each for each in json.load(answer)["data"]}
    assert set(listed) == {"regions", "tries", "named"}
    assert all(len(where) == 1 for where in listed["tries"]["hosts"].values())
    assert set(listed["tries"]["hosts"]) == {"enlarge", "find", "pictures"}


@pytest.mark.parametrize(
    ("workflow", "inputs", "words"),
    [
        ("named", {"image": SOURCE, "name": "a boat"}, "find-1: name: 'a boat' is not found"),
        ("regions", {"image": SOURCE, "mask": two_regions()}, "PROMPT: is missing"),
        ("regions", {"image": b"no", "mask": b"no", "prompt": "a"}, "split-1: mask: "),
        ("nothing", {"image": SOURCE}, "there is no model 'nothing'; accepted: edit, "),
        (
            "named",
            {"image": SOURCE, "name": "a", "settings": {"steps": 3}},
            "SETTINGS.steps: ",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(
    site: Site, workflow: str, inputs: dict[str, Any], words: str
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        site.run(workflow, **inputs)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_openais_client_names_a_workflow_as_its_model(site: Site) -> None:
    assert site.supervisor.router is not None
    base = f"http://127.0.0.1:{site.supervisor.router.ports.http}/v1"
    asked = {"seed": SEED, "num_inference_steps": STEPS, "mask_mode": "white"}
    expected, _ = site.run("tries", image=SOURCE, mask=two_regions())
    with openai.OpenAI(base_url=base, api_key="any") as client:
        assert "tries" in {each.id for each in client.models.list().data}
        answer = client.images.edit(
            model="tries", image=("a.png", SOURCE), mask=("m.png", two_regions()), prompt="",
            extra_body=asked,
        )  # fmt: skip
        assert answer.data is not None
        assert base64.b64decode(answer.data[0].b64_json or "") == expected["IMAGE"]
        (meta,) = answer.model_extra["maskserve"]
        assert meta["workflow"] == "tries"
        assert meta["outputs"]["verdict"] == json.loads(expected["VERDICT"])
        with pytest.raises(openai.BadRequestError, match="name: is missing"):
            client.images.edit(model="named", image=("a.png", SOURCE), prompt="a star")


def test_a_cancel_by_id_ends_all_nodes(site: Site) -> None:
    failed: list[str] = []
    asked = {"request_id": "withdrawn", "num_inference_steps": 200}

    def run() -> None:
        try:
            site.run("tries", image=SOURCE, mask=two_regions(), settings=asked)
        except InferenceServerException as error:
            failed.append(str(error))

    running = threading.Thread(target=run)
    running.start()
    with Client(site.supervisor.workers[0].grpc_url) as worker, Client(site.url) as client:
        eventually("edits run", lambda: bool(worker.control("status")["running"]))
        assert client.cancel("withdrawn")
        running.join(30)
        assert failed
        assert "CANCELLED" in failed[0]
        eventually("the rows are free", lambda: not worker.control("status")["running"])


def test_nodes_of_a_server_that_was_killed_run_again(site: Site) -> None:
    asked = {"image": SOURCE, "mask": two_regions(), "settings": {"reproducible": True}}
    expected, _ = site.run("tries", **asked)
    [server] = site.supervisor.services
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    found, meta = site.run("tries", **asked)
    assert found == expected
    assert max(told["tries"] for told in meta["nodes"]) > 1
