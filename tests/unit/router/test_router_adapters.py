"""Operations on adapters through the router."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.errors import InvalidRequest
from maskserve_router.key_holder import KeyHolder
from maskserve_router.operations.control import merged_adapters
from tests.support.router import calling, cluster, control_request, edit, picture


def about(name: str, *tiers: str, pinned: bool = False) -> dict[str, object]:
    return {"name": name, "rank": 4, "problem": "", "tiers": list(tiers), "pinned": pinned}


def test_adapters_of_all_workers_are_one_list() -> None:
    first = {"adapters": [about("a", "host"), about("b")], "problem": ""}
    second = {"adapters": [about("b", "disk", pinned=True)], "problem": "no answer"}
    merged = merged_adapters({"w0": first, "w1": second})
    assert [adapter["name"] for adapter in merged["adapters"]] == ["a", "b"]
    assert merged["adapters"][1]["tiers"] == {"w0": [], "w1": ["disk"]}
    assert merged["adapters"][1]["pinned"]
    assert merged["problem"] == "no answer"


def test_controlnets_of_all_workers_are_one_list() -> None:
    def net(name: str, *tiers: str) -> dict[str, object]:
        return {"name": name, "bytes": 5, "modes": 0, "problem": "", "tiers": list(tiers)}

    first = {"adapters": [], "controlnets": [net("outline", "device"), net("depth")], "problem": ""}
    second = {"adapters": [], "controlnets": [net("outline")], "problem": ""}
    merged = merged_adapters({"w0": first, "w1": second})
    assert [controlnet["name"] for controlnet in merged["controlnets"]] == ["depth", "outline"]
    assert merged["controlnets"][1]["tiers"] == {"w0": ["device"], "w1": []}


@pytest.mark.parametrize("op", ["adapter_load", "adapter_pin", "adapter_unpin", "adapter_evict"])
async def test_only_operators_change_what_lies_on_hosts(op: str):
    async with cluster() as (router, _):
        with pytest.raises(InvalidRequest, match="is for operators"):
            await router._control.do({"op": op, "name": "x"}, KeyHolder("a", 1, admin=False))


async def test_a_keys_adapters_are_not_there_for_others():
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **more}
        for name, more in {
            "studio": {"adapters": ["studio-*"]},
            "shop": {"adapters": ["studio-shared"]},
            "root": {"admin": True},
        }.items()
    ]
    listed = {"adapters": [about(name) for name in ("plain", "studio-a", "studio-shared")]}
    async with cluster(keys=keys) as (router, workers):
        for worker in workers:
            worker.adapters = listed

        async def ask(key: str, request: bytes) -> Any:
            async with calling(router) as call:
                return await call(request, metadata=(("x-api-key", key),))

        def named(answer: bytes) -> Any:
            (raw,) = pb.ModelInferResponse.FromString(answer).raw_output_contents
            return json.loads(raw[4:])

        for key, visible_names in {
            "studio": ["plain", "studio-a", "studio-shared"],
            "shop": ["plain", "studio-shared"],
            "root": ["plain", "studio-a", "studio-shared"],
        }.items():
            answer = named(await ask(key, control_request("adapters")))
            assert [adapter["name"] for adapter in answer["adapters"]] == visible_names
            for name in ("plain", "studio-a", "studio-shared"):
                for request in (
                    edit(loras=[{"name": name}]),
                    control_request("adapter_check", name=name),
                ):
                    if name in visible_names:
                        await ask(key, request)
                        continue
                    with pytest.raises(grpc.aio.AioRpcError, match=f"there is no adapter {name}"):
                        await ask(key, request)


async def test_a_plain_key_is_not_told_where_workers_and_node_servers_are():
    keys = [{"name": n, "sha256": hashlib.sha256(n.encode()).hexdigest()} for n in ("a", "b")]
    keys[1]["admin"] = True  # type: ignore[assignment]
    nodes = {"nodes": ["127.0.0.1:9"]}
    async with cluster(keys=keys, workflows=nodes) as (router, workers), calling(router) as call:
        image = control_request("register", image=picture("x"))
        await call(image, metadata=(("x-api-key", "a"),))
        for request in (
            image,
            *(control_request(op) for op in ("status", "templates", "adapters", "heartbeat")),
        ):
            answer = await call(request, metadata=(("x-api-key", "a"),))
            assert b"127.0.0.1" not in answer
        answer = await call(control_request("status"), metadata=(("x-api-key", "a"),))
        assert b'"nodes-0"' in answer, "as META and /v1/workflows name it"
        url, key = f"http://127.0.0.1:{router.http.port}", {"x-api-key": "a"}
        op_input = {"name": "OP", "shape": [1], "datatype": "BYTES", "data": ['{"op": "status"}']}
        async with aiohttp.ClientSession(url, headers=key) as session:
            posted = session.post("/v2/models/control/infer", json={"inputs": [op_input]})
            for pending_response in (
                posted,
                session.get("/v1/templates"),
                session.get("/v1/workflows"),
            ):
                async with pending_response as response:
                    assert response.status == 200
                    assert b"127.0.0.1" not in await response.read()
        answer = await call(control_request("status"), metadata=(("x-api-key", "b"),))
        assert all(worker.address.encode() in answer for worker in workers)
        assert b"127.0.0.1:9" in answer
