"""How often steps replay a graph, by simulation: what docs/adr/0033 says holds."""

from __future__ import annotations

from statistics import fmean

import pytest

from maskserve_studies.kernels.fake_cuda import FakeCuda
from maskserve_studies.kernels.kernel_counts import Case, fake_bench, make_rows
from maskserve_studies.kernels.live_bytes import LiveBytes
from maskserve_studies.kernels.recorded_steps import FLOWS, MODELS, simulate

PRESETS = {
    "FLUX.1": "flux-1024",
    "FLUX.2 klein 4B": "klein-4b-1024",
    "Qwen-Image": "qwen-image-1024",
}


@pytest.mark.parametrize(("steps", "least"), [(28, 0.9), (8, 0.75)])
@pytest.mark.parametrize("name", PRESETS)
def test_the_steps_of_four_clients_replay(name: str, steps: int, least: float) -> None:
    """On average of arrivals. Recorded steps hold at most 2 GiB, and pads are at most a tenth of
    the tokens.
    """
    model = MODELS[name]
    for clients in (1, 4):
        for hit in (False, True)[: 1 + model.hits]:
            runs = [simulate(model, clients, steps, hit=hit, seed=seed) for seed in range(5)]
            assert fmean(run["replayed"] for run in runs) >= least
            assert fmean(run["pads"] for run in runs) <= 0.1
            assert max(run["gib"] for run in runs) <= 2.0


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_holds_as_many_widths_as_are_counted(name: str) -> None:
    with FakeCuda():
        bench = fake_bench((1, 2), "int8", PRESETS[name])
        rows = make_rows(bench, Case("", (None,) * 2))
        bench.step(rows, "kv")  # which computes the vectors of later steps
        with LiveBytes("cuda") as live:
            bench.step(rows, "kv")
    tokens = len(rows) * (bench.work.tokens[0] + bench.text)
    widths = live.peak / (2 * tokens * bench.weights.width)
    assert 0.95 * FLOWS[name].widths <= widths <= FLOWS[name].widths
