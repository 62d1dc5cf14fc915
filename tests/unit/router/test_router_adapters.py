"""Operations on adapters through the router."""

from __future__ import annotations

import pytest

from maskserve_core.errors import InvalidRequest
from maskserve_router.control import merged_adapters
from maskserve_router.keys import KeyHolder
from tests.support.router import cluster


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
    assert [each["name"] for each in merged["controlnets"]] == ["depth", "outline"]
    assert merged["controlnets"][1]["tiers"] == {"w0": ["device"], "w1": []}


@pytest.mark.parametrize("op", ["adapter_load", "adapter_pin", "adapter_unpin", "adapter_evict"])
async def test_only_operators_change_what_lies_on_hosts(op: str):
    async with cluster() as (router, _):
        with pytest.raises(InvalidRequest, match="is an operator's"):
            await router._control.do({"op": op, "name": "x"}, KeyHolder("a", 1, admin=False))
