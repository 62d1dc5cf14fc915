"""The overhead benchmark's view into the step loop: it names functions, which move."""

from __future__ import annotations

from maskserve_core.config_file import config_of
from maskserve_harness.benchmarks.direct import Direct
from maskserve_harness.benchmarks.overhead import make_edits, measure_step
from maskserve_harness.checkout import DEMO_MODEL


def test_a_step_is_told_apart_from_the_loop_round_it() -> None:
    direct = Direct(config_of({"model": {"path": str(DEMO_MODEL), "torch_threads": 1}}))
    try:
        step = measure_step(direct, make_edits(8, 64), 8)
    finally:
        direct.engine.close(5.0)
    assert 0 < step["rest_ms"] < step["step_ms"]
    assert 0 < step["model_ms"] < step["step_ms"]
