"""Two workers of a host: variants of a picture in one run have it encoded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maskserve_client import Client
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import edit
from maskserve_workflows.passes import PASSES, compiled
from maskserve_workflows.plan import dump_plan
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow
VARIANTS = 5


def plan_file(folder: Path, name: str, passes: set[str]) -> None:
    with Workflow(name) as flow:
        image, mask = flow.picture("image"), flow.mask("mask")
        flow.gives(**{f"image{i}": edit(image, mask, f"wish {i}") for i in range(VARIANTS)})
    (folder / f"{name}.json").write_bytes(dump_plan(compiled(flow.plan, passes)))


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("encodings")
    plan_file(folder, "once", set(PASSES) - {"prime"})
    plan_file(folder, "naive", set(PASSES) - {"prime", "encode"})
    base = free_base_port(3)
    config, router_config = folder / "worker.toml", folder / "router.toml"
    config.write_text("[values]\nleast_bytes = 1\n")
    router_config.write_text(
        '[values]\nleast_bytes = 1\n[routing]\npolicy = "round_robin"\n'  # both get edits
    )
    options = ServeOptions(
        model=str(model), workers=2, base_port=base, router=True, router_port=base + 20,
        workflows=folder, config=config, router_config=router_config,
        log_dir=folder / "logs", report=print,
    )  # fmt: skip
    with Supervisor(options) as running:
        assert running.router is not None
        yield running.router.grpc_url


def test_two_workers_encode_a_picture_of_five_variants_once(url: str) -> None:
    rng = fresh_rng()

    def run(name: str, image: bytes) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
        settings = {"seed": 1, "num_inference_steps": 4, "reproducible": True}
        with Client(url) as client:
            outputs, meta = client.run_workflow(name, {"image": image, "mask": mask}, **settings)
        return outputs, meta["nodes"]

    def reports(nodes: list[dict[str, Any]], node: str) -> list[dict[str, Any]]:
        return [report for report in nodes if report["node"] == node]

    mask = encode(blob_mask(64, 64))
    pictures = [encode(scene(64, 64, int(rng.integers(2**31)))) for _ in range(2)]
    with Client(url) as client:

        def both_serve() -> bool:
            return all(worker["up"] for worker in client.control("status")["workers"].values())

        eventually("both serve", both_serve, timeout_s=240)
    _, nodes = run("naive", pictures[0])
    by_worker = {report["worker"] for report in reports(nodes, "edit")}
    encoders = [x["worker"] for x in reports(nodes, "edit") if x["encoded"]["template"] == "made"]
    assert len(by_worker) == 2
    assert sorted(encoders) == sorted(by_worker), "each worker encodes for itself"
    outputs, nodes = run("once", pictures[1])
    assert {report["worker"] for report in reports(nodes, "edit")} == by_worker
    assert [x["encoded"]["template"] for x in reports(nodes, "encode")] == ["made"]
    assert {x["encoded"]["template"] for x in reports(nodes, "edit")} == {"kept"}
    assert run("naive", pictures[1])[0] == outputs
