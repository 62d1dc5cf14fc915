"""Engines of a tiny model with a cache, and edits for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from maskserve_common.config import Config
from maskserve_common.contracts.pricing import Pricing
from maskserve_common.line_fit import Line
from maskserve_engine.base.job import EditJob, FinalEvent
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.loop.engine import Engine
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.entry_bytes import FORMATS
from maskserve_engine.requests.state import RequestState
from maskserve_engine.spec.estimate import pricing_of
from maskserve_engine.spec.model_spec import refresh_rule, text_shares
from maskserve_engine.start.assembly import load_engine
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.support.sink import Sink


def make_engine(
    folder: Path, encoder: Encoder, model: dict[str, Any] | None = None, **cache: Any
) -> Engine:
    values = {
        "entry_format": "model",
        "own_format": "model",  # a row in a batch differs in last digits, which rounding enlarges
        "stride": 1,
        "own_anchors": 0.0,  # makes a miss dense
        "dense_above_ratio": 1.0,
        "plan": "fixed",
        "budget_bytes": 2**28,
        **cache,
    }
    config: Config = config_of(folder, model=model or {}, cache=values)
    engine = load_engine(config)
    engine.cache.prompt = lambda: encoder.priming_prompt()
    engine.start()
    return engine


def job(encoder: Encoder, seed: int, name: str, **settings: Any) -> EditJob:
    case = random_case(
        np.random.default_rng(seed), **{"strength": 1.0, "guidance_scale": 3.0, **settings}
    )
    mask = np.zeros_like(case.mask)
    mask[:16, 8:24] = 255
    return encode_case(encoder, replace(case, mask=mask), name)


def accept(engine: Engine, edit_job: EditJob, sink: Sink) -> None:
    """Accept an edit on the engine's thread, in one turn with other calls there."""
    engine.manager.accept(RequestState.of(edit_job, sink, engine.adapter))


def edit(engine: Engine, edit_job: EditJob) -> FinalEvent:
    sink = Sink()
    engine.submit(edit_job, sink)
    return sink.final()


def priced_by_flops(engine: Engine, edit_job: EditJob, steps: int) -> Pricing:
    """A router's pricing of an engine's edits with this number of steps. It prices FLOPs only, at a
    nanosecond each.
    """
    config, adapter = engine.config, engine.adapter
    return pricing_of(
        adapter.work(*edit_job.moments.shape[1:]),
        CostModel("test", Line(0.0, 1e-9)),
        FORMATS["int4"],
        text=len(edit_job.conditioning["prompt_embeds"]),
        anchors=1,
        text_shares=text_shares(config, adapter.spec, steps, shared=False),
        leaves_ring=refresh_rule(config, adapter.spec).ring,
    )
