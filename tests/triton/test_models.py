"""Models' own Python files, run with a fake of Triton's API."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import c2pa
import grpc
import msgspec
import numpy as np
import pytest
import tomli_w
from PIL import Image
from tritonclient.grpc import service_pb2, service_pb2_grpc

from maskserve_common.config import Config
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.meta import final_meta, with_timing
from maskserve_common.contracts.postprocess_context import NOTHING
from maskserve_common.contracts.request import AcceptedEdit, EditKind, EditRequest
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.contracts.tensors import CONTRACTS, Tensor
from maskserve_common.errors import InvalidRequest, MaskserveError, Overloaded
from maskserve_common.imaging.images import encode_image
from maskserve_common.liveness import signed_in
from maskserve_engine.families.specs import load_spec
from maskserve_triton.batched_requests import batched
from maskserve_triton.controlnet_calls import ControlNetCalls
from maskserve_triton.loop_thread import LoopThread
from maskserve_triton.tensor_io import read_elements, tensor
from maskserve_triton.worker_model import WorkerModel
from tests.fakes.pb_utils import FakeTriton, InferenceResponse, Request
from tests.support.certificates import write_signer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def worker(
    tmp_path: Path, tiny_fill: Path, monkeypatch: pytest.MonkeyPatch, config: Config
) -> Config:
    """The environment that maskserve serve gives a worker's models."""
    engine = msgspec.to_builtins(config.engine)
    tables = {"runtime_dir": str(tmp_path), "model": {"path": str(tiny_fill)}, "engine": engine}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(tables))
    monkeypatch.setenv("MASKSERVE_CONFIG", str(tmp_path / "config.toml"))
    return config


@pytest.fixture
def load(
    api: FakeTriton, worker: Config, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Any]]:
    """Loads a model as the stub does."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", api)
    # That is for processes of their own.
    monkeypatch.setattr("maskserve_triton.worker_model.end_when_stuck", lambda: None)
    hides = "maskserve_engine.stages.unused_libraries.hide_unused_libraries"
    monkeypatch.setattr(hides, lambda config, **which: None)
    loaded: list[Any] = []

    def load(name: str) -> Any:
        [file] = ROOT.glob(f"*/{name}/1/model.py")
        spec = importlib.util.spec_from_file_location(f"{name}_model", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        model.initialize({})
        loaded.append(model)
        return model

    yield load
    for model in loaded:
        model.finalize()


def outputs(model: str, response: InferenceResponse) -> dict[str, np.ndarray]:
    """A response's tensors, held to the model's contract."""
    assert response.error() is None, response.error().message()
    arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    expected = {tensor.name: tensor for tensor in CONTRACTS[model].outputs}
    assert set(arrays) == set(expected)
    numpy_of = {"BYTES": np.object_, "UINT8": np.uint8, "FP32": np.float32}
    for name, array in arrays.items():
        assert array.dtype == numpy_of[expected[name].dtype]
        assert len(array.shape) == len(expected[name].dims)
        for size, dim in zip(array.shape, expected[name].dims, strict=True):
            assert dim in (-1, size)
    return arrays


def respond(model: Any, *requests: Request) -> list[InferenceResponse]:
    """Return the responses of a model that answers late."""
    model.execute(list(requests))
    return [request.sender.wait() for request in requests]


def of_alone(model: Any, api: FakeTriton, inputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs of a model that takes requests together, for one request."""
    request = api.request(**batched(inputs))
    model.execute([request])
    response = request.sender.wait()
    assert response.error() is None, response.error().message()
    return {tensor.name(): tensor.as_numpy()[0] for tensor in response.output_tensors()}


def pictures() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    source = rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)
    mask = np.zeros((50, 70), np.uint8)
    mask[10:30, 20:50] = 255
    return source, mask


def test_an_edit_passes_through_pre_and_postprocess(
    api: FakeTriton, load: Callable[[str], Any]
) -> None:
    source, mask = pictures()
    settings = EditSettings(seed=5, request_id="mine")
    request = api.request(
        IMAGE=encode_image(source, "png"),
        MASK=encode_image(mask, "png"),
        ACCEPTED=AcceptedEdit("a red star", settings, 123).to_json(),
    )
    [response] = respond(load("preprocess"), request)
    prepared = outputs("preprocess", response)
    edit = EditRequest.from_json(prepared["REQUEST"][0])
    assert (edit.seed, edit.request_id, edit.accepted_ns) == (5, "mine", 123)
    height, width = prepared["EDIT_MASK"].shape
    assert (height % 8, width % 8) == (0, 0)

    post = load("postprocess")
    meta = with_timing(final_meta(edit, "w", "m", {}, {"encode": 5.0}), "decode", 1.0)
    final = api.request(
        PIXELS=np.zeros((height, width, 3), np.uint8),
        META=meta,
        CONTEXT=prepared["CONTEXT"],
    )
    progress = api.request(
        PIXELS=np.zeros((0, 0, 3), np.uint8),
        META=b'{"event": "progress", "step": 1}',
        CONTEXT=NOTHING,
    )
    final_response, passing = respond(post, final, progress)
    image = np.asarray(Image.open(io.BytesIO(outputs("postprocess", final_response)["IMAGE"][0])))
    assert np.array_equal(image[mask == 0], source[mask == 0])
    assert (image[mask == 255] == 0).all()
    timings = json.loads(final_response.text("META"))["timings_ms"]
    assert timings["decode"] == 1.0
    assert timings["postprocess"] > 0
    assert passing.text("IMAGE") == b""
    assert passing.text("META") == b'{"event": "progress", "step": 1}'


@pytest.mark.parametrize("kind", ["edit", "generate"])
def test_an_edit_without_a_mask_passes_up_to_the_engine_and_behind_it(
    api: FakeTriton, load: Callable[[str], Any], tiny_fill: Path, kind: EditKind
) -> None:
    source = pictures()[0] if kind == "edit" else None
    image = b"" if source is None else encode_image(source, "png")
    settings = EditSettings(seed=5, request_id="mine", size="72x48")
    accepted = AcceptedEdit("a red star", settings, 123, kind).to_json()
    pre, post = load("preprocess"), load("postprocess")
    [response] = respond(pre, api.request(IMAGE=image, MASK=b"", ACCEPTED=accepted))
    prepared = outputs("preprocess", response)
    assert (prepared["EDIT_MASK"] == np.full((48, 72), 255)).all()
    assert prepared["PIXELS"].shape == ((48, 72, 3) if kind == "edit" else (0, 0, 3))
    edit = EditRequest.from_json(prepared["REQUEST"][0])
    assert edit.kind == kind

    inputs = {tensor.name: prepared[tensor.name] for tensor in CONTRACTS["encoder"].inputs}
    encoded = of_alone(load("encoder"), api, {**inputs, "REQUEST": prepared["REQUEST"][0]})
    moments, spec = encoded["MOMENTS"], load_spec(tiny_fill)
    scale = spec.vae_scale_factor
    assert moments.shape == (2 * spec.latent_channels, 48 // scale, 72 // scale)
    assert moments.any() == (kind == "edit")
    how = json.loads(encoded["ENCODED"][0])
    assert how["template"] == ("made" if kind == "edit" else None)

    meta = final_meta(edit, "w", "m", {"cache": "off"}, {})
    latents = np.zeros((spec.latent_channels, 48 // scale, 72 // scale), np.float32)
    event = {"LATENTS": latents, "META": meta, "CONTEXT": prepared["CONTEXT"]}
    decoded = of_alone(load("decoder"), api, event)
    assert decoded["PIXELS"].shape == (48, 72, 3)
    final = api.request(PIXELS=decoded["PIXELS"], META=meta, CONTEXT=prepared["CONTEXT"])
    [final_response] = respond(post, final)
    response_tensors = outputs("postprocess", final_response)
    picture = np.asarray(Image.open(io.BytesIO(response_tensors["IMAGE"][0])))
    np.testing.assert_array_equal(picture, decoded["PIXELS"])
    values = json.loads(response_tensors["META"][0])
    assert values["kind"] == kind
    assert (values["template_id"] is None) == (kind == "generate")


def test_a_picture_is_signed_and_shown_to_the_check(
    api: FakeTriton, load: Callable[[str], Any], worker: Config, tmp_path: Path
) -> None:
    chain, key = write_signer(tmp_path)
    (tmp_path / "own.py").write_text(
        "def check(source, prompt, made):\n    return 'no stars' if 'star' in prompt else None\n"
    )
    with (tmp_path / "config.toml").open("a") as file:
        file.write(f'[provenance]\ncertificate = "{chain}"\nprivate_key = "{key}"\n')
        file.write(f'[safety]\ncheck = "{tmp_path}/own.py:check"\n')
    source, mask = pictures()
    pre, post = load("preprocess"), load("postprocess")

    def answered(prompt: str) -> Any:
        settings = EditSettings(seed=5, request_id="mine")
        request = api.request(
            IMAGE=encode_image(source, "png"),
            MASK=encode_image(mask, "png"),
            ACCEPTED=AcceptedEdit(prompt, settings, 123).to_json(),
        )
        [response] = respond(pre, request)
        prepared = outputs("preprocess", response)
        edit = EditRequest.from_json(prepared["REQUEST"][0])
        final = api.request(
            PIXELS=np.zeros((*prepared["EDIT_MASK"].shape, 3), np.uint8),
            META=final_meta(edit, "w", "m", {}, {}),
            CONTEXT=prepared["CONTEXT"],
        )
        [final_response] = respond(post, final)
        return final_response

    image = outputs("postprocess", answered("a circle"))["IMAGE"][0]
    manifest_store = json.loads(c2pa.Reader("image/png", io.BytesIO(image)).json())
    assert manifest_store["validation_state"] == "Valid"
    assert "[REFUSED] no stars" in str(answered("a star").text("META"))


def test_one_bad_request_leaves_its_neighbours_alone(
    api: FakeTriton, load: Callable[[str], Any]
) -> None:
    source, mask = pictures()
    good = {
        "IMAGE": encode_image(source, "png"),
        "MASK": encode_image(mask, "png"),
        "ACCEPTED": AcceptedEdit("", EditSettings(seed=5, request_id="mine"), 123).to_json(),
    }
    requests = [
        api.request(**good),
        api.request(**{**good, "IMAGE": b"hello"}),
        api.request(**good),
    ]
    first, bad, last = respond(load("preprocess"), *requests)
    outputs("preprocess", first)
    outputs("preprocess", last)
    assert bad.error().message().startswith("[INVALID_REQUEST] IMAGE: is not an image")
    assert bad.error().code() == api.TritonError.INVALID_ARG


@pytest.mark.parametrize(
    ("meta", "request_id"),
    [(b'{"event": "final", "request_id": "mine"}', "mine"), (b"{}", ""), (b"[", ""), (b"[]", "")],
)
def test_what_postprocess_cannot_do_is_an_event_and_hidden(
    api: FakeTriton, load: Callable[[str], Any], meta: bytes, request_id: str
) -> None:
    """An error of Triton's might wait for events that wait for this one."""
    broken = api.request(
        PIXELS=np.zeros((8, 8, 3), np.uint8), META=meta, CONTEXT=np.zeros(9, np.uint8)
    )
    [response] = respond(load("postprocess"), broken)
    assert response.text("IMAGE") == b""
    event = json.loads(response.text("META"))
    assert (event["event"], event["request_id"]) == ("failed", request_id)
    assert event["error"] == f"[ENGINE_FAILED] internal error (request {request_id or 'unknown'})"


def test_elements_are_read_and_made_as_declared(api: FakeTriton) -> None:
    control_tensor = Tensor("CONTROL", "BYTES", (-1,), optional=True)
    request = api.request(CONTROL=np.array([b"a", "é", b""], np.object_))
    assert read_elements(api, request, control_tensor) == [b"a", "é".encode(), b""]
    assert read_elements(api, api.request(), control_tensor) == []
    for elements in ([], [b"a", b"b"]):
        triton_tensor = tensor(api, "CONTROL", elements).as_numpy()
        assert (triton_tensor.dtype, list(triton_tensor)) == (np.object_, elements)
    assert read_elements(api, api.request(), CONTRACTS["edit"].input("MASK")) == [b""]
    for name, elements in (("PROMPT", []), ("MASK", [b"a", b"b"])):
        tensors = {name: np.array(elements, np.object_)} if elements else {}
        with pytest.raises(InvalidRequest, match=rf"{name}: .*; accepted: a BYTES tensor of shape"):
            read_elements(api, api.request(**tensors), CONTRACTS["edit"].input(name))


@pytest.mark.usefixtures("beat")
@pytest.mark.parametrize("name", ["edit", "edit_stream", "control"])
def test_late_models_return_nothing_from_execute(
    api: FakeTriton, load: Callable[[str], Any], name: str
) -> None:
    model = load(name)
    request = api.request(OP=b"{", IMAGE=b"", MASK=b"", PROMPT=b"", SETTINGS=b"{")
    assert model.execute([request]) is None
    assert "is not valid JSON" in request.sender.wait().error().message()


class ControlNetServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The model `controlnet` behind KServe's gRPC, as Triton calls it."""

    def __init__(self, api: FakeTriton, model: Any) -> None:
        self._api, self._model = api, model

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        [op] = (bytes(bytes_tensor.only(raw)) for raw in request.raw_input_contents)
        op_request = self._api.request(OP=op)
        self._model.execute([op_request])
        response = op_request.sender.wait()
        if response.has_error():
            context.abort(grpc.StatusCode.INTERNAL, response.error().message())
        answer = service_pb2.ModelInferResponse(model_name=request.model_name)
        bytes_tensor.add_output(answer, "RESULT", [response.text("RESULT")])
        return answer


def test_a_denoisers_calls_reach_a_controlnet_service(
    api: FakeTriton, load: Callable[[str], Any], worker: Config, tmp_path: Path
) -> None:
    (tmp_path / "nets").mkdir()
    with (tmp_path / "config.toml").open("a") as file:
        file.write(f'[controls]\nfolder = "{tmp_path}/nets"\n')
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
        ControlNetServer(api, load("controlnet")), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    loop = LoopThread("calls")
    calls = ControlNetCalls(loop, f"127.0.0.1:{port}")
    try:
        session = calls.call({"op": "attach", "dtype": "float32"}, b"", 30.0)["session"]
        assert calls.call({"op": "health"}, b"", 30.0)["sessions"] == 1
        message = {"op": "load", "session": session, "version": "1"}
        with pytest.raises(MaskserveError, match=r"\[ADAPTER_NOT_FOUND\].*none"):
            calls.call({**message, "name": "none"}, b"", 30.0)
        with pytest.raises(MaskserveError, match=r"\[INVALID_REQUEST\].*is not an operation"):
            calls.call({"op": "none"}, b"", 30.0)
        server.stop(0).wait()
        with pytest.raises(Overloaded, match="does not answer"):
            calls.call({"op": "health"}, b"", 1.0)
    finally:
        calls.close()
        loop.close()
        server.stop(0).wait()


@pytest.mark.usefixtures("worker")
def test_what_is_loaded_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskserve_triton.worker_model.end_when_stuck", lambda: None)
    looked: list[bool] = []

    class Loading(WorkerModel):
        name = "loading"

        def open(self, config: Config) -> None:
            looked.append(gc.isenabled())

        def close(self) -> None:
            pass

    gc.unfreeze()
    Loading().initialize({})
    assert looked == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_a_model_is_on_the_list_until_it_has_let_go_of_all(
    load: Callable[[str], Any], worker: Config
) -> None:
    """The supervisor ends a worker once no model is on the list."""
    model = load("postprocess")
    close, listed = model.close, []

    def closing() -> None:
        listed.append(signed_in(worker.runtime_dir))
        close()

    model.close = closing
    model.finalize()
    assert [name for name, _ in listed[0]] == ["postprocess"]
    assert signed_in(worker.runtime_dir) == []
    model.close = close
