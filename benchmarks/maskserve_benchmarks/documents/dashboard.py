"""Write Grafana's dashboard of the metrics that workers and routers publish.

python scripts/bench dashboard            # after a change of a panel
python scripts/bench dashboard --check    # exit code 1 if the file is stale
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.documents.check_flag import check_only

FILE = CHECKOUT / "deploy" / "grafana" / "dashboards" / "maskserve.json"
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_WIDTH, _HEIGHT = 24, 8


class Panel(NamedTuple):
    """A graph of queries over time; with `stat` it shows only the last value."""

    title: str
    unit: str
    """Unit in Grafana's spelling: `s`, `percentunit`, `bytes`, `short`, `ops`."""
    queries: dict[str, str]
    """Legend → PromQL."""
    description: str
    stat: bool = False


def _rate(metric: str, labels: str = "", by: str = "") -> str:
    inner = f"sum(rate(maskserve_{metric}{labels}[5m]))"
    return inner if not by else inner.replace("sum(", f"sum by ({by}) (", 1)


def _quantile(q: float, metric: str, *by: str) -> str:
    labels = ", ".join(("le", *by))
    return f"histogram_quantile({q}, sum by ({labels}) (rate(maskserve_{metric}_bucket[5m])))"


def _quantiles(metric: str) -> dict[str, str]:
    return {f"{q:.0%}": _quantile(q, metric) for q in (0.5, 0.9, 0.99)}


_ENDS = "edit_ends_total"
_DONE = _rate(_ENDS, '{outcome="done"}')
_HITS, _MISSES = _rate("cache_hits_total"), _rate("cache_misses_total")
_REFRESHES = _rate("cache_own_total")
_LOOKUPS = f"({_HITS} + {_REFRESHES} + {_MISSES})"
_SLO = "slo_total"
ROWS: dict[str, Sequence[Panel]] = {
    "Overview": (
        Panel(
            "Edits done",
            "percentunit",
            {"": f"{_DONE} / {_rate(_ENDS)}"},
            "Share of answered edits that were done.",
            stat=True,
        ),
        Panel(
            "P90 of an edit",
            "s",
            {"": _quantile(0.9, "edit_seconds")},
            "Nine of ten edits take at most this long.",
            stat=True,
        ),
        Panel(
            "Rows in use",
            "percentunit",
            {
                "": "(sum(maskserve_running_rows) + sum(maskserve_waiting_rows)) "
                "/ sum(maskserve_row_capacity)"
            },
            "Above 100 %, edits wait: scale on this.",
            stat=True,
        ),
        Panel(
            "Cached hits",
            "percentunit",
            {"": f"{_HITS} / {_LOOKUPS}"},
            "Edits that read their template, as a share of hits, refresh steps and misses.",
            stat=True,
        ),
        Panel(
            "Refresh steps",
            "percentunit",
            {"": f"{_REFRESHES} / {_LOOKUPS}"},
            "Edits that used refresh steps, as a share of the same edits.",
            stat=True,
        ),
        Panel(
            "In time",
            "percentunit",
            {"": f'{_rate(_SLO, """{outcome="met"}""")} / {_rate(_SLO)}'},
            "Share of edits with a due time at workers; a refusal counts as late.",
            stat=True,
        ),
    ),
    "Edits": (
        Panel(
            "Answers",
            "ops",
            {
                "{{outcome}}": _rate(_ENDS, by="outcome"),
                "{{kind}}": _rate("edit_kinds_total", by="kind"),
            },
            "Edits per second, by outcome; those with a picture, by kind.",
        ),
        Panel("Seconds of an edit", "s", _quantiles("edit_seconds"), "From acceptance to picture."),
        Panel("Waiting for a row", "s", _quantiles("queue_seconds"), "In the engine."),
        Panel(
            "Mask ratio",
            "percentunit",
            _quantiles("mask_ratio"),
            "Computed tokens over all tokens.",
        ),
        Panel(
            "Due times",
            "ops",
            {
                "{{outcome}}": _rate(_SLO, by="outcome"),
                "router: {{outcome}}": _rate("router_slo_total", by="outcome"),
            },
            "Edits with a due time per second, by outcome.",
        ),
        Panel(
            "Seconds left",
            "s",
            {
                **{f"{q:.0%}": _quantile(q, "slack_seconds") for q in (0.05, 0.5)},
                **{f"router {q:.0%}": _quantile(q, "router_slack_seconds") for q in (0.05, 0.5)},
            },
            "Until the due time, when an edit was answered; below 0: late.",
        ),
    ),
    "Batch": (
        Panel(
            "Rows",
            "short",
            {
                "running {{worker}}": "maskserve_running_rows",
                "waiting {{worker}}": "maskserve_waiting_rows",
            },
            "Edits, and templates to be primed.",
        ),
        Panel("Seconds of a step", "s", _quantiles("step_seconds"), "Without loading."),
        Panel(
            "Rows by kind",
            "ops",
            {
                "all tokens": _rate("dense_rows_total"),
                "computed tokens": _rate("cached_rows_total"),
                "a template": _rate("priming_rows_total"),
            },
            "Rows per second, summed over steps.",
        ),
        Panel(
            "Steps and edits",
            "ops",
            {
                "steps": _rate("steps_total"),
                "finished edits": _rate("edits_total"),
                "steps without the model": _rate("skipped_rows_total"),
            },
            "Per second.",
        ),
        Panel(
            "Tokens",
            "ops",
            {"computed": _rate("active_tokens_total")},
            "Computed tokens of edits per second, summed over rows and steps.",
        ),
        Panel(
            "Plans",
            "ops",
            {
                "{{choice}}": _rate("plans_total", by="choice"),
                "blocks {{kind}}": _rate("plan_blocks_total", by="kind"),
            },
            "Steps with cached rows by plan, and the blocks that these rows ran.",
        ),
        Panel(
            "Error of predicted steps",
            "percentunit",
            _quantiles("step_prediction_error"),
            "As a share of the step time.",
        ),
        Panel(
            "Engine silence",
            "s",
            {
                "{{worker}}": "maskserve_engine_silence_seconds",
                "values dropped {{worker}}": "rate(maskserve_observations_dropped_total[5m])",
            },
            "Seconds since the last status record, and values missing from histograms.",
        ),
    ),
    "Cache": (
        Panel("Bytes", "bytes", {"{{tier}}": "sum by (tier) (maskserve_cache_bytes)"}, "By tier."),
        Panel(
            "Hits and misses",
            "ops",
            {
                "hit {{tier}}": _rate("cache_hits_total", by="tier"),
                "refresh steps": _REFRESHES,
                "miss": _MISSES,
            },
            "Hits by the tier of the template, edits with refresh steps, and misses.",
        ),
        Panel(
            "Templates",
            "short",
            {"{{tier}}": "sum by (tier) (maskserve_cache_templates)"},
            "Templates whose activations are complete.",
        ),
        Panel(
            "Primed and loaded",
            "ops",
            {
                "primed: {{outcome}}": _rate("primings_total", by="outcome"),
                "bytes loaded: {{tier}}": _rate("cache_loaded_bytes_total", by="tier"),
            },
            "Templates, and bytes of entries loaded for rows.",
        ),
        Panel(
            "Evictions",
            "ops",
            {"{{tier}}": _rate("cache_evictions_total", by="tier")},
            "Templates whose activations were evicted.",
        ),
        Panel(
            "Waiting for activations",
            "s",
            _quantiles("step_load_stall_seconds"),
            "Of steps that read cached activations.",
        ),
        Panel(
            "Drift",
            "percentunit",
            _quantiles("cache_drift"),
            "Of cached edits that were repeated without the cache (audit_share).",
        ),
        Panel(
            "Refresh error",
            "percentunit",
            {f"{q:.0%} {{{{model}}}}": _quantile(q, "refresh_error", "model") for q in (0.5, 0.99)},
            "Mean error of an edit's lookaheads at its refresh steps, by model.",
        ),
        Panel(
            "Cache faults and audits",
            "ops",
            {
                "failed in {{tier}}": _rate("cache_failures_total", by="tier"),
                "damaged in {{tier}}": _rate("cache_corrupt_total", by="tier"),
                "wrong accounts": _rate("cache_integrity_failures_total"),
                "audited": _rate("audits_total"),
                "distrusted": _rate("cache_distrusts_total"),
            },
            "Failed reads and writes, damaged entries, and audited edits.",
        ),
    ),
    "LoRAs and ControlNets": (
        Panel(
            "Loaded",
            "short",
            {
                "LoRAs {{tier}}": "sum by (tier) (maskserve_adapters)",
                "ControlNets": "sum(maskserve_controlnets)",
            },
            "By tier.",
        ),
        Panel(
            "Loaded bytes",
            "bytes",
            {
                "LoRAs {{tier}}": "sum by (tier) (maskserve_adapter_bytes)",
                "ControlNets": "sum(maskserve_controlnet_bytes)",
            },
            "By tier.",
        ),
        Panel(
            "P90 of loads",
            "s",
            {
                "LoRAs": _quantile(0.9, "adapter_load_seconds"),
                "ControlNets": _quantile(0.9, "controlnet_load_seconds"),
            },
            "Time to load onto the device.",
        ),
        Panel(
            "P90 of waits",
            "s",
            {
                "for LoRAs": _quantile(0.9, "adapter_wait_seconds"),
                "for ControlNets": _quantile(0.9, "controlnet_wait_seconds"),
                "for a service, in a step": _quantile(0.9, "controlnet_stall_seconds"),
            },
            "Of edits that waited.",
        ),
        Panel(
            "Failed and evicted",
            "ops",
            {
                "LoRAs failed": _rate("adapter_load_failures_total"),
                "LoRAs evicted": _rate("adapter_evictions_total"),
                "ControlNets failed": _rate("controlnet_load_failures_total"),
                "ControlNets evicted": _rate("controlnet_evictions_total"),
                "stale steps": _rate("controlnet_stale_steps_total"),
            },
            "Per second.",
        ),
    ),
    "Router": (
        Panel(
            "Workers up",
            "short",
            {"{{worker}}": "maskserve_worker_up"},
            "1: the worker takes edits.",
        ),
        Panel(
            "Edits in flight",
            "short",
            {
                "{{worker}}": "maskserve_inflight",
                "waiting in the router": "maskserve_router_waiting",
            },
            "At each worker, and in the router.",
        ),
        Panel(
            "Refused and retried",
            "ops",
            {
                "refused: {{reason}}": _rate("admission_rejections_total", by="reason"),
                "retried: {{reason}}": _rate("retries_total", by="reason"),
            },
            "By reason.",
        ),
        Panel(
            "Answers of the router",
            "ops",
            {"{{route}} {{code}}": _rate("requests_total", by="route, code") + " > 0"},
            "By route and error code.",
        ),
        Panel(
            "In the router",
            "short",
            {
                "edits {{instance}}": "maskserve_router_edits",
                "bytes {{instance}}": "maskserve_router_bytes",
                "ejections": _rate("ejections_total"),
            },
            "Unanswered edits, their bytes, and ejections of workers.",
        ),
        Panel("Seconds of a decision", "s", _quantiles("route_seconds"), "To choose a worker."),
        Panel(
            "Seconds at a worker",
            "s",
            {
                **_quantiles("routed_edit_seconds"),
                "actual minus predicted": _quantile(0.5, "predicted_vs_actual_seconds"),
            },
            "Of an edit, and the median error of the prediction.",
        ),
        Panel(
            "Error of predictions",
            "percentunit",
            _quantiles("prediction_relative_error"),
            "As a share of an edit's time at its worker.",
        ),
    ),
    "Jobs and nodes": (
        Panel(
            "Jobs",
            "short",
            {
                "waiting": "max(maskserve_router_jobs_waiting)",
                "running {{instance}}": "maskserve_router_jobs_running",
            },
            "Jobs that no router has started, and jobs that each router runs.",
        ),
        Panel(
            "Jobs that end",
            "ops",
            {
                "{{state}}": _rate("jobs_total", by="state"),
                "webhook {{end}}": _rate("webhooks_total", by="end"),
            },
            "Ended jobs by state, and webhooks that were delivered or given up.",
        ),
        Panel(
            "Node servers busy",
            "short",
            {"{{model}}": "max by (model) (maskserve_node_servers_busy)"},
            "By model: scale node servers on this.",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the form that Grafana imports."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        position = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        panels.append({"type": "row", "title": title, "gridPos": position, "panels": []})
        y += 1
        width, height = _WIDTH // min(len(row), 4), 4 if row[0].stat else _HEIGHT
        for index, panel in enumerate(row):
            line, column = divmod(index, _WIDTH // width)
            position = {"x": column * width, "y": y + line * height, "w": width, "h": height}
            panels.append(_panel(panel, position))
        y += height * -(-len(row) // (_WIDTH // width))
    for number, panel_json in enumerate(panels, 1):
        panel_json["id"] = number
    return {
        "uid": "maskserve",
        "title": "maskserve",
        "tags": ["maskserve"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": panels,
    }


def _panel(panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "gridPos": position,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def main() -> int:
    text = json.dumps(dashboard(), indent=1) + "\n"
    if check_only(__doc__):
        return int(FILE.read_text(encoding="utf-8") != text)
    FILE.write_text(text, encoding="utf-8")
    return 0
