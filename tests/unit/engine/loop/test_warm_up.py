"""A worker takes a first step of every sort before it is ready, and keeps nothing of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from maskserve_common.config import Config, ConfigError
from maskserve_engine.families import registry
from maskserve_engine.families.specs import load_spec
from maskserve_engine.loop import warm_up as warm_up_module
from maskserve_engine.loop.warm_up import row_counts
from maskserve_engine.stages import loader
from maskserve_engine.stages.decode import Decoder
from maskserve_engine.start.assembly import load_engine
from tests.fakes.jobs import config_of
from tests.fakes.tiny_unet import VARIANTS

pytestmark = pytest.mark.each_value

OFF: dict[str, Any] = {"warm_up": False}


class Watched:
    """An engine whose steps are written down."""

    def __init__(self, config: Config) -> None:
        self.engine = load_engine(config)
        self.steps: list[tuple[str, set[str]]] = []
        step = self.engine.adapter.step

        def watch(rows: Any, plan: Any, reads: Any = None) -> None:
            self.steps.append((type(rows[0]).__name__, set() if plan is None else set(plan.kinds)))
            step(rows, plan, reads)

        self.engine.adapter.step = watch  # type: ignore[method-assign]
        self.engine.start()

    def warm_up(self) -> list[tuple[str, set[str]]]:
        try:
            self.engine.warm_up()
        finally:
            self.engine.close(5.0)
        if self.engine.config.cache.enabled:
            self.engine.cache.store.check_integrity()
            assert self.engine.cache.store.memory.nbytes == 0
        assert self.engine.counters["steps_total"] == 0
        return self.steps


@pytest.mark.parametrize("kind", ["kv", "h", "both"])
def test_flux_takes_a_dense_a_priming_and_a_cached_step(
    tiny_fill: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with caplog.at_level(logging.INFO):
        steps = Watched(config_of(tiny_fill, cache={"entry_kind": kind})).warm_up()
    cached = {"project"} if kind == "h" else {"kv"}
    assert steps == [("FlowRow", set()), ("FlowPrimingRow", set()), ("FlowRow", cached)]
    assert "the denoiser was warmed up in 0." in caplog.text


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("entries", ["shared", "own"])
def test_unets_do_so_too(tiny_unets: dict[str, Path], variant: str, entries: str) -> None:
    config = config_of(tiny_unets[variant], cache={"cfg_entries": entries})
    kinds = [name for name, _ in Watched(config).warm_up()]
    assert kinds == ["UnetRow", "UnetPrimingRow", "UnetRow"]


@pytest.mark.parametrize("model", ["flux", "sdxl-base"])
def test_on_a_gpu_it_takes_steps_of_fewer_and_fewer_rows(
    tiny_fill: Path,
    tiny_unets: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    folder = tiny_fill if model == "flux" else tiny_unets[model]
    assert [row_counts(config_of(folder, engine={"max_rows": n})) for n in (1, 8)] == [[1], [1]]
    watched = Watched(config_of(folder, engine={"max_rows": 3}))
    counted: list[int] = []
    step = watched.engine.adapter.step

    def count(rows: Any, plan: Any, reads: Any = None) -> None:
        counted.append(len(rows))
        step(rows, plan, reads)

    watched.engine.adapter.step = count  # type: ignore[method-assign]
    monkeypatch.setattr(warm_up_module, "device_of", lambda config: torch.device("cuda", 0))
    assert [row_counts(config_of(folder, engine={"max_rows": n})) for n in (1, 2, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]
    watched.warm_up()
    begin = [3, 2, 1, 1, 3, 2, 1]
    assert counted[: len(begin)] == begin
    refreshing = counted[len(begin) :]
    steps = len(refreshing) // 3
    assert steps > 3, "a refresh step, lookaheads, and steps of one, two and three terms"
    assert refreshing == [rows for rows in (3, 2, 1) for _ in range(steps)]


def test_without_a_cache_one_step_is_enough(tiny_inpaint: Path) -> None:
    config = config_of(tiny_inpaint, cache={"enabled": False})
    assert Watched(config).warm_up() == [("FlowRow", set())]


def test_it_can_be_left_out(tiny_fill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, ...]] = []
    monkeypatch.setattr(Decoder, "decode", lambda self, latents: decoded.append(latents.shape))
    assert Watched(config_of(tiny_fill, engine=OFF)).warm_up() == []
    registry.load_decoder(config_of(tiny_fill, engine=OFF))
    assert decoded == []
    registry.load_decoder(config_of(tiny_fill))
    assert decoded == [(4, 8, 8)]


def test_a_model_that_cannot_take_a_step_is_not_served(tiny_fill: Path) -> None:
    watched = Watched(config_of(tiny_fill))

    def broken(rows: Any, plan: Any, reads: Any = None) -> None:
        raise RuntimeError("no kernel image is available")

    watched.engine.adapter.step = broken  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="cannot take a step: no kernel image is available"):
        watched.warm_up()


def test_a_gpu_is_warmed_up_at_the_models_own_size(tiny_fill: Path) -> None:
    config, spec = config_of(tiny_fill), load_spec(tiny_fill)
    assert loader.warm_up_side(config, spec) == 32
    side = loader.warm_up_side(config, spec, torch.device("cuda", 0))
    assert side == spec.native_resolution == 64
