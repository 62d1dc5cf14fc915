"""The new node of docs/workflows.md at a real node server, beside another host's older version."""

from __future__ import annotations

import io
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from maskserve_benchmarks.router_site import RouterSite
from maskserve_client.cli import main
from maskserve_client.client import Client
from maskserve_common.errors import EngineFailed
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.fakes.pictures import encode, scene
from tests.support.eventually import eventually
from tests.support.workflows import new_node, node_path

DEFINITION = """
from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import sharpen

with Workflow("crisp") as crisp:
    crisp.gives(image=sharpen(crisp.picture("image"), percent=200))
"""
BROKEN = DEFINITION.replace("sharpen", "blur").replace("crisp", "blurred")
SERVED_S = 120.0


def serve(folder: Path, nodes: Path) -> Supervisor:
    folder.mkdir()
    (folder / "nodes.toml").write_text('[model]\ndevice = "cpu"\n')
    options = ServeOptions(
        workers=0,
        nodes=folder / "nodes.toml",
        node_path=str(nodes),
        base_port=free_base_port(),
        log_dir=folder / "logs",
    )
    return Supervisor(options)


@pytest.mark.slow
def test_a_new_node_is_run_by_the_server_that_has_its_version(tmp_path: Path) -> None:
    nodes, plans = new_node(tmp_path / "nodes"), tmp_path / "plans"
    older = new_node(tmp_path / "older")
    file = older / "sharpen.py"
    file.write_text(file.read_text().replace("percent", "strength"))
    blur = nodes / "blur.py"
    blur.write_text((nodes / "sharpen.py").read_text().replace("sharpen", "blur"))
    plans.mkdir()
    (plans / "workflows.py").write_text(DEFINITION + BROKEN)
    pixels = scene(96, 64)
    sharpened = Image.fromarray(pixels).filter(ImageFilter.UnsharpMask(percent=200))
    with node_path(), ExitStack() as stack:  # the supervisors read files, too
        assert main(["workflows", "compile", str(plans), "--node-path", str(nodes)]) == 0
        blur.write_text("import numpy\ndef blur(:")
        servers = {
            name: stack.enter_context(serve(tmp_path / name, folder))
            for name, folder in (("first", older), ("second", nodes))
        }
        addresses = {
            name: f"127.0.0.1:{server.services[0].ports.grpc}" for name, server in servers.items()
        }

        def route(*names: str) -> RouterSite:
            folder = tmp_path / "-".join(("router", *names))
            folder.mkdir()
            workflows: dict[str, object] = {
                "folder": str(plans), "nodes": [addresses[name] for name in names],
                "node_path": [str(nodes)], "kept_bytes": 0,
            }  # fmt: skip
            return RouterSite([], folder, {"workflows": workflows}, ready=False)

        with route("first", "second") as router, Client(router.grpc_url) as client:

            def run() -> bytes:
                return client.run_workflow("crisp", {"image": encode(pixels)})[0]["image"]

            eventually("it serves", lambda: bool(run()), timeout_s=SERVED_S)
            for _ in range(4):
                outputs, meta = client.run_workflow("crisp", {"image": encode(pixels)})
                output = np.asarray(Image.open(io.BytesIO(outputs["image"])))
                assert np.array_equal(output, np.asarray(sharpened))
                assert [node["server"] for node in meta["nodes"]] == [addresses["second"]]
            log = router.log.read_text()
            assert "blur.py:2: SyntaxError" in log
            assert "blurred.json: blur-1: there is no node 'blur'" in log
            assert log.count(f"node server {addresses['first']} is left out") <= 1
        with route("first") as router, Client(router.grpc_url) as client:
            with pytest.raises(EngineFailed, match=r"sharpen is of another version .*strength"):
                client.run_workflow("crisp", {"image": encode(pixels)})
            assert "is left out" in router.log.read_text()
