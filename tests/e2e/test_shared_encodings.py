"""Variants of a picture in one run have it encoded once, by the plan: with two workers of a host,
and with a worker whose encoder runs in two servers.
"""

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
SITES: dict[str, dict[str, Any]] = {
    "workers": {"workers": 2},
    "encoders": {"services": ("encoder,decoder@cpu", "encoder@cpu")},
}
"""Two encoders each, of which each has some of the variants."""


def plan_file(folder: Path, name: str, passes: set[str]) -> None:
    with Workflow(name) as flow:
        image, mask = flow.picture("image"), flow.mask("mask")
        flow.gives(**{f"image{i}": edit(image, mask, f"wish {i}") for i in range(VARIANTS)})
    (folder / f"{name}.json").write_bytes(dump_plan(compiled(flow.plan, passes)))


@pytest.fixture(scope="module", params=list(SITES))
def url(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
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
        model=str(model), base_port=base, router=True, router_port=base + 20, workflows=folder,
        config=config, router_config=router_config, log_dir=folder / "logs", report=print,
        **SITES[request.param],
    )  # fmt: skip
    with Supervisor(options) as running:
        assert running.router is not None
        yield running.router.grpc_url


def test_variants_of_a_picture_have_it_encoded_once(url: str) -> None:
    rng = fresh_rng()

    def run(name: str, image: bytes) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
        settings = {"seed": 1, "num_inference_steps": 4, "reproducible": True}
        with Client(url) as client:
            outputs, meta = client.run_workflow(name, {"image": image, "mask": mask}, **settings)
        return outputs, meta["nodes"]

    def origins(nodes: list[dict[str, Any]], node: str) -> list[str]:
        return sorted(x["encoded"]["template"] for x in nodes if x["node"] == node)

    def workers(nodes: list[dict[str, Any]]) -> set[str]:
        return {report["worker"] for report in nodes if report["node"] == "edit"}

    mask = encode(blob_mask(64, 64))
    pictures = [encode(scene(64, 64, int(rng.integers(2**31)))) for _ in range(2)]
    with Client(url) as client:

        def all_serve() -> bool:
            return all(worker["up"] for worker in client.control("status")["workers"].values())

        eventually("all serve", all_serve, timeout_s=240)
    _, naive = run("naive", pictures[0])
    assert origins(naive, "edit").count("made") == 2, "each encoder encodes for itself"
    outputs, once = run("once", pictures[1])
    assert origins(once, "encode") == ["made"]
    assert origins(once, "edit") == ["kept"] * VARIANTS
    assert workers(once) == workers(naive)
    assert run("naive", pictures[1])[0] == outputs
