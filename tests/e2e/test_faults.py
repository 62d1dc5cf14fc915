"""Whatever dies, stops or fails: clients are told, and the worker returns without a human.

docs/reliability.md lists these faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from maskserve_benchmarks.triton_calls import Stream
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess
from tests.support.eventually import eventually
from tests.support.faults.client_faults import (
    ClientFault,
    client_faults,
    freed_s,
    full_batch,
)
from tests.support.faults.repository import sabotaged_repository
from tests.support.faults.sabotage import PREVIEWS
from tests.support.faults.supervisor_faults import try_supervisor_kill
from tests.support.faults.worker_faults import (
    RETURN_BAR_S,
    WorkerFault,
    try_worker_fault,
    worker_faults,
)
from tests.support.faults.worker_site import Site

# Far more than a busy machine takes for the few steps until a row is freed. A row that is not freed
# ends by itself, which `freed_s` raises.
FREED_S = 20.0


@pytest.fixture(scope="module")
def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("faults")
    options = ServeOptions(
        model=str(model),
        base_port=free_base_port(),
        log_dir=folder / "logs",
        repositories=sabotaged_repository(folder),
    )
    with Supervisor(options) as supervisor:
        yield Site(supervisor.workers[0], side=64, steps=1000)


# test_serve.py kills a denoiser; tests/unit has an engine that gives up, processes that are gone or
# silent (worker/test_liveness.py), and who is restarted for it (tests/unit/serving).
@pytest.mark.slow
@pytest.mark.parametrize("fault", worker_faults(), ids=lambda fault: fault.name)
def test_clients_are_told_and_the_worker_returns(site: Site, fault: WorkerFault) -> None:
    trial = try_worker_fault(site, fault)
    assert trial.as_told, trial
    assert trial.serves_s <= trial.load_s + RETURN_BAR_S, trial
    assert not any("Traceback" in message for message in trial.messages), trial


@pytest.mark.slow
def test_a_killed_supervisor_is_back_as_soon(model: Path, tmp_path: Path) -> None:
    trial = try_supervisor_kill(str(model), tmp_path, side=64, steps=1000)
    assert trial.serves_s <= trial.load_s + RETURN_BAR_S, trial


@pytest.mark.slow  # tests/triton/test_frontend.py holds it with a fake of Triton
def test_previews_that_cannot_be_made_cost_the_edit_nothing(site: Site) -> None:
    order = site.worker.spec.files.runtime / PREVIEWS
    order.touch()
    try:
        with closing(Stream(site.worker.grpc_url)) as stream:
            settings = {"num_inference_steps": 40, "progress": True, "preview_every": 5}
            stream.send(site.inputs("blind", **settings))
            events = []
            while "final" not in events:
                events.append(stream.next(30)[1]["event"])
    finally:
        order.unlink()
    assert set(events) == {"progress", "final"}
    # An edit is counted out after its last response is sent.
    eventually("it is counted out", lambda: site.worker.in_flight() == 0)


@pytest.mark.parametrize("fault", client_faults(), ids=lambda fault: fault.name)
def test_a_client_that_leaves_frees_its_row(worker: WorkerProcess, fault: ClientFault) -> None:
    shared = Site(worker, side=256, steps=1000)
    with full_batch(shared, rows=3):
        assert freed_s(shared, fault) < FREED_S
