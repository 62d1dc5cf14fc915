"""A ControlNet service that ends, says nothing or fails: who is told what, and who goes on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError, Overloaded
from maskserve_common.files.sockets import short_path
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.control_link.served import RowRequest, request_residuals
from maskserve_engine.control_link.services import ControlService, ControlServices
from maskserve_engine.control_link.slots import RowSlots, SharedSlot
from maskserve_engine.control_link.transport import (
    Answered,
    Attached,
    Lost,
    ResidualsRequest,
    SocketMessages,
)
from maskserve_engine.control_service.service import ControlNetService
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.loop.local_executor import LocalExecutor
from maskserve_engine.requests.executor import PlainRowSpec, StepInput, StepResult
from maskserve_engine.start.assembly import load_engine
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.support.control_service import DirectCalls, Service, over_tcp
from tests.support.draws import fresh_rng
from tests.support.engines import edit
from tests.support.eventually import eventually

both_ways = pytest.mark.parametrize("connect", [SocketMessages, over_tcp], ids=["memory", "tcp"])


class Silent:
    """A frozen service's end: it takes what it is sent, and says nothing."""

    lent = None

    def __init__(self, attached: Attached) -> None:
        self.requests: list[ResidualsRequest] = []

    def slots(self, row: str) -> RowSlots:
        return RowSlots.local()

    def request(self, request: ResidualsRequest) -> None:
        self.requests.append(request)

    def next(self, patience_s: float) -> Answered:
        time.sleep(max(patience_s, 0.0))
        raise Lost("it has not answered in time")

    def has_next(self) -> bool:
        return False

    def ended(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Site:
    def __init__(self, model: Path, folder: Path) -> None:
        config = config_of(model)
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.model, self.folder = model, folder
        self.service = Service(model, folder, {"one": random_net(1, 1, 1)})

    def jobs(
        self, adapters: str = "exact", num_inference_steps: int = 4
    ) -> tuple[EditJob, EditJob]:
        """One with control, one without."""
        rng = fresh_rng()
        steps = num_inference_steps
        case = random_case(rng, num_inference_steps=steps, strength=1.0, adapters=adapters)
        picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
        moments = self.encoder.encode(picture, case.mask, "").moments
        control = ControlInput(self.service.versions["one"], picture, moments=moments)
        with_control = encode_case(self.encoder, case, "with")
        return (
            replace(with_control, controls=(control,)),
            encode_case(self.encoder, case, "without"),
        )


@pytest.fixture
def site(tiny_inpaint: Path, tmp_path: Path) -> Iterator[Site]:
    new_site = Site(tiny_inpaint, tmp_path)
    yield new_site
    new_site.service.close()


def step(executor: LocalExecutor, *rows: str) -> StepResult:
    step_results: list[StepResult] = []
    executor.step(StepInput(1, rows), step_results.append)
    return step_results[0]


def executor_of(site: Site, services: ControlServices, jobs: Any) -> LocalExecutor:
    executor = LocalExecutor(site.adapter, None, services)
    for job in jobs:
        executor.make(job.request.request_id, PlainRowSpec(job))
    return executor


def alone(site: Site, job: EditJob) -> Any:
    row: Any = site.adapter.dense_row(job)
    while row.step < row.steps:
        site.adapter.step([row], None)
    return row.result().array()


def check_only_it_fails(site: Site, executor: LocalExecutor, jobs: Any, named: str) -> None:
    result = step(executor, "with", "without")
    assert set(result.failed) == {"with"}
    assert isinstance(result.failed["with"], EngineFailed)
    assert named in str(result.failed["with"])
    executor.release("with")
    while step(executor, "without").rows[0].done < 4:
        pass
    pixels = executor.result("without").array()
    assert np.allclose(pixels, alone(site, jobs[1]), atol=1e-4)


@both_ways
@pytest.mark.parametrize("adapters", ["exact", "fast"])
def test_one_that_ends_fails_its_edits_in_words_and_batch_mates_go_on(
    site: Site, adapters: str, connect: Any
) -> None:
    jobs = site.jobs(adapters)
    service = site.service.denoiser(connect=connect)
    executor = executor_of(site, service, jobs)
    assert not step(executor, "with", "without").failed
    site.service.front.close()
    check_only_it_fails(site, executor, jobs, "ControlNet service was lost")
    assert not service.holds(site.service.versions["one"])


@pytest.mark.parametrize("adapters", ["exact", "fast"])
def test_one_that_is_frozen_fails_them_within_its_patience(site: Site, adapters: str) -> None:
    jobs = site.jobs(adapters)
    calls = DirectCalls(site.service.front, site.service.triton)
    service = ControlServices.of(ControlService(calls, torch.device("cpu"), "float32", 0.3, Silent))
    site.service.load(service, "one")
    executor = executor_of(site, service, jobs)
    begin = time.monotonic()
    check_only_it_fails(site, executor, jobs, "has not answered in time")
    assert time.monotonic() - begin < 30.0


def test_one_that_ends_as_a_row_is_opened_is_named(site: Site) -> None:
    class Unreachable(DirectCalls):
        def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
            if op["op"] == "open":
                raise Overloaded("the ControlNet service does not answer; try again later")
            return super().call(op, arrays, limit_s)

    jobs = site.jobs()
    calls = Unreachable(site.service.front, site.service.triton)
    service = ControlServices.of(ControlService(calls, torch.device("cpu"), "float32", 5.0))
    site.service.load(service, "one")
    executor = executor_of(site, service, jobs)
    check_only_it_fails(site, executor, jobs, "ControlNet service does not answer")
    executor.close()


def test_losing_it_again_and_again_is_no_fault_of_the_model(site: Site) -> None:
    """Steps in which only such rows fail do not end the worker."""
    jobs = site.jobs()
    service = site.service.denoiser()
    executor = executor_of(site, service, jobs[:1])
    site.service.front.close()
    for _ in range(5):
        assert set(step(executor, "with").failed) == {"with"}


@both_ways
def test_one_that_ends_with_nobody_waiting_is_noticed(site: Site, connect: Any) -> None:
    """Or its ControlNets would be held to be there for good, and no edit bring them anew."""
    service, version = site.service.denoiser(connect=connect), site.service.versions["one"]
    site.service.load(service, "one")
    assert service.holds(version)
    site.service.front.close()
    eventually("it is noticed", lambda: not service.holds(version))


def test_a_denoiser_attaches_again_once_a_new_one_is_there(site: Site, tmp_path: Path) -> None:
    jobs, version = site.jobs(), site.service.versions["one"]
    service = site.service.denoiser()
    executor = executor_of(site, service, jobs)
    step(executor, "with", "without")
    site.service.front.close()
    assert set(step(executor, "with", "without").failed) == {"with"}
    executor.release("with")
    with pytest.raises(EngineFailed, match="service was lost"):
        service.open(site.adapter.opening(site.adapter.dense_row(jobs[0]), jobs[0]))  # type: ignore[arg-type]
    again = Service(site.model, tmp_path / "again", {})
    again.config = site.service.config
    service.services[0]._calls._front = again.front  # type: ignore[attr-defined]
    with pytest.raises(MaskserveError):
        site.service.load(service, "one")  # its folder has no such ControlNet
    assert not service.holds(version)
    again.close()


@both_ways
def test_a_session_is_shared_while_its_service_lives_and_anew_behind_another(
    site: Site, tmp_path: Path, connect: Any
) -> None:
    """Rows of the one that came after it get what their nets say."""
    jobs, version = site.jobs(), site.service.versions["one"]
    service = site.service.denoiser(connect=connect)
    calls: Any = service.services[0]._calls
    site.service.load(service, "one")
    assert calls.ops == ["attach", "load", "health", "load"]  # asked whether it is there still
    executor = executor_of(site, service, jobs)
    again = Service(site.model, tmp_path / "again", {"one": random_net(1, 1, 1)})
    site.service.front.close()
    assert set(step(executor, "with", "without").failed) == {"with"}
    executor.release("with")
    calls._front, calls._triton, calls.ops = again.front, again.triton, []
    service.load("one", version, again.contents["one"], 60.0)
    assert calls.ops == ["attach", "load"]
    assert service.holds(version)
    executor.make("with", PlainRowSpec(jobs[0]))
    assert not step(executor, "with", "without").failed
    service.close()
    again.close()


@both_ways
def test_what_it_cannot_do_costs_the_row_and_not_the_session(site: Site, connect: Any) -> None:
    jobs = site.jobs()
    service = site.service.denoiser(connect=connect)
    executor = executor_of(site, service, jobs)
    served = executor.rows["with"].served
    assert served is not None
    [row] = served.link_rows
    row.await_opened()
    site.service.front.service.sessions.close_row(row.link.session, row.name)
    result = step(executor, "with", "without")
    assert "not open" in str(result.failed["with"])
    assert service.holds(site.service.versions["one"])
    executor.release("with")
    executor.make("with", PlainRowSpec(jobs[0]))
    assert not step(executor, "with").failed


def slots(site: Site) -> list[Path]:
    """Files in memory that the service shares with its denoisers; beside them lies its socket."""
    return [path for path in (site.service.folder / "controls").iterdir() if not path.is_socket()]


@both_ways
def test_a_denoiser_that_ends_leaves_nothing(site: Site, connect: Any) -> None:
    jobs = site.jobs()
    executor = executor_of(site, site.service.denoiser(connect=connect), jobs)
    step(executor, "with", "without")
    assert slots(site)
    executor.close()
    sessions = site.service.front.service.sessions
    nothing = {"sessions": 0, "rows": 0, "nets": 1}
    eventually("its rows are gone", lambda: sessions.counts() == nothing)
    eventually("their slots are gone", lambda: not slots(site))


@both_ways
def test_a_denoiser_that_reads_nothing_for_long_does_not_hold_up_its_service(
    site: Site, connect: Any
) -> None:
    job = site.jobs(num_inference_steps=150)[0]
    service = site.service.denoiser(connect=connect)
    row: Any = site.adapter.dense_row(job)
    opening = site.adapter.opening(row, job)
    assert opening is not None
    served = service.open(opening)
    for at in range(150):
        request_residuals([RowRequest(served, at, row.latents, len(row.latents))], 1)
        time.sleep(0.02)  # the service keeps up, until nobody takes what it says
    assert served.after(0) is not None
    service.close()


def test_one_that_ends_behind_the_last_step_that_needs_it_harms_nothing(site: Site) -> None:
    jobs = site.jobs()
    [control] = jobs[0].controls
    jobs = replace(jobs[0], controls=(replace(control, end=0.5),)), jobs[1]
    service = site.service.denoiser()
    executor = executor_of(site, service, jobs)
    for _ in range(2):
        assert not step(executor, "with", "without").failed
    site.service.front.close()
    for _ in range(2):
        assert not step(executor, "with", "without").failed


@pytest.mark.parametrize("name", ["../nets/one", "a/b", "", "x" * 300])
def test_a_row_is_no_path(site: Site, name: str) -> None:
    jobs = site.jobs()
    opening = site.adapter.opening(site.adapter.dense_row(jobs[0]), jobs[0])
    assert opening is not None
    with pytest.raises(InvalidRequest, match=r"OP\.row: is not the name of a row"):
        site.service.front.service.sessions.open("s", name, opening)


def test_numbers_of_another_type_are_refused(site: Site) -> None:
    with pytest.raises(InvalidRequest, match=r"OP\.dtype: is bfloat16"):
        site.service.front.service.sessions.attach("bfloat16")


def test_a_slot_grows_and_tells_what_is_not_there(tmp_path: Path) -> None:
    writer, reader = SharedSlot(tmp_path / "slot"), SharedSlot(tmp_path / "slot")
    with pytest.raises(OSError, match="slot"):
        reader.read(0, (4,), torch.float32)
    for offset in (0, 2**16, 64):
        x = torch.randn(3, 5, dtype=torch.float64).to(torch.bfloat16)
        writer.write(offset, x)
        assert torch.equal(reader.read(offset, (3, 5), torch.bfloat16), x)
    with pytest.raises(OSError, match="shorter"):
        reader.read(2**20, (4,), torch.float32)


def test_what_is_written_behind_the_end_of_its_row_leaves_no_file(tmp_path: Path) -> None:
    """A row may be closed while the service computes for it."""
    slot = SharedSlot(tmp_path / "slot")
    slot.remove()
    slot.write(0, torch.ones(3))
    assert not list(tmp_path.iterdir())


# What comes to the service's socket


def attached(site: Site) -> dict[str, Any]:
    calls = DirectCalls(site.service.front, site.service.triton)
    return calls.call({"op": "attach", "dtype": "float32"}, b"", 5.0)


@pytest.mark.parametrize("first", [b"\xff\xfe", b"nobody", b"\x93" * 5000, b""])
def test_whatever_comes_ends_its_own_session_alone(site: Site, first: bytes) -> None:
    denoiser = site.service.denoiser()
    path = Path(attached(site)["socket"])
    assert path.parent == site.service.folder / "controls", "what the supervisor clears has it"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        with short_path(path.parent) as short:
            stranger.connect(f"{short}/{path.name}")
        stranger.settimeout(10.0)
        if first:
            stranger.send(first)
            assert stranger.recv(10) == b""
    for _ in range(3):  # it goes on
        site.service.denoiser().close()
    denoiser.close()


def test_a_session_s_bad_messages_end_it_alone(site: Site) -> None:
    denoiser = site.service.denoiser()
    path = Path(attached(site)["socket"])
    for message in (b"\xff" * 100, b"\x91" * 60_000, b"\xc1"):
        session = attached(site)["session"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            with short_path(path.parent) as short:
                stranger.connect(f"{short}/{path.name}")
            stranger.settimeout(10.0)
            stranger.send(session.encode())
            stranger.send(message)
            assert stranger.recv(10) == b""
    site.service.denoiser().close()
    denoiser.close()


@pytest.mark.parametrize("error", [SystemExit, MemoryError])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_whose_thread_has_died_ends(
    error: type[BaseException], site: Site, tmp_path: Path
) -> None:
    """Whatever it was: its process ends, and the supervisor starts another. `health` says so."""

    def dying(connected: socket.socket) -> Any:
        raise error

    ended = threading.Event()
    service = ControlNetService(
        site.service.config, tmp_path / "dying", connection=dying, ended=ended.set
    )
    assert service.problem == ""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
        short_path(tmp_path / "dying") as short,
    ):
        stranger.connect(f"{short}/socket")
        assert ended.wait(30.0)
    assert service.problem == "its thread has ended"
    service.close()


def test_an_edit_says_how_many_of_its_steps_asked_ahead(site: Site) -> None:
    service = site.service
    config = structs.replace(
        service.config,
        cache=structs.replace(service.config.cache, enabled=False),
        controls=structs.replace(service.config.controls, service="127.0.0.1:1"),
    )
    engine = load_engine(config, calls=lambda address: DirectCalls(service.front, service.triton))
    named = ResolvedControl(name="one", version=service.versions["one"])
    stale = []
    engine.start()
    try:
        for adapters in ("exact", "fast"):
            job, _ = site.jobs(adapters)
            request = replace(job.request, controls=(named,))
            stale.append(edit(engine, replace(job, request=request)).meta["controls_stale_steps"])
    finally:
        engine.close(1.0)
    assert stale == [0, 3]
    assert engine.counters["controlnet_stale_steps_total"] == 3
