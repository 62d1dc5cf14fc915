"""Write Grafana's dashboard of the metrics that workers and routers publish.

python scripts/bench dashboard            # after a change of a panel
python scripts/bench dashboard --check    # exit code 1 if the file is another
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from maskserve_harness.checkout import CHECKOUT

FILE = CHECKOUT / "deploy" / "grafana" / "dashboards" / "maskserve.json"
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_WIDTH, _HEIGHT = 24, 8


class Panel(NamedTuple):
    """A graph of queries over time; its last value alone where `stat`."""

    title: str
    unit: str
    """As Grafana names units: `s`, `percentunit`, `bytes`, `short`, `ops`."""
    queries: dict[str, str]
    """Legend → PromQL."""
    says: str
    stat: bool = False


def _rate(metric: str, labels: str = "", by: str = "") -> str:
    inner = f"sum(rate(maskserve_{metric}{labels}[5m]))"
    return inner if not by else inner.replace("sum(", f"sum by ({by}) (", 1)


def _quantile(q: float, metric: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate(maskserve_{metric}_bucket[5m])))"


def _quantiles(metric: str) -> dict[str, str]:
    return {f"{q:.0%}": _quantile(q, metric) for q in (0.5, 0.9, 0.99)}


_ENDS = "edit_ends_total"
_DONE = _rate(_ENDS, '{outcome="done"}')
_HITS, _MISSES = _rate("cache_hits_total"), _rate("cache_misses_total")
ROWS: dict[str, Sequence[Panel]] = {
    "How it does": (
        Panel(
            "Edits done",
            "percentunit",
            {"": f"{_DONE} / {_rate(_ENDS)}"},
            "Of all edits that were answered.",
            stat=True,
        ),
        Panel("Nine of ten take", "s", {"": _quantile(0.9, "edit_seconds")}, "At most.", stat=True),
        Panel(
            "Rows in use",
            "percentunit",
            {
                "": "(sum(maskserve_running_rows) + sum(maskserve_waiting_rows)) "
                "/ sum(maskserve_row_capacity)"
            },
            "Above 100 % edits wait: scale on this.",
            stat=True,
        ),
        Panel(
            "Cached hits",
            "percentunit",
            {"": f"{_HITS} / ({_HITS} + {_MISSES})"},
            "Of the edits that could use their template's activations.",
            stat=True,
        ),
    ),
    "Edits": (
        Panel(
            "Answers",
            "ops",
            {"{{outcome}}": _rate(_ENDS, by="outcome")},
            "Edits per second, by outcome.",
        ),
        Panel("Seconds of an edit", "s", _quantiles("edit_seconds"), "From acceptance to picture."),
        Panel("Waiting for a row", "s", _quantiles("queue_seconds"), "In the engine."),
    ),
    "Batch": (
        Panel(
            "Rows",
            "short",
            {
                "running {{worker}}": "maskserve_running_rows",
                "waiting {{worker}}": "maskserve_waiting_rows",
            },
            "Edits and templates to prime.",
        ),
        Panel("Seconds of a step", "s", _quantiles("step_seconds"), "Loading apart."),
        Panel(
            "What rows compute",
            "ops",
            {
                "all tokens": _rate("dense_rows_total"),
                "masked tokens": _rate("cached_rows_total"),
                "a template": _rate("priming_rows_total"),
            },
            "Rows per second, summed over steps.",
        ),
    ),
    "Cache": (
        Panel("Bytes", "bytes", {"{{tier}}": "sum by (tier) (maskserve_cache_bytes)"}, "By tier."),
        Panel(
            "Hits and misses",
            "ops",
            {"hit {{tier}}": _rate("cache_hits_total", by="tier"), "miss": _MISSES},
            "By the tier in which the template was found.",
        ),
        Panel(
            "Evictions",
            "ops",
            {"{{tier}}": _rate("cache_evictions_total", by="tier")},
            "Templates dropped for room.",
        ),
        Panel(
            "Waiting for activations",
            "s",
            _quantiles("step_load_stall_seconds"),
            "Of steps that read some.",
        ),
        Panel(
            "Drift",
            "percentunit",
            _quantiles("cache_drift"),
            "Of cached edits that were made again without the cache (audit_share).",
        ),
    ),
    "Router": (
        Panel("Workers up", "short", {"{{worker}}": "maskserve_worker_up"}, "1: it takes edits."),
        Panel(
            "Edits under way",
            "short",
            {"{{worker}}": "maskserve_inflight", "waiting here": "maskserve_router_waiting"},
            "By worker, and those that wait in the router.",
        ),
        Panel(
            "Refused and retried",
            "ops",
            {
                "refused: {{reason}}": _rate("admission_rejections_total", by="reason"),
                "retried: {{reason}}": _rate("retries_total", by="reason"),
            },
            "By why.",
        ),
        Panel(
            "Predictions off by",
            "percentunit",
            _quantiles("prediction_relative_error"),
            "Of an edit's seconds at its worker.",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        at = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        panels.append({"type": "row", "title": title, "gridPos": at, "panels": []})
        y += 1
        width, height = _WIDTH // min(len(row), 4), 4 if row[0].stat else _HEIGHT
        for index, panel in enumerate(row):
            line, column = divmod(index, _WIDTH // width)
            at = {"x": column * width, "y": y + line * height, "w": width, "h": height}
            panels.append(_panel(panel, at))
        y += height * -(-len(row) // (_WIDTH // width))
    for number, made in enumerate(panels, 1):
        made["id"] = number
    return {
        "uid": "maskserve",
        "title": "maskserve",
        "tags": ["maskserve"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": panels,
    }


def _panel(panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.says,
        "gridPos": at,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def main() -> int:
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return int(FILE.read_text(encoding="utf-8") != text)
    FILE.write_text(text, encoding="utf-8")
    return 0
