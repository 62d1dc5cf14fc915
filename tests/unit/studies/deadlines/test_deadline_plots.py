"""The plots of the study of due times."""

from __future__ import annotations

from pathlib import Path

from maskserve_studies.deadlines.plots import draw


def test_the_report_on_due_times_is_drawn(tmp_path: Path) -> None:
    at = {"by_size": {}, "decision_seconds": 0.0, "per_minute": 12.0}
    report: dict[str, list[object]] = {"scales": [], "rates": [], "round_lengths": []}
    names = ["sp1", "sp2", "sp4", "sp8", "per_resolution", "rounds5", "deadline"]
    for mix in ("uniform", "skewed"):
        for scale in (1.0, 1.5):
            sizes = {name: {"256": scale / 2, "512": 1.0} for name in names}
            point = {**at, "mix": mix, "scale": scale, "sar": dict.fromkeys(names, scale / 2)}
            report["scales"].append({**point, "by_size": sizes})
            report["rates"].append(point)
    lengths = ("rounds1", "rounds2", "rounds5", "rounds10")
    for cost in (0.0, 0.1):
        sar = dict.fromkeys(lengths, 1.0)
        report["round_lengths"].append({**at, "decision_seconds": cost, "sar": sar})
    draw(report, tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"deadlines_scales.png", "deadlines_rates.png", "deadlines_rounds.png"}
