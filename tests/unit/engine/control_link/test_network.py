"""The link between a denoiser and a ControlNet service of another host: TCP, here on loopback.

What becomes of edits when either ends: test_lost_service.py; over two namespaces, with links that
are cut and slow: tests/e2e/test_two_hosts.py.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs

from maskserve_common.config import ConfigError
from maskserve_common.errors import EngineFailed, Overloaded
from maskserve_engine.base.job import ControlInput
from maskserve_engine.control_link import network
from maskserve_engine.control_link.network import NetworkMessages, Wire, connection_to, room_for
from maskserve_engine.control_link.services import ControlService
from maskserve_engine.control_link.slots import LocalSlot, RowSlots
from maskserve_engine.control_link.transport import (
    AddedPart,
    Attached,
    Lost,
    RequestedRow,
    ResidualsRequest,
    SocketMessages,
)
from maskserve_engine.control_service.service import ControlNetService
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.loop.local_executor import LocalExecutor
from maskserve_engine.requests.executor import PlainRowSpec, StepInput
from maskserve_engine.spec.control_nets import ControlNets, content_of
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.support.control_service import DirectCalls, Service, over_tcp
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextmanager
def wires() -> Iterator[tuple[Wire, Wire]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = Wire(socket.create_connection(listener.getsockname()))
        other = Wire(listener.accept()[0])
    yield wire, other
    for wire_end in (wire, other):
        wire_end.close()


@pytest.fixture
def service(tiny_inpaint: Path, tmp_path: Path) -> Iterator[Service]:
    new_service = Service(tiny_inpaint, tmp_path, {"one": random_net(1, 1, 1)})
    yield new_service
    new_service.close()


def attached(service: Service) -> Attached:
    calls = DirectCalls(service.front, service.triton)
    return msgspec.convert(calls.call({"op": "attach", "dtype": "float32"}, b"", 5.0), Attached)


def test_tensors_come_as_they_were_sent() -> None:
    rng = fresh_rng()
    shapes = [tuple(rng.integers(1, 40, rng.integers(1, 4)).tolist()) for _ in range(12)]
    shapes += [(0, 4), (700, 3000)]  # more than a socket holds
    tos = [torch.randn(shape).to(DTYPES[at % 3]) for at, shape in enumerate(shapes)]
    tos.append(torch.randn(6, 5).T)
    with wires() as (one, other):
        sender = threading.Thread(target=one.send, args=(b"message", tos))
        sender.start()
        assert other.receive() == b"message"
        for tensor in tos:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            other.fill(copy)
            assert torch.equal(copy, tensor)
        sender.join()
        one.send(b"again")
        assert other.receive() == b"again"


def test_one_that_ends_is_told_wherever_the_other_waits() -> None:
    for sent, waits in (
        (b"", lambda wire: wire.receive()),
        (b"\0\0\0\x09half", lambda wire: wire.receive()),
        (b"1234", lambda wire: wire.fill(torch.empty(64))),
    ):
        with wires() as (one, other):
            one._socket.sendall(sent)
            threading.Timer(0.05, one.end).start()
            with pytest.raises(Lost, match="it has ended"):
                waits(other)  # type: ignore[no-untyped-call]


def test_a_message_has_bounds() -> None:
    with wires() as (one, other):
        one._socket.sendall((2**20 + 1).to_bytes(4, "big"))
        with pytest.raises(Lost):
            other.receive()


def requested_row(shape: Any, dtype: str = "float32", slot: int = 0) -> RequestedRow:
    return RequestedRow("row", 0, 1, slot, shape, dtype)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (requested_row((2**24 + 1,)), "bytes of one row"),
        (AddedPart("row", 0, 0, 0, 0, (2**30 + 1,), "bfloat16"), "bytes of one row"),
        (requested_row((-1, -4)), "no tensor"),
        (requested_row((1,), "load"), "no tensor"),
        (requested_row((1,), "no such"), "no tensor"),
        (requested_row((1,), slot=3), "slot"),
        (requested_row((1,), slot=-1), "slot"),
    ],
)
def test_so_have_tensors(part: Any, message: str) -> None:
    with pytest.raises(Lost, match=message):
        room_for(part, RowSlots.local())


def test_what_a_closed_row_is_sent_is_read_and_forgotten() -> None:
    assert room_for(AddedPart("row", 0, 3, 1, 64, (5, 2), "bfloat16"), None).shape == (5, 2)


def test_a_held_slot_tells_what_has_not_come() -> None:
    slot = LocalSlot()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    slot.write(64, x)
    view = slot.read(64, (3, 4), torch.float32)
    assert torch.equal(view, x)
    for offset, shape, dtype in (
        (0, (3, 4), torch.float32), (64, (4, 3), torch.float32), (64, (3, 4), torch.float16),
    ):  # fmt: skip
        with pytest.raises(OSError, match="has not come"):
            slot.read(offset, shape, dtype)
    slot.write(64, y[:2])
    assert torch.equal(view, x)
    assert torch.equal(slot.read(64, (2, 4), torch.float32), y[:2])


@pytest.mark.parametrize(
    ("service", "is_local"),
    [
        ("127.0.0.1:8005", True), ("localhost:8005", True), ("[::1]:8005", True),
        ("127.9.9.9:1", True), ("198.18.77.2:8005", False), ("nets:8005", False),
        ("[2001:db8::1]:8005", False),
    ],
)  # fmt: skip
def test_the_address_says_by_which_way(service: str, is_local: bool) -> None:
    connects: Any = connection_to(service, torch.device("cpu"))
    assert connects.func is (SocketMessages if is_local else NetworkMessages)


@pytest.mark.parametrize("adapters", ["exact", "fast"])
def test_edits_are_the_same_bytes_by_either_way(
    service: Service, tiny_inpaint: Path, adapters: str
) -> None:
    config, rng = config_of(tiny_inpaint), fresh_rng()
    encoder, adapter = load_encoder(config), load_adapter(config)
    jobs = []
    for name in ("a", "b"):
        case = random_case(rng, num_inference_steps=4, strength=1.0, adapters=adapters)
        picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
        moments = encoder.encode(picture, case.mask, "").moments
        control = ControlInput(service.versions["one"], picture, moments=moments)
        jobs.append(replace(encode_case(encoder, case, name), controls=(control,)))
    latents = []
    for connect in (SocketMessages, over_tcp):
        executor = LocalExecutor(adapter, None, service.denoiser(connect=connect))
        for job in jobs:
            executor.make(job.request.request_id, PlainRowSpec(job))
        results: list[Any] = []
        for number in range(4):
            executor.step(StepInput(number + 1, ("a", "b")), results.append)
            assert not results[-1].failed
        latents.append([executor.result(name).array() for name in ("a", "b")])
        executor.close()
    assert not np.array_equal(latents[0][0], latents[0][1])
    for one, other in zip(*latents, strict=True):
        assert np.array_equal(one, other)


def refused(messages: Callable[[], Any]) -> str:
    with pytest.raises(Lost) as raises:
        messages()
    return str(raises.value)


def test_whoever_has_no_key_of_a_session_is_turned_away(service: Service) -> None:
    session = attached(service)
    for other in (
        msgspec.structs.replace(session, key="0" * 64),
        msgspec.structs.replace(session, session="1-0"),
        msgspec.structs.replace(session, session="x" * 500),
    ):
        assert "does not know this session" in refused(lambda at=other: over_tcp(at))
    over_tcp(session).close()


def test_a_service_that_takes_none_of_other_hosts_says_so(service: Service) -> None:
    closed = msgspec.structs.replace(attached(service), port=0)
    assert "[controls] listen" in refused(lambda: over_tcp(closed))
    with pytest.raises(Overloaded, match=r"\[controls\] listen"):
        service.denoiser(
            connect=lambda at: NetworkMessages("127.0.0.1", msgspec.structs.replace(at, port=0))
        )


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:x", "127.0.0.1:99999", "192.0.2.1:0"])
def test_an_address_that_cannot_be_had_is_named(
    service: Service, tmp_path: Path, listen: str
) -> None:
    controls = msgspec.structs.replace(service.config.controls, listen=listen)
    config = msgspec.structs.replace(service.config, controls=controls)
    with pytest.raises(ConfigError, match=r"\[controls\] listen"):
        ControlNetService(config, tmp_path / "other")


def test_strangers_hold_up_nobody_and_leave_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = attached(service)
    remote = service.front.service.remote
    assert remote is not None
    files = len(os.listdir("/proc/self/fd"))
    silent = [socket.create_connection(("127.0.0.1", at.port)) for _ in range(3)]
    for first in (b"\xff" * 9, b"\0\0\0\x02ab", (2**31 - 1).to_bytes(4, "big"), b"GET / HTTP/1.0"):
        with socket.create_connection(("127.0.0.1", at.port)) as stranger:
            stranger.sendall(first)
            service.denoiser(connect=over_tcp).close()
    for connection in silent:
        connection.close()
    eventually("nothing is left of them", lambda: not remote.links)
    eventually("no file is", lambda: len(os.listdir("/proc/self/fd")) <= files)


def test_so_many_may_connect_and_no_more(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskserve_engine.control_service.remote._MOST_LINKS", 1)
    connection, remote = over_tcp(attached(service)), service.front.service.remote
    # Its proof is counted just after its welcome is sent; until then another displaces it.
    eventually("its proof counts", lambda: remote is not None and not remote.unproven)
    assert "does not know this session" in refused(lambda: over_tcp(attached(service)))
    connection.close()


def test_strangers_that_hold_all_places_give_way(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maskserve_engine.control_service.remote._MOST_LINKS", 4)
    at, remote = attached(service), service.front.service.remote
    assert remote is not None
    with ExitStack() as exit_stack:
        silent = [
            exit_stack.enter_context(socket.create_connection(("127.0.0.1", at.port)))
            for _ in range(9)
        ]
        eventually("they hold all", lambda: len(remote.unproven) == 4)
        first, second = over_tcp(at), over_tcp(at)
        # Now this host is known: its oldest that has shown nothing gives way to its next.
        third = over_tcp(at)
        assert len(remote.links) <= 4
        assert not any(wire.ended() for wire in (first, second, third))
        eventually("no stranger is left", lambda: not remote.unproven)
        for stranger in silent:
            stranger.settimeout(5)
            with suppress(OSError):
                while stranger.recv(4096):
                    pass
        for stranger in (first, second, third):
            stranger.close()


def test_who_shows_no_key_in_time_is_ended_however_it_dawdles(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maskserve_engine.control_service.remote._PROOF_S", 1.5)
    at, remote = attached(service), service.front.service.remote
    assert remote is not None
    with socket.create_connection(("127.0.0.1", at.port)) as dawdler:
        begin, sent = time.monotonic(), 0
        with suppress(OSError):
            for byte in (100).to_bytes(4, "big") + b"x" * 99:  # in 20 s
                dawdler.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.2)
                if not remote.links and time.monotonic() - begin > 0.2:
                    break
        assert sent < 100
        assert time.monotonic() - begin > 0.2
    wire = over_tcp(at)
    time.sleep(1.7)
    assert not wire.ended()  # the limit is of the proof alone
    wire.close()


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        msgspec.msgpack.encode(ResidualsRequest(1, 1, (requested_row((2**40,)),))),
        msgspec.msgpack.encode(ResidualsRequest(1, 1, (requested_row((2,), "load"),))),
    ],
)
def test_a_session_that_breaks_the_rules_ends(service: Service, message: bytes) -> None:
    other = over_tcp(attached(service))
    broken: Any = over_tcp(attached(service))
    broken._wire.send(message)
    with pytest.raises(Lost, match="has ended"):
        broken.next(30.0)
    broken.close()
    assert not other.ended()
    other.close()
    sessions = service.front.service.sessions
    eventually("both sessions are over", lambda: sessions.counts()["sessions"] == 0)


def test_a_peer_that_stops_in_a_message_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel tells; of a link that is cut, see tests/e2e/test_two_hosts.py."""
    stalls = tuple(
        (level, option, struct.pack("ll", 0, 200_000) if isinstance(value, bytes) else value)
        for level, option, value in network._OPTIONS
    )
    monkeypatch.setattr(network, "_OPTIONS", stalls)
    with wires() as (one, other):
        one.send(b"message")
        assert other.receive() == b"message"
        with pytest.raises(Lost, match="has ended"):
            other.fill(torch.empty(4))
        with pytest.raises(Lost, match="reads nothing"):
            one.send(b"more", [torch.zeros(2**25)])


def nets_of_a_worker(service: Service, folder: Path) -> ControlNets:
    """Those of a host of its own, which has copied the service's."""
    shutil.copytree(service.config.controls.folder, folder, copy_function=shutil.copyfile)
    for file in folder.glob("*/*"):
        os.utime(file, ns=(1, 1))
    controls = structs.replace(service.config.controls, folder=str(folder))
    config = structs.replace(service.config, controls=controls)
    return ControlNets(config, load_spec(config.model.path))


def test_a_worker_has_copies_of_the_services_nets(service: Service, tmp_path: Path) -> None:
    nets = nets_of_a_worker(service, tmp_path / "copies")
    worker = ControlService(
        DirectCalls(service.front, service.triton), torch.device("cpu"), "float32", 10.0, over_tcp
    )
    net = nets.find("one", "x")
    assert worker.load("one", net.version, content_of(net.path), 60.0)["digest"]
    file = tmp_path / "copies" / "one" / "config.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(EngineFailed, match="has another version of ControlNet one than the worker"):
        worker.load("one", "another", content_of(net.path), 60.0)


def test_two_names_of_the_same_files_are_one_net_to_the_service(service: Service) -> None:
    """It is dropped with the last of them, and rows open by the other one until then."""
    folder = Path(service.config.controls.folder)
    shutil.copytree(folder / "one", folder / "copy")
    calls = DirectCalls(service.front, service.triton)
    worker = ControlService(calls, torch.device("cpu"), "float32", 10.0, over_tcp)
    service.load(worker, "one")
    worker.load("copy", "of the copy", content_of(folder / "copy"), 60.0)
    worker.drop("of the copy")
    worker.drop(service.versions["one"])
    assert worker._link is not None
    worker._link._pool.submit(int).result()  # those told before have been made
    assert calls.ops.count("drop") == 1
    worker.close()
