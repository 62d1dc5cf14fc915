"""Workflows over a router, two workers and a node server, beside an interpreter in this process."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import queue
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
from PIL import Image
from tritonclient.utils import InferenceServerException

from maskserve_benchmarks.router_site import RouterSite
from maskserve_client.client import Client
from maskserve_client.masks import Masks
from maskserve_common.config import ValuesConfig
from maskserve_common.config_file import config_of
from maskserve_common.contracts.keys import TEMPLATE_ID
from maskserve_common.errors import InvalidRequest, MaskserveError, TemplateNotFound
from maskserve_common.files.store import listed, size_of
from maskserve_common.files.values import Values
from maskserve_serving.supervisor import Supervisor
from maskserve_workflows.folder import read_plans
from maskserve_workflows.node_request import ModelSetup
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.pictures import encode_mask
from maskserve_workflows.plan import NodeCall
from maskserve_workflows.ports import WorkflowError
from maskserve_workflows.run import seed_of
from tests.fakes.pictures import encode, scene
from tests.support.draws import fresh_rng, fresh_seed
from tests.support.eventually import eventually
from tests.support.workflows import DRAWN, interpret, plans_of_every_kind, run_one

SIDE = 64
SOURCE = encode(scene(SIDE, SIDE))
STEPS, SEED = 4, 11
_KEPT = "unscoped-kept"
"""How the names begin under which routers keep answers for later runs."""


def two_regions() -> bytes:
    mask = np.zeros((SIDE, SIDE), np.bool_)
    mask[4:20, 4:20] = mask[40:60, 40:60] = True
    return encode_mask(mask)


class Site:
    """A router, its worker and its node servers."""

    def __init__(self, supervisor: Supervisor, url: str = "") -> None:
        self.supervisor = supervisor
        assert supervisor.router is not None
        self.url = url or supervisor.router.grpc_url
        """URL of the router that gets the requests."""

    def run(self, workflow: str, **inputs: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Outputs and META of a workflow, by an unmodified client."""
        with grpcclient.InferenceServerClient(self.url) as client:
            return read(client.infer(workflow, tensors(inputs)))

    def stream(
        self, workflow: str, **inputs: Any
    ) -> Iterator[tuple[dict[str, bytes], dict[str, Any]]]:
        """The same of every event of its stream."""
        heard: queue.Queue[Any] = queue.Queue()
        with grpcclient.InferenceServerClient(self.url) as client:
            client.start_stream(lambda result, error: heard.put(error or result))
            client.async_stream_infer(workflow, tensors(inputs))
            while True:
                answer = heard.get(timeout=300)
                if isinstance(answer, InferenceServerException):
                    raise answer
                outputs, meta = read(answer)
                yield outputs, meta
                if meta["event"] == "final":
                    return

    def kill(self, victim: str) -> None:
        """The node server, or a worker that has an edit of a run."""
        process: Any = self.supervisor.services[-1]
        if victim == "worker":
            running = [x for x in self.supervisor.workers if status(x.grpc_url)["running"]]
            process = (running or self.supervisor.workers)[0]
        os.kill(process.pid, signal.SIGKILL)

    @property
    def values(self) -> Path:
        """Their folder."""
        return self.supervisor.workers[0].spec.files.values

    def runs(self) -> set[Path]:
        """Folders of all runs that have not ended, each with an empty file for each value."""
        return set(listed(self.values / ".open"))

    def idle(self) -> bool:
        """Whether no worker has an edit, and the node server no call."""
        statuses = [status(worker.grpc_url) for worker in self.supervisor.workers]
        [nodes] = status(self.url)["nodes"].values()
        return not (
            any(
                record["in_flight"] or record["running"] or record["waiting"] for record in statuses
            )
            or any(record["queue"] for record in nodes["models"])
        )

    def value_files(self) -> list[Path]:
        """Those that lie there now."""
        return [path for path in self.values.iterdir() if TEMPLATE_ID.fullmatch(path.name)]

    def lose(self) -> int:
        """All that lie there now go, under whoever reads them; how many."""
        files = self.value_files()
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def whole(self) -> bool:
        """Whether all that were killed are back."""
        with Client(self.url) as client:
            workers = client.control("status")["workers"].values()
        return all(worker["up"] and worker["state"] == "ready" for worker in workers)


def status(url: str) -> dict[str, Any]:
    with Client(url) as client:
        return client.control("status")


def tensors(inputs: dict[str, Any]) -> list[Any]:
    """Tensors of a request, its settings over those of all tests."""
    settings = {"num_inference_steps": STEPS, "seed": SEED, **inputs.get("settings", {})}
    infer_inputs = []
    for key, value in {**inputs, "settings": json.dumps(settings)}.items():
        raw = value.encode() if isinstance(value, str) else value
        tensor = grpcclient.InferInput(key.upper(), [1], "BYTES")
        tensor.set_data_from_numpy(np.array([raw], np.object_))
        infer_inputs.append(tensor)
    return infer_inputs


def read(answer: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    outputs = {
        output.name: answer.as_numpy(output.name)[0] for output in answer.get_response().outputs
    }
    return outputs, json.loads(outputs.pop("META"))


@pytest.fixture(scope="module")
def site(pair: Supervisor) -> Site:
    return Site(pair)


@pytest.fixture(scope="module")
def folder(workflows: Path) -> Path:
    """Plans, and models of nodes."""
    return workflows


class InProcess:
    """Nodes called one by one: edits at the worker, the others here."""

    def __init__(self, site: Site, folder: Path, seed: int = SEED) -> None:
        from maskserve_engine.nodes.enlarge import EnlargeNodes
        from maskserve_engine.nodes.find import FindNodes
        from maskserve_engine.nodes.pictures import PictureNodes

        config = config_of(
            {
                "model": {"device": "cpu", "torch_threads": 1},
            }
        )
        self._nodes: dict[str, Any] = {
            "pictures": PictureNodes(ModelSetup("", config)),
            "find": FindNodes(ModelSetup(str(folder / "find"), config)),
            "enlarge": EnlargeNodes(ModelSetup(str(folder / "big"), config)),
        }
        self._url, self._seed = site.url, seed

    def __call__(self, key: str, call: NodeCall, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = NODE_TYPES[call.node]
        if call.node == "encode":
            return {"encoding": None}
        if call.node == "edit":
            edit_settings = {
                name: value for name, value in call.settings.items() if name != "cache"
            }
            with Client(self._url) as client:
                result = client.edit(
                    inputs["image"],
                    inputs["mask"],
                    inputs["prompt"],
                    num_inference_steps=STEPS,
                    reproducible=True,
                    **{"seed": seed_of(self._seed, key), **edit_settings},
                )
            return {"picture": result.encoded}
        table: Any = kind.settings(**call.settings)
        settings = {name: getattr(table, name) for name in kind.settings.__struct_fields__}
        return run_one(self._nodes[kind.model], call.node, inputs, settings)


def test_a_run_gives_the_bytes_of_an_interpreter_in_process(site: Site, folder: Path) -> None:
    node = InProcess(site, folder)
    by_name = {plan.name: plan for plan in plans_of_every_kind()}
    exact = {"settings": {"reproducible": True}}
    inputs = {"image": SOURCE, "mask": two_regions(), "prompt": "a red star"}
    outputs, meta = site.run("regions", **inputs, **exact)
    assert outputs == {"IMAGE": interpret(by_name["regions"], inputs, node)["image"]}
    keys = [node_record["key"] for node_record in meta["nodes"]]
    assert sorted(keys) == [
        "each-1/compose[0]", "each-1[0]/edit-1", "each-1[1]/edit-1", "split-1",
    ]  # fmt: skip
    assert meta["values"]["count"] == 2 + 2 + 2 + 1  # inputs, regions, edits, and both in one
    assert (meta["workflow"], meta["digest"]) == ("regions", by_name["regions"].digest)
    inputs = {"image": SOURCE, "mask": two_regions()}
    outputs, meta = site.run("tries", **inputs, **exact)
    expected = interpret(by_name["tries"], inputs, node)
    assert outputs["IMAGE"] == expected["image"]
    [encode] = [x for x in meta["nodes"] if x["node"] == "encode"]
    assert {"template", "prompt"} <= encode["encoded"].keys()
    of_edits = [x["encoded"] for x in meta["nodes"] if x["node"] == "edit"]
    assert {(x["template"], x["prompt"]) for x in of_edits} == {("kept", "kept")}
    verdict = json.loads(outputs["VERDICT"])
    assert verdict == {"score": expected["verdict"].score, "passed": expected["verdict"].passed}


def test_a_workflow_is_a_model_of_its_name(site: Site) -> None:
    with grpcclient.InferenceServerClient(site.url) as client:
        assert client.is_model_ready("regions")
        metadata = client.get_model_metadata("regions", as_json=True)
        assert [entry["name"] for entry in metadata["inputs"]] == [
            "IMAGE",
            "PROMPT",
            "MASK",
            "SETTINGS",
        ]
        assert [entry["name"] for entry in metadata["outputs"]] == ["IMAGE", "META"]
        config = client.get_model_config("regions", as_json=True)["config"]
        assert config["platform"] == "maskserve_workflow"
    assert site.supervisor.router is not None
    with urllib.request.urlopen(f"{site.supervisor.router.http_url}/v1/workflows") as answer:
        listed = {entry["name"]: entry for entry in json.load(answer)["data"]}
    assert {"regions", "tries", "named"} < set(listed)
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


def test_a_run_that_cannot_be_in_time_is_refused_at_once(site: Site) -> None:
    inputs = {"image": SOURCE, "mask": two_regions(), "prompt": "a red star"}
    outputs, _ = site.run("regions", **inputs, settings={"deadline_ms": 600_000})
    assert outputs["IMAGE"]
    with pytest.raises(InferenceServerException) as refused:
        site.run("regions", **inputs, settings={"deadline_ms": 1})
    assert "0.0 s are too short for regions, which takes about" in str(refused.value)


def test_openais_client_names_a_workflow_as_its_model(site: Site) -> None:
    assert site.supervisor.router is not None
    base = f"http://127.0.0.1:{site.supervisor.router.ports.http}/v1"
    extra_body = {"seed": SEED, "num_inference_steps": STEPS, "mask_mode": "white"}
    expected, _ = site.run("tries", image=SOURCE, mask=two_regions())
    with openai.OpenAI(base_url=base, api_key="any") as client:
        assert "tries" in {model.id for model in client.models.list().data}
        answer = client.images.edit(
            model="tries", image=("a.png", SOURCE), mask=("m.png", two_regions()), prompt="",
            extra_body=extra_body,
        )  # fmt: skip
        assert answer.data is not None
        assert base64.b64decode(answer.data[0].b64_json or "") == expected["IMAGE"]
        (meta,) = answer.model_extra["maskserve"]
        assert meta["workflow"] == "tries"
        assert meta["outputs"]["verdict"] == json.loads(expected["VERDICT"])
        with pytest.raises(openai.BadRequestError, match="name: is missing"):
            client.images.edit(model="named", image=("a.png", SOURCE), prompt="a star")


def test_the_status_says_who_hosts_what(site: Site) -> None:
    site.run("tries", image=SOURCE, mask=two_regions())
    [record] = status(site.url)["nodes"].values()
    models = {model["name"]: model for model in record["models"] if model["name"] != "segment"}
    assert {name: model["state"] for name, model in models.items()} == dict.fromkeys(
        ("pictures", "find", "enlarge"), "ready"
    )
    assert models["find"]["bytes"] > 0
    assert models["enlarge"]["ended"] >= 1
    assert record["device_bytes"] == 8 * 2**30

    def agree() -> bool:
        """The run is answered before its files are gone; workers are asked now and then."""
        status_record, files = status(site.url), site.value_files()
        [host_values], [record] = status_record["values"], status_record["nodes"].values()
        size = sum(map(size_of, files))  # one may go meanwhile
        return host_values == record["values"] and (host_values["count"], host_values["bytes"]) == (
            len(files),
            size,
        )

    eventually("all say what lies there", agree)
    assert status(site.url)["values"][0]["count"] > 0  # what nodes gave is kept for the next run


def test_a_sam_2_masks_what_is_clicked_on(site: Site, folder: Path) -> None:
    """A folder as the hub has it, at a real node server; what it says lies in tests/unit."""
    from maskserve_engine.nodes.segment import SegmentNodes

    assert site.supervisor.router is not None
    url = f"http://127.0.0.1:{site.supervisor.router.ports.http}"
    clicked: dict[str, Any] = {"points": [[40, 40, 1], [3, 3, 0]], "box": [8, 8, 60, 60]}
    config = config_of({"model": {"device": "cpu"}})
    nodes = SegmentNodes(ModelSetup(str(folder / "segment"), config))
    mask_result = Masks(url).find(SOURCE, **clicked)
    mask, score = nodes.find_mask(scene(SIDE, SIDE), clicked["points"], clicked["box"])
    # White in the answer, where its alpha is 0, too.
    white, alpha = (
        np.asarray(Image.open(io.BytesIO(mask_result.mask)).getchannel(n)) for n in "LA"
    )
    assert np.array_equal(white, np.where(mask, 255, 0))
    assert np.array_equal(alpha, np.where(mask, 0, 255))
    assert mask_result.score == pytest.approx(score, abs=1e-3)
    settings: dict[str, Any] = {"seed": SEED, "num_inference_steps": STEPS, "cache": "off"}
    refused = pytest.raises(InvalidRequest, match="mask_from: is given, and a worker finds no")
    with Client(site.supervisor.workers[0].grpc_url) as worker, refused:
        worker.edit(SOURCE, None, "a red star", mask_from=clicked, **settings)


def test_a_job_may_be_a_workflow(site: Site) -> None:
    assert site.supervisor.router is not None
    url = f"http://127.0.0.1:{site.supervisor.router.ports.http}/v1"
    job_fields = {"model": "tries", "prompt": "", "seed": SEED, "num_inference_steps": STEPS}
    expected, _ = site.run("tries", image=SOURCE, mask=two_regions())
    files = {"image": ("a.png", SOURCE), "mask": ("m.png", two_regions())}
    with httpx.Client(base_url=url, timeout=60) as client:
        response = client.post("/jobs", data={**job_fields, "mask_mode": "white"}, files=files)
        assert response.status_code == 202, response.text
        name = response.json()["id"]

        def job_record() -> Any:
            return client.get(f"/jobs/{name}").json()

        eventually("it has ended", lambda: job_record()["status"] not in ("queued", "running"))
        result = job_record()["result"]
        assert base64.b64decode(result["data"][0]["b64_json"]) == expected["IMAGE"]
        assert result["maskserve"][0]["outputs"]["verdict"] == json.loads(expected["VERDICT"])
        assert client.delete(f"/jobs/{name}").json()["deleted"]


def test_a_cancel_by_id_ends_all_nodes(site: Site) -> None:
    failed: list[str] = []
    settings = {"request_id": "withdrawn", "num_inference_steps": 200}

    def run() -> None:
        try:
            site.run("tries", image=SOURCE, mask=two_regions(), settings=settings)
        except InferenceServerException as error:
            failed.append(str(error))

    running = threading.Thread(target=run)
    running.start()

    def busy() -> bool:
        return any(status(worker.grpc_url)["running"] for worker in site.supervisor.workers)

    with Client(site.url) as client:
        eventually("edits run", busy)
        assert client.cancel("withdrawn")
        running.join(30)
        assert failed
        assert "CANCELLED" in failed[0]
        eventually("the rows are free", lambda: not busy())


def test_a_stream_has_an_event_per_node_and_the_edits_own(site: Site) -> None:
    inputs = {"image": SOURCE, "mask": two_regions(), "prompt": "a red star"}
    events = list(site.stream("regions", **inputs, settings={"progress": True, "preview_every": 1}))
    metas = [meta for _, meta in events]
    assert [meta["event"] for meta in metas].count("node") == 4
    passing = {x["key"] for x in metas if x["event"] in ("progress", "preview")}
    assert passing == {"each-1[0]/edit-1", "each-1[1]/edit-1"}
    previews = [outputs["IMAGE"] for outputs, meta in events if meta["event"] == "preview"]
    assert previews
    assert all(picture.startswith(b"\x89PNG") for picture in previews)
    assert metas[-1]["event"] == "final"
    assert metas[-1]["outputs"] == {"image": "picture"}


def test_equal_nodes_of_one_run_after_the_other_are_run_once(site: Site) -> None:
    inputs = {"image": SOURCE, "mask": two_regions()}
    for prompt in ("a red star", "a blue heart"):
        _, meta = site.run("regions", **inputs, prompt=prompt, settings={"seed": 77})
    assert {
        node_record["key"]: node_record["kept"]
        for node_record in meta["nodes"]
        if "kept" in node_record
    } == {
        "split-1": True,
        "each-1/compose[0]": False,
    }


def moments(count: int) -> list[Any]:
    """Each server to kill, and after how many events of the run; None: the test draws the number,
    as processes that share the tests have to collect the same cases.
    """
    # Of a lost worker: tests/unit/router/test_router_faults.py, and test_serve.py kills a real one.
    few = [("nodes", 3), pytest.param("worker", 2, marks=pytest.mark.slow)]
    more = [
        pytest.param(
            ("nodes", "worker")[number % 2], None, id=f"drawn-{number}", marks=pytest.mark.slow
        )
        for number in range(count)
    ]
    return [*few, *more]


@pytest.mark.parametrize(("victim", "after"), moments(18))
def test_what_a_killed_server_had_alone_runs_again(
    site: Site, folder: Path, victim: str, after: int | None
) -> None:
    rng = fresh_rng()
    after = after or int(rng.integers(1, 20))
    [plan] = [plan for plan in plans_of_every_kind() if plan.name == "tries"]
    inputs = {"image": SOURCE, "mask": two_regions()}
    eventually("all serve", site.whole, timeout_s=240)
    seed = int(rng.integers(2**31))
    settings = {"seed": seed, "reproducible": True, "progress": True}
    finished_nodes = []
    for count, event in enumerate(site.stream("tries", **inputs, settings=settings), 1):
        outputs, meta = event
        if count == after:
            site.kill(victim)
        if count <= after and meta["event"] == "node":
            finished_nodes.append({name: x for name, x in meta.items() if name not in _OF_EVENTS})
    eventually("all serve", site.whole, timeout_s=240)
    expected = interpret(plan, inputs, InProcess(site, folder, seed))
    assert outputs["IMAGE"] == expected["image"]
    keys = [node_record["key"] for node_record in meta["nodes"]]
    assert len(keys) == len(set(keys))
    assert (
        meta["nodes"][: len(finished_nodes)] == finished_nodes
    )  # what had ended did not run again


@pytest.mark.slow
def test_what_killed_routers_had_goes_and_another_runs_the_same(
    site: Site, tmp_path: Path, folder: Path
) -> None:
    """While edits run whose masks a node has made, for one answer or a stream. Nobody ends their
    runs: rows end with the connections, and values where a server looks for what has expired, as
    each does when it starts, though no other run comes.
    """
    eventually("all serve", site.whole, timeout_s=240)
    workers, nodes = site.supervisor.workers, site.supervisor.services[-1]
    servers = [process.pid for process in (*workers, nodes)]
    settings = {
        "seed": fresh_seed(), "num_inference_steps": 200,
        "reproducible": True, "cache": "off",
    }  # fmt: skip
    run_inputs: dict[str, Any] = {
        "image": SOURCE, "mask": two_regions(), "prompt": "a red star", "settings": settings
    }  # fmt: skip
    expected, _ = site.run("regions", **run_inputs)
    eventually("that run has ended", site.idle, timeout_s=60)
    runs_before = site.runs()

    def left() -> set[Path]:
        return site.runs() - runs_before

    def under_way(earlier: set[Path]) -> bool:
        """Another run has its inputs and both regions; rows run."""
        runs = [run for run in left() - earlier if not run.name.startswith(_KEPT)]
        return any(len(listed(run)) >= 4 for run in runs) and any(
            status(worker.grpc_url)["running"] for worker in workers
        )

    tables: dict[str, dict[str, object]] = {
        "workflows": {"folder": str(folder), "nodes": [nodes.grpc_url]},
        "values": {"folder": str(site.values), "least_bytes": 1},
    }
    addresses = [worker.grpc_url for worker in workers]
    with RouterSite(addresses, tmp_path, tables) as router, ThreadPoolExecutor(1) as pool:
        behind = Site(site.supervisor, router.grpc_url)

        def killed_under(run: Callable[[], object]) -> bool:
            """Whether the run was still under way."""
            earlier, future = left(), pool.submit(run)
            eventually("edits run", lambda: future.done() or under_way(earlier), timeout_s=60)
            if future.done():  # before it was seen
                future.result()
                return False
            router.kill()
            lost = isinstance(future.exception(), InferenceServerException)
            eventually("no row is left, and no call", site.idle, timeout_s=120)
            assert left() - earlier or not lost  # nobody has ended its run
            router.start()
            return lost

        for run in (
            lambda: behind.run("regions", **run_inputs),
            lambda: list(behind.stream("regions", **run_inputs)),
        ):
            assert any(killed_under(run) for _ in range(20))

        def all_expired() -> bool:
            for run in left():
                with contextlib.suppress(FileNotFoundError):
                    os.utime(run, (1, 1))  # hours ago
            Values(ValuesConfig(folder=str(site.values))).stored()
            return not left()

        eventually("all has expired", all_expired, timeout_s=240)
        outputs, _ = behind.run("regions", **run_inputs)
        assert outputs == expected
    assert not left()
    assert [process.pid for process in (*workers, nodes)] == servers


def test_a_kept_result_is_good_on_every_worker_of_the_host(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Client(w.grpc_url)) for w in site.supervisor.workers]
        settings = {"num_inference_steps": STEPS, "seed": SEED, "reproducible": True}
        first = workers[0].edit(
            SOURCE, two_regions(), "a red star", keep_result=True, request_id="k1!first", **settings
        )

        def following(worker: Client, scope: str, image: bytes | None = None) -> bytes:
            named = {} if image else {"template_id": first.result_template_id}
            name = f"{scope}!{fresh_seed()}"
            result = worker.edit(
                image, two_regions(), "a blue heart", request_id=name, **named, **settings
            )
            return result.encoded

        expected_image = following(workers[0], "k1")
        assert (
            following(workers[1], "k1")
            == expected_image
            == following(workers[1], "k2", first.encoded)
        )
        for worker in workers:
            with pytest.raises(TemplateNotFound):
                following(worker, "k2")


def test_values_that_are_lost_are_made_again(site: Site, folder: Path) -> None:
    """All that lies in files is removed under a run, twice."""
    [plan] = [plan for plan in plans_of_every_kind() if plan.name == "tries"]
    inputs = {"image": SOURCE, "mask": two_regions()}
    seed = fresh_seed()
    settings = {"seed": seed, "reproducible": True, "progress": True}
    finished_keys, lost_count = set[str](), 0
    for event in site.stream("tries", **inputs, settings=settings):
        outputs, meta = event
        if meta["event"] == "node" and meta["key"] not in finished_keys:
            finished_keys.add(meta["key"])
            lost_count += site.lose() if len(finished_keys) in (2, 6) else 0
    assert outputs["IMAGE"] == interpret(plan, inputs, InProcess(site, folder, seed))["image"]
    assert lost_count
    keys = [node_record["key"] for node_record in meta["nodes"]]
    assert len(keys) == len(set(keys))


def test_nothing_is_left_of_runs(site: Site) -> None:
    """But for kept answers: also of runs that were cancelled, refused or killed above."""

    def owners() -> set[Path]:
        return set(site.values.glob(".owners/*/*/*"))

    def left() -> set[str]:
        """Owners of values, runs that are open, and files on their way, but for the kept ones."""
        opened_or_written = (
            path for name in (".open", ".new") for path in site.values.glob(f"{name}/*")
        )
        names = {path.name for path in owners()} | {path.name for path in opened_or_written}
        return {name for name in names if "unscoped-kept" not in name}

    site.run("tries", image=SOURCE, mask=two_regions())
    eventually("all is gone", lambda: not left())
    kept_values = {path.parent.name for path in owners() if "unscoped-kept" in path.name}
    assert kept_values >= {path.name for path in site.value_files()}
    folder = str(site.values).encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command_line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:400]
            eventually(
                f"no value is mapped by {command_line}",
                lambda maps=process / "maps": folder not in maps.read_bytes(),
            )


_OF_EVENTS = ("event", "request_id")


@pytest.mark.slow
def test_random_plans_give_the_bytes_of_the_interpreter(site: Site, folder: Path) -> None:
    node, all_inputs = (
        InProcess(site, folder),
        {"image": SOURCE, "mask": two_regions(), "name": "star"},
    )
    eventually("all serve", site.whole, timeout_s=240)
    answered = 0
    for plan in read_plans(folder):
        if not plan.name.startswith("drawn-"):
            continue
        inputs = {plan_input.name: all_inputs[plan_input.name] for plan_input in plan.inputs}
        try:
            expected = interpret(plan, inputs, node)
        except (WorkflowError, MaskserveError):
            with pytest.raises(InferenceServerException, match="INVALID_REQUEST"):
                site.run(plan.name, **inputs, settings={"reproducible": True})
            continue
        outputs, _ = site.run(plan.name, **inputs, settings={"reproducible": True})
        assert outputs == {name.upper(): value for name, value in expected.items()}, plan
        answered += 1
    assert answered >= DRAWN // 3
