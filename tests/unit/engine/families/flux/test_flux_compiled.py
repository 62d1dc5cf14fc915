"""Compiled segments of FLUX blocks against the uncompiled ones, and how often they compile."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from maskserve_engine.batch.forward import forward
from maskserve_engine.families.flux.adapter import FluxBatch
from maskserve_engine.families.flux.compiled import CompiledSegments, compile_segments
from maskserve_harness.benchmarks.step_rig import Bench

CPU = torch.device("cpu")
GRAPHS = 4
"""Before and after attention, of double and of single blocks."""
PLANS = {
    "dense": ("dense",) * 4,
    "kv": ("kv",) * 4,
    "project": ("project",) * 4,
    "mixed": ("kv", "dense", "project", "kv"),
}
ROWS = ([0.11], [None], [0.3, 0.05, None], [0.2, 0.2])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def make_bench(dtype: torch.dtype = torch.float32) -> Bench:
    bench = Bench("demo", (2, 2), dtype, CPU, "model")
    bench.fill_entry("both")
    return bench


def warm(bench: Bench, backend: str, *, dynamic: bool = True) -> CompiledSegments:
    segments = CompiledSegments(backend, dynamic=dynamic)
    with torch.inference_mode():
        segments.warm_up(bench.weights)
    return segments


def outputs(
    bench: Bench,
    segments: CompiledSegments | None,
    ratios: Sequence[float | None],
    kinds: Sequence[str],
) -> Tensor:
    with torch.inference_mode():
        torch.manual_seed(len(ratios))
        batch = FluxBatch.of([bench.row(ratio, seed) for seed, ratio in enumerate(ratios)], None)
        weights = replace(bench.weights, segments=segments)
        return forward(batch.begin_step(weights, 0), batch.packed, kinds)


def test_one_graph_of_each_half_serves_all_and_what_was_not_foreseen_runs_uncompiled() -> None:
    bench = make_bench()
    segments = warm(bench, "eager")
    for kinds in PLANS.values():
        for ratios in ROWS:
            expected = outputs(bench, None, ratios, kinds)
            compiled = outputs(bench, segments, ratios, kinds)
            assert torch.allclose(compiled, expected, atol=1e-5), (kinds, ratios)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == GRAPHS
    # A single active token is a size of its own to torch.compile.
    torch.compiler.set_stance("eager_on_recompile")
    expected = outputs(bench, None, [1e-9], PLANS["kv"])
    assert torch.allclose(outputs(bench, segments, [1e-9], PLANS["kv"]), expected, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == GRAPHS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_computes_what_they_do_uncompiled(dtype: torch.dtype) -> None:
    bench = make_bench(dtype)
    segments = compile_segments(bench.weights)
    assert segments is not None
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for kinds in PLANS.values():
        for ratios in ROWS:
            expected = outputs(bench, None, ratios, kinds)
            compiled = outputs(bench, segments, ratios, kinds)
            assert torch.allclose(compiled, expected, atol=tolerance), (kinds, ratios)


def test_halves_of_fixed_sizes_would_be_compiled_again() -> None:
    bench = make_bench()
    segments = warm(bench, "eager", dynamic=False)

    def grow() -> None:
        for tokens in range(1, 12):
            outputs(bench, segments, [tokens / 20], PLANS["kv"])

    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        grow()


def test_what_attention_was_given_is_let_go_before_the_rest_of_a_single_block() -> None:
    """The memory counted for a step has no room for both."""
    torch.compiler.set_stance("force_eager")  # who calls the segments is what holds or lets go
    bench = make_bench()
    given, held = list[weakref.ref[Tensor]](), list[bool]()

    class Watched(CompiledSegments):
        def before_single(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            qk, v, up = super().before_single(*args)
            given[:] = weakref.ref(qk), weakref.ref(v)
            return qk, v, up

        def after_single(self, *args: Any) -> Tensor:
            held.append(any(tensor() is not None for tensor in given))
            return super().after_single(*args)

    outputs(bench, Watched("eager"), [0.2], PLANS["kv"])
    assert held
    assert not any(held)


def test_without_a_compiler_blocks_run_uncompiled_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert compile_segments(make_bench().weights) is None
    assert [record.getMessage() for record in caplog.records] == [
        "blocks run uncompiled: there is no compiler (g++, or another that CXX names)"
    ]
