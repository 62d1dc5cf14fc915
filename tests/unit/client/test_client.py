"""The blocking client against a server in this process."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc._channel
import numpy as np
import pytest
from PIL import Image

import maskserve_client
from maskserve_client import (
    AdapterNotFound,
    Cancelled,
    Client,
    DeadlineExceeded,
    EditResult,
    EngineFailed,
    Final,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    Preview,
    Progress,
    ServerUnavailable,
    TemplateNotFound,
)
from maskserve_client.errors import from_text
from maskserve_common.contracts.keys import template_id
from tests.fakes.corpus.encoding import chunks_of, png
from tests.fakes.hostile import HostileCase, hostile_cases
from tests.fakes.pictures import blob_mask, encode, scene
from tests.fakes.profiles import cmyk_profile, rgb_profile
from tests.fakes.triton_server import PAINT, FakeServer, FakeWorker

SIZE = (40, 56)
SOURCE, MASK = scene(*SIZE), blob_mask(*SIZE)
IMAGES = (encode(SOURCE), encode(MASK))


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with FakeServer() as worker:
        yield worker


@pytest.fixture
def client(worker: FakeWorker) -> Iterator[Client]:
    with Client(worker.url) as client:
        yield client


def check_picture(image: Image.Image) -> None:
    assert image.mode == "RGB"
    pixels = np.asarray(image)
    np.testing.assert_array_equal(pixels[MASK == 0], SOURCE[MASK == 0])
    assert (pixels[MASK > 0] == PAINT).all()


def ask(client: Client, streaming: bool, *pair: bytes, **settings: object) -> object:
    """The same edit, by either way of asking."""
    if streaming:
        return list(client.edit_stream(*(pair or IMAGES), "x", **settings))
    return client.edit(*(pair or IMAGES), "x", **settings)


# One edit


def test_an_edit_comes_back_with_its_picture_and_meta(client: Client, worker: FakeWorker) -> None:
    result = client.edit(*IMAGES, "a red star", seed=7, num_inference_steps=3)
    check_picture(result.image)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(result.encoded))), result.image)
    assert (result.seed, result.meta["steps"]) == (7, 3)
    assert result.request_id == result.meta["request_id"] != ""
    (request,) = worker.requests
    assert (request["model_name"], request["PROMPT"]) == (b"edit", b"a red star")
    assert json.loads(request["SETTINGS"]) == {"seed": 7, "num_inference_steps": 3}


def test_pictures_may_be_bytes_paths_or_pil(
    client: Client, worker: FakeWorker, tmp_path: Path
) -> None:
    image, mask = tmp_path / "a.png", tmp_path / "m.png"
    image.write_bytes(IMAGES[0])
    mask.write_bytes(IMAGES[1])
    for pair in (
        (image, str(mask)),
        (Image.fromarray(SOURCE), Image.fromarray(MASK)),
        (Image.fromarray(SOURCE).convert("RGBA"), Image.fromarray(MASK > 0)),
    ):
        check_picture(client.edit(*pair, "x").image)
    assert worker.requests[0]["IMAGE"] == IMAGES[0]
    cmyk = client.edit(Image.fromarray(SOURCE).convert("CMYK"), IMAGES[1], "x")
    assert cmyk.image.size == SIZE[::-1]


def test_further_pictures_follow_the_source_or_the_template(
    client: Client, worker: FakeWorker
) -> None:
    worker.edit_kinds, worker.most_pictures = frozenset({"edit"}), 3
    template, further, strength = client.register(IMAGES[0]), IMAGES[1], {"strength": 0.5}
    client.edit(IMAGES[0], prompt="x", images=[further], **strength)
    client.edit(images=[IMAGES[0], further], prompt="x", **strength)
    client.edit(images=[further], prompt="x", template_id=template, **strength)
    sent = [(request["IMAGE"], request["IMAGE[1]"]) for request in worker.requests]
    assert sent == [(IMAGES[0], further), (IMAGES[0], further), (b"", further)]
    with pytest.raises(InvalidRequest, match="IMAGE: has 4 pictures; accepted: up to 3"):
        client.edit(images=[*IMAGES, *IMAGES], prompt="x", **strength)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_picture_needs_no_source_and_an_edit_no_mask(
    client: Client, worker: FakeWorker, streaming: bool
) -> None:
    worker.edit_kinds = frozenset({"inpaint", "edit", "generate"})

    def ask(*inputs: object, **settings: object) -> EditResult:
        if not streaming:
            return client.edit(*inputs, "x", **settings)  # type: ignore[arg-type]
        *_, last = client.edit_stream(*inputs, "x", **settings)  # type: ignore[arg-type]
        assert isinstance(last, Final)
        return last.result

    edited = ask(IMAGES[0], None, strength=0.5)
    assert (edited.meta["kind"], edited.image.size) == ("edit", SIZE[::-1])
    picture = ask(None, None, size="48x32")
    assert (picture.meta["kind"], picture.image.size) == ("generate", (48, 32))
    assert picture.meta["template_id"] is None
    assert (np.asarray(picture.image) == PAINT).all()


def test_a_picture_is_made_by_its_prompt(client: Client, worker: FakeWorker) -> None:
    worker.edit_kinds = frozenset({"generate"})
    result = client.generate("a red star", "48x32", seed=7)
    assert (result.seed, result.image.size) == (7, (48, 32))
    assert client.generate("a red star").image.size == (128, 128)
    (request, _) = worker.requests
    assert (request["IMAGE"], request["MASK"], request["PROMPT"]) == (b"", b"", b"a red star")
    assert json.loads(request["SETTINGS"]) == {"size": "48x32", "seed": 7}
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.size"):
        client.generate("a red star", "48 x 32")
    with pytest.raises(InvalidRequest, match="MASK: is missing"):
        client.edit(IMAGES[0], prompt="a red star")


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        (SOURCE, MASK),
        (np.dstack([SOURCE, MASK]), MASK > 0),
        (np.asfortranarray(SOURCE), MASK[..., None]),
    ],
)
def test_arrays_are_taken(client: Client, image: np.ndarray, mask: np.ndarray) -> None:
    check_picture(client.edit(image, mask, "x").image)


@pytest.mark.parametrize(
    "array",
    [
        SOURCE / 255,
        SOURCE.astype(np.int64),
        SOURCE[0, 0],
        SOURCE[..., :2],
        SOURCE[:0],
        SOURCE[None],
    ],
)
def test_an_array_that_is_no_picture_is_named(client: Client, array: np.ndarray) -> None:
    with pytest.raises(InvalidRequest, match=r"mask: is an array of .*; accepted: uint8 from 0"):
        client.edit(SOURCE, array, "x")
    with pytest.raises(InvalidRequest, match="image: is an array of"):
        client.register(array)


def test_colours_of_pil_images_travel_both_ways(client: Client, worker: FakeWorker) -> None:
    wide = Image.fromarray(SOURCE)
    wide.info["icc_profile"] = rgb_profile(((0.68, 0.32), (0.265, 0.69), (0.15, 0.06)))
    assert client.edit(wide, MASK, "x").image.info["icc_profile"] == wide.info["icc_profile"]
    linear = Image.open(io.BytesIO(png(SOURCE, 2, before=((b"gAMA", struct.pack(">I", 100_000)),))))
    client.edit(linear, MASK, "x")
    assert dict(chunks_of(worker.requests[-1]["IMAGE"]))[b"gAMA"] == struct.pack(">I", 100_000)
    inks = Image.fromarray(SOURCE).convert("CMYK")
    inks.info["icc_profile"] = cmyk_profile()
    client.edit(inks, MASK, "x")
    image = Image.open(io.BytesIO(worker.requests[-1]["IMAGE"]))
    assert (image.mode, image.info.get("icc_profile")) == ("RGB", None)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(inks.convert("RGB"))).mean() > 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("encoding", ["raw", "base64"])
def test_every_answer_format_is_read(client: Client, kind: str, encoding: str) -> None:
    settings = {"output_format": kind.lower(), "output_encoding": encoding}
    result = client.edit(*IMAGES, "x", **settings)
    assert Image.open(io.BytesIO(result.encoded)).format == kind
    if kind != "JPEG":
        check_picture(result.image)


def test_a_template_stands_in_for_the_image(client: Client, worker: FakeWorker) -> None:
    name = client.register(Image.fromarray(SOURCE))
    assert name == template_id(SOURCE)
    [listed] = client.control("templates")["templates"]
    assert (listed["template_id"], listed["registered"]) == (name, True)
    check_picture(client.edit(None, IMAGES[1], "x", template_id=name).image)
    client.control("evict", template_id=name)
    with pytest.raises(TemplateNotFound, match=name):
        client.edit(None, IMAGES[1], "x", template_id=name)


def test_control_asks_the_worker(client: Client) -> None:
    assert client.control("status")["worker"] == "fake-0"
    assert client.cancel("in-flight")
    assert not client.cancel("unknown")
    with pytest.raises(InvalidRequest, match=r"OP\.op"):
        client.control("dance")


def test_headers_are_sent_with_every_call(worker: FakeWorker) -> None:
    with Client(worker.url, headers={"x-api-key": "k"}) as client:
        client.edit(*IMAGES, "x")
        client.control("status")
    assert [headers["x-api-key"] for headers in worker.metadata] == ["k", "k"]


def test_threads_share_a_client(worker: FakeWorker, client: Client) -> None:
    worker.step_s = 0.02
    with ThreadPoolExecutor(6) as pool:
        seeds = list(pool.map(lambda seed: client.edit(*IMAGES, "x", seed=seed).seed, range(12)))
    assert seeds == list(range(12))


# Streams


@pytest.mark.parametrize("trailing_empty", [False, True])
def test_a_stream_tells_steps_previews_and_the_end(trailing_empty: bool) -> None:
    with FakeServer(trailing_empty=trailing_empty) as worker, Client(worker.url) as client:
        events = list(
            client.edit_stream(*IMAGES, "x", num_inference_steps=4, preview_every=2, seed=3)
        )
        assert worker.finished.wait(30)
    assert [type(event) for event in events] == [
        Progress,
        Progress,
        Preview,
        Progress,
        Progress,
        Final,
    ]
    steps = [(event.step, event.steps) for event in events if isinstance(event, Progress)]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(e.image.size == SIZE[::-1] for e in events if isinstance(e, Preview))
    assert isinstance(events[-1], Final)
    check_picture(events[-1].result.image)
    assert events[-1].result.seed == 3
    assert worker.requests[0]["model_name"] == b"edit_stream"
    assert not worker.withdrawn.is_set()


def test_progress_can_be_left_out(client: Client) -> None:
    events = list(client.edit_stream(*IMAGES, "x", progress=False))
    assert [type(event) for event in events] == [Final]


def test_a_stream_is_refused_before_it_is_iterated(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"SETTINGS\.stepz"):
        client.edit_stream(*IMAGES, "x", stepz=4)


def test_a_stream_that_just_ends_is_an_error() -> None:
    with FakeServer(hang_up=True) as worker, Client(worker.url) as client:
        events = client.edit_stream(*IMAGES, "x", num_inference_steps=2)
        assert next(events) == Progress(1, 2)
        with pytest.raises(ServerUnavailable, match="before the final answer"):
            next(events)


# Cancel


def test_closing_a_stream_cancels_on_the_server() -> None:
    with FakeServer(step_s=0.2) as worker, Client(worker.url) as client:
        events = client.edit_stream(*IMAGES, "x", num_inference_steps=50)
        assert next(events) == Progress(1, 50)
        events.close()
        assert worker.withdrawn.wait(30)


def test_leaving_a_stream_to_the_collector_cancels_on_the_server() -> None:
    with FakeServer(step_s=0.2) as worker, Client(worker.url) as client:
        for event in client.edit_stream(*IMAGES, "x", num_inference_steps=50):
            assert event == Progress(1, 50)
            break
        assert worker.withdrawn.wait(30)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_interrupt_cancels_an_edit_on_the_server(streaming: bool) -> None:
    with FakeServer(step_s=30) as worker, Client(worker.url) as client:

        def interrupt() -> None:
            worker.started.wait(30)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            ask(client, streaming)
        assert worker.withdrawn.wait(30)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_interrupt_while_a_call_starts_does_not_hang_the_client(
    monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """Between the start of a call and of gRPC's thread for it, as a real Ctrl-C was seen to be."""
    real, interrupted = grpc._channel._run_channel_spin_thread, []

    def spin(state: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            interrupted.append(True)
            signal.raise_signal(signal.SIGINT)
        real(state)

    monkeypatch.setattr(grpc._channel, "_run_channel_spin_thread", spin)
    with FakeServer(step_s=30) as worker:
        client = Client(worker.url)
        with pytest.raises(KeyboardInterrupt):
            ask(client, streaming)
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        assert not worker.started.is_set() or worker.withdrawn.wait(30)
    assert interrupted


def test_closing_the_client_ends_edits_in_flight() -> None:
    with FakeServer(step_s=30) as worker:
        client = Client(worker.url)
        closer = threading.Thread(target=lambda: (worker.started.wait(30), client.close()))
        closer.start()
        with pytest.raises(Cancelled):
            client.edit(*IMAGES, "x")
        closer.join()
        assert worker.withdrawn.wait(30)


# Errors


@pytest.mark.parametrize("streaming", [False, True])
def test_timeouts_cancel_on_the_server(streaming: bool) -> None:
    with FakeServer(step_s=30) as worker, Client(worker.url) as client:
        with pytest.raises(DeadlineExceeded, match="no answer within the timeout"):
            ask(client, streaming, timeout=0.3)
        assert worker.withdrawn.wait(30)


@pytest.mark.parametrize("streaming", [False, True])
def test_nobody_there_is_unavailable(streaming: bool) -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers
        url = f"127.0.0.1:{bound_socket.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ServerUnavailable, match=url):
            ask(client, streaming)


def test_a_server_that_goes_away_is_unavailable_or_cancelled() -> None:
    server = FakeServer(step_s=0.05)
    with server as worker, Client(worker.url) as client:
        events = client.edit_stream(*IMAGES, "x", num_inference_steps=100)
        next(events)
        server._server.stop(0)
        with pytest.raises((ServerUnavailable, Cancelled)):
            for _ in events:
                pass


def test_grpcs_own_bound_on_calls_is_an_overload() -> None:
    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    behaviour = {"error": "Concurrent RPC limit exceeded!", "error_status": status}
    with (
        FakeServer(**behaviour) as worker,
        Client(worker.url) as client,
        pytest.raises(Overloaded, match="limit exceeded"),
    ):
        ask(client, False)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("text", "status", "kind"),
    [
        ("[OVERLOADED] the queue is full", grpc.StatusCode.UNAVAILABLE, Overloaded),
        ("[DEADLINE_EXCEEDED] too late", grpc.StatusCode.UNAVAILABLE, DeadlineExceeded),
        ("[CANCELLED] by an operator", grpc.StatusCode.CANCELLED, Cancelled),
        ("[ENGINE_FAILED] no heartbeat", grpc.StatusCode.INTERNAL, EngineFailed),
        ("[TEMPLATE_NOT_FOUND] gone", grpc.StatusCode.NOT_FOUND, TemplateNotFound),
        ("[ADAPTER_NOT_FOUND] gone", grpc.StatusCode.NOT_FOUND, AdapterNotFound),
        ("[INVALID_REQUEST] MASK: is bad", grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        ("Stub process is not healthy.", grpc.StatusCode.INTERNAL, EngineFailed),
    ],
)
def test_the_servers_errors_come_as_they_were_meant(
    text: str, status: grpc.StatusCode, kind: type[MaskserveError], streaming: bool
) -> None:
    behaviour = {"error": text, "error_status": status, "error_at_step": 1}
    with (
        FakeServer(**behaviour) as worker,
        Client(worker.url) as client,
        pytest.raises(MaskserveError) as caught,
    ):
        ask(client, streaming)
    assert type(caught.value) is kind
    assert text.partition("] ")[2] in str(caught.value)
    if text.startswith("[") and kind is not InvalidRequest:
        assert str(caught.value) == text


def test_an_unavailable_server_with_other_words_is_unavailable() -> None:
    behaviour = {"error": "going down", "error_status": grpc.StatusCode.UNAVAILABLE}
    with (
        FakeServer(**behaviour) as worker,
        Client(worker.url) as client,
        pytest.raises(ServerUnavailable, match=r"\[UNAVAILABLE\] .*going down"),
    ):
        client.edit(*IMAGES, "x")


def _bad_pictures() -> list[HostileCase]:
    return [case for case in hostile_cases() if case.field in ("IMAGE", "MASK")]


@pytest.mark.parametrize("streaming", [False, True])
def test_hostile_inputs_come_back_as_the_same_error(
    client: Client, worker: FakeWorker, streaming: bool
) -> None:
    for case in _bad_pictures():
        with pytest.raises(InvalidRequest) as caught:
            ask(client, streaming, case.inputs["IMAGE"], case.inputs["MASK"])
        assert caught.value.field == case.field, case.name
    assert len(worker.requests) > 40
    check_picture(client.edit(*IMAGES, "x").image)


def test_settings_are_refused_before_anything_is_sent(client: Client, worker: FakeWorker) -> None:
    for bad in ({"seed": -1}, {"strength": float("nan")}, {"stepz": 1}, {"seed": object()}):
        with pytest.raises(InvalidRequest, match="SETTINGS"):
            client.edit(*IMAGES, "x", **bad)
    assert worker.requests == []


def test_an_answer_that_is_no_image_is_the_servers_fault() -> None:
    with (
        FakeServer(garble=True) as worker,
        Client(worker.url) as client,
        pytest.raises(EngineFailed, match="not an image"),
    ):
        client.edit(*IMAGES, "x")


def test_invalid_requests_keep_field_and_text_over_the_wire() -> None:
    error = InvalidRequest("SETTINGS.seed", "-1 is out of range", "0 to 9")
    parsed = from_text(f"in ensemble 'edit_pipeline', {error}")
    assert isinstance(parsed, InvalidRequest)
    assert (parsed.field, str(parsed)) == ("SETTINGS.seed", str(error))


def test_missing_files_are_plain_os_errors(client: Client, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        client.edit(tmp_path / "none.png", IMAGES[1], "x")


def test_the_public_names_are_those_that_exist() -> None:
    assert maskserve_client.__all__ == sorted(maskserve_client.__all__)
    for name in maskserve_client.__all__:
        assert getattr(maskserve_client, name) is not None
