"""The guard against drift: cached edits made again without the cache, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from maskserve_common.contracts.settings import RequestId
from maskserve_common.observations import Observations
from maskserve_engine.base.job import EditJob, FinalEvent
from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.audits import Audit, Audits, drift_of
from maskserve_engine.start.assembly import assemble
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.support.eventually import eventually
from tests.support.sink import Sink


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


def job(encoder: Encoder, seed: int, name: str, **settings: Any) -> EditJob:
    case = random_case(np.random.default_rng(seed), strength=1.0, **settings)
    edit_job = encode_case(encoder, case, name)
    mask = np.zeros_like(edit_job.edit_mask)
    mask[:, :9] = 255
    return replace(edit_job, edit_mask=mask)


@pytest.fixture
def engine(tiny_fill: Path, encoder: Encoder, request: pytest.FixtureRequest) -> Iterator[Engine]:
    # Without a template its edits are dense.
    cache = {"audit_share": 1.0, "own_anchors": 0.0, **request.param}
    config = config_of(tiny_fill, cache=cache)
    new_engine = assemble(config, load_adapter(config), lambda: encoder.encode_prompt(""))
    new_engine.start()
    yield new_engine
    new_engine.close(5.0)


def edit(engine: Engine, job: EditJob) -> FinalEvent:
    sink = Sink()
    engine.submit(job, sink)
    return sink.final()


def audited(engine: Engine, count: int) -> dict[str, Any]:
    """The one template, once so many of its edits were made again."""
    eventually("audits are done", lambda: engine.audits.done >= count)
    (template,) = engine.templates().result(30)
    return template


@pytest.mark.parametrize("engine", [{"audit_limit": 100.0}], indirect=True)
def test_a_cached_edit_is_made_again_and_compared(engine: Engine, encoder: Encoder) -> None:
    first = job(encoder, 3, "a", cache="require")
    cached = edit(engine, first)
    dense = edit(engine, job(encoder, 3, "b", cache="off"))
    template = audited(engine, 1)
    expected = drift_of(cached.latents, dense.latents, first.edit_mask)
    assert template["drift_max"] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert expected > 0
    assert (template["audits"], template["runs_dense"]) == (1, False)  # dense edits are not audited
    assert engine.counters["edits_total"] == 2  # an audit is nobody's edit
    assert [n for n, *_ in engine.observations.take()].count("cache_drift") == 1


@pytest.mark.parametrize("engine", [{"audit_limit": 0.0}], indirect=True)
def test_a_template_over_the_limit_runs_dense_and_says_so(
    engine: Engine, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    assert edit(engine, job(encoder, 3, "a", cache="require")).meta["cache"] == "hit"
    template = audited(engine, 1)
    assert template["runs_dense"]
    after = edit(engine, job(encoder, 3, "b"))
    assert after.meta["cache"] == "off"
    assert after.meta["drift"] == pytest.approx(template["drift_max"], abs=1e-4)
    assert set(after.meta["kinds"]) == {"dense"}
    assert edit(engine, job(encoder, 4, "c", cache="require")).meta["cache"] == "hit"
    insisted = edit(engine, job(encoder, 3, "d", cache="require"))
    assert insisted.meta["cache"] == "hit"
    assert engine.audits.distrusted >= 1
    assert "run dense from now on" in caplog.text


@pytest.mark.parametrize("engine", [{"audit_share": 0.0}], indirect=True)
def test_nothing_is_audited_unless_asked(engine: Engine, encoder: Encoder) -> None:
    edit(engine, job(encoder, 3, "a", cache="require"))
    edit(engine, job(encoder, 3, "b", cache="require"))
    assert engine.audits.done == 0
    assert engine.audits.next() is None


@pytest.mark.parametrize("engine", [{}], indirect=True)
def test_an_audit_has_a_name_that_no_client_may_have(engine: Engine, encoder: Encoder) -> None:
    """Else a client's edit of its name would be refused while the audit runs."""
    done = job(encoder, 3, "a", cache="require")
    edit(engine, done)
    name = Audit("", done, HostCopy(torch.zeros(1))).dense_job().request.request_id
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(name, RequestId)
    assert edit(engine, job(encoder, 3, "audit:a", cache="off")).meta["request_id"] == "audit:a"


def test_drift_looks_under_the_mask_alone() -> None:
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(3, 4, 6)).astype(np.float32)
    mask = np.zeros((16, 24), np.uint8)
    mask[5, 9] = 255  # one pixel of the latent at row 1, column 2
    cached = dense.copy()
    cached[:, 0, 0] += 9.0
    assert drift_of(cached, dense, mask) == 0.0
    cached[:, 1, 2] *= 1.5
    assert drift_of(cached, dense, mask) == pytest.approx(0.5)


def test_the_tables_and_labels_are_bounded(tiny_fill: Path, encoder: Encoder) -> None:
    observations = Observations()
    audits = Audits(config_of(tiny_fill, cache={"audit_share": 1.0}).cache, observations)
    one = job(encoder, 3, "a")
    latents = HostCopy(torch.ones(4, *(side // 4 for side in one.edit_mask.shape)))
    for number in range(5000):
        request = replace(one.request, template_id=f"{number:032x}"[::-1])
        audits.judge(Audit(str(number), replace(one, request=request), latents), latents.array())
        audits.offer(str(number), one, latents)
    assert sum(bool(audits.figures(str(number))) for number in range(5000)) == 4096
    assert len({labels for _, _, labels in observations.take()}) == 65
    assert sum(audits.next() is not None for _ in range(20)) == 8
