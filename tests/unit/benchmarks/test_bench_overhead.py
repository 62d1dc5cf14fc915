"""The overhead benchmark's view into the step loop: it names functions, which move."""

from __future__ import annotations

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.edits.admission import measure_admission
from maskserve_benchmarks.edits.direct import Direct
from maskserve_benchmarks.edits.overhead import make_edits, measure_step
from maskserve_common.config_file import config_of


def test_a_step_is_told_apart_from_the_loop_round_it() -> None:
    direct = Direct(config_of({"model": {"path": str(DEMO_MODEL), "torch_threads": 1}}))
    try:
        step = measure_step(direct, make_edits(8, 64), 8)
    finally:
        direct.engine.close(5.0)
    assert 0 < step["rest_ms"] < step["step_ms"]
    assert 0 < step["model_ms"] < step["step_ms"]


def test_admission_is_timed_with_and_without_preparing() -> None:
    report = measure_admission(1)
    assert {way.partition(", ")[0] for way in report} == {"dense", "cached"}
    assert all(
        times_ms["accept_ms"] > 0 and times_ms["admit_ms"] > 0 for times_ms in report.values()
    )
