"""Adapters by `control`, and how a front has them fetched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from maskserve_common.config import Config
from maskserve_lora.base_layers import BaseLayers
from maskserve_triton.control import WorkerControl
from maskserve_triton.edit_front import EditFront
from tests.fakes.loras import OTHER_MODEL, lora, write
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pb_utils import Call, FakeTriton, InferenceResponse, failure, reply
from tests.support.calls import plain_edit
from tests.support.eventually import eventually

pytestmark = pytest.mark.usefixtures("beat")
DEMO = Path(__file__).parents[2] / "assets" / "models" / "demo"


@pytest.fixture
def served(config: Config, tmp_path: Path) -> Config:
    """A worker with two adapters, one of them for another model."""
    write(tmp_path / "store" / "good.safetensors")
    write(tmp_path / "store" / "other.safetensors", lora(OTHER_MODEL, prefix="unet."))
    return structs.replace(
        config,
        model=structs.replace(config.model, path=str(DEMO)),
        adapters=structs.replace(config.adapters, store=str(tmp_path / "store"), rescan_s=0.05),
    )


@pytest.fixture
def ask(api: FakeTriton) -> Callable[..., Any]:
    def send(config: Config, op: str, **fields: str) -> Any:
        control = WorkerControl(api, config)
        request = api.request(OP=json.dumps({"op": op, **fields}).encode())
        try:
            control.execute([request])
            answer = request.sender.wait()
        finally:
            control.close()
        error = answer.error()
        return error.message() if error is not None else json.loads(answer.text("RESULT"))

    return send


def test_adapters_are_listed_checked_loaded_pinned_and_evicted(
    ask: Callable[..., Any], served: Config
) -> None:
    good, other_adapter = ask(served, "adapters")["adapters"]
    assert (good["name"], good["tiers"], good["pinned"]) == ("good", [], False)
    assert "is for another model" in other_adapter["problem"]
    path = Path(served.adapters.store) / "good.safetensors"
    checked = ask(served, "adapter_check", name="good")
    assert checked["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert checked["tiers"] == ask(served, "adapters")["adapters"][0]["tiers"] == []
    loaded = ask(served, "adapter_load", name="good")
    assert loaded["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded["tiers"] == ["host"]
    [host_copy] = Path(served.runtime_dir, "adapters").glob("good@*")
    used = host_copy.stat().st_mtime_ns
    assert ask(served, "adapter_check", name="good") == loaded
    assert host_copy.stat().st_mtime_ns == used
    assert ask(served, "adapter_pin", name="good")["pinned"]
    good, _ = ask(served, "adapters")["adapters"]
    assert (good["tiers"], good["pinned"], good["digest"]) == (["host"], True, loaded["digest"])
    assert not ask(served, "adapter_unpin", name="good")["pinned"]
    assert ask(served, "adapter_evict", name="good")["freed_bytes"] == good["bytes"]
    assert ask(served, "adapters")["adapters"][0]["tiers"] == []


@pytest.mark.parametrize("op", ["adapter_check", "adapter_load", "adapter_pin"])
def test_what_cannot_be_had_is_told(ask: Callable[..., Any], served: Config, op: str) -> None:
    assert ask(served, op, name="x").startswith("[ADAPTER_NOT_FOUND] OP.name: there is no adapter")
    assert ask(served, op, name="other").startswith("[INVALID_REQUEST] OP.name: adapter other is")
    for name in ("../good", "a/b", "good.safetensors/..", "é"):
        assert ask(served, op, name=name).startswith("[INVALID_REQUEST] OP.name: has another form")


def test_without_a_store_there_are_none(ask: Callable[..., Any], config: Config) -> None:
    assert ask(config, "adapters") == {"adapters": [], "problem": "", "controlnets": []}
    for op in ("adapter_check", "adapter_load", "adapter_pin", "adapter_unpin", "adapter_evict"):
        assert ask(config, op, name="x").startswith("[INVALID_REQUEST] OP.op: adapters are not")


def test_a_store_that_is_gone_is_told(ask: Callable[..., Any], served: Config) -> None:
    broken_config = structs.replace(
        served, adapters=structs.replace(served.adapters, store="/nowhere")
    )
    assert "there is no folder" in ask(broken_config, "adapters")["problem"]
    assert ask(broken_config, "adapter_load", name="x").startswith("[OVERLOADED] OP.name:")


def test_a_front_has_an_edit_s_adapters_fetched_and_refuses_others(
    api: FakeTriton, served: Config
) -> None:
    front = EditFront(api, served, FILL_SPEC, "edit", streaming=False)

    api.models["edit_pipeline"] = lambda call: [failure("[ENGINE_FAILED] no pipeline here")]

    def edit_error(*names: str) -> str:
        settings = json.dumps({"loras": [{"name": name} for name in names]}).encode()
        request = api.request(**{**plain_edit(), "SETTINGS": settings})
        front.execute([request])
        error = request.sender.wait().error()
        return str(error.message()) if error is not None else ""

    try:
        eventually("the storage is listed", lambda: "still being listed" not in edit_error("x"))
        assert edit_error("x").startswith("[ADAPTER_NOT_FOUND] SETTINGS.loras[0].name")
        assert edit_error("good", "other").startswith("[INVALID_REQUEST] SETTINGS.loras[1].name")
        assert not front._adapters.host.files()
        edit_error("good")
        eventually(
            "it is there", lambda: [adapter.name for adapter in front._adapters.host.files()]
        )
    finally:
        front.close()


def test_an_edit_waits_in_the_front_for_the_text_encoders_part(
    api: FakeTriton, served: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder serves one edit after the other, so it must not wait for a storage."""
    base = BaseLayers.of_folder(DEMO)
    name, (outputs, inputs) = next(iter(base.shapes["text_encoder"].items()))
    store = Path(served.adapters.store)
    write(store / "text.safetensors", lora({name: (inputs, outputs)}, prefix="text_encoder."))
    nan = lora({name: (inputs, outputs)}, prefix="text_encoder.")
    next(iter(nan.values()))[0, 0] = np.nan
    write(store / "nan.safetensors", nan)
    adapter_names: list[list[str]] = []
    front = EditFront(api, served, FILL_SPEC, "edit", streaming=False)

    def pipeline(call: Call) -> list[InferenceResponse]:
        adapter_names.append([adapter.name for adapter in front._adapters.host.files()])
        assert call.accepted().loras[0].text
        return [reply(EDITED=b"picture", META=b'{"event": "final", "step": 1}')]

    api.models["edit_pipeline"] = pipeline

    def edit_error(name: str) -> str:
        settings = json.dumps({"loras": [{"name": name}]}).encode()
        request = api.request(**{**plain_edit(), "SETTINGS": settings})
        front.execute([request])
        error = request.sender.wait().error()
        return str(error.message()) if error is not None else ""

    monkeypatch.setattr(front._adapters, "begin", lambda *_: None)
    try:
        eventually("the storage is listed", lambda: "text" in front._adapters.catalogue.all())
        assert edit_error("nan").startswith(
            "[INVALID_REQUEST] SETTINGS.loras: adapter nan holds NaN"
        )
        assert not adapter_names
        assert edit_error("text") == ""
        assert adapter_names == [["text"]]
    finally:
        front.close()
