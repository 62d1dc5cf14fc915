"""Every query of dashboard, alerts and documents is PromQL about metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from maskserve_benchmarks.documents.dashboard import FILE, dashboard
from maskserve_router.metrics import Metrics
from maskserve_triton.metric_table import ENGINE_METRICS, FRONT_METRICS, PREFIX

ROOT = Path(__file__).parents[2]
ALERTS = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"up": {"job", "instance"}}


def known() -> dict[str, set[str]]:
    """Every series and its labels."""
    labels_by_series = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    declared = {
        PREFIX + name: ({"worker", *spec.labels}, spec.kind == "HISTOGRAM")
        for name, spec in (ENGINE_METRICS | FRONT_METRICS).items()
    }
    for collector in Metrics().registry._collector_to_names:
        metric: Any = collector
        name = metric._name + ("_total" if metric._type == "counter" else "")
        declared[name] = set(metric._labelnames), metric._type == "histogram"
    for name, (labels, is_histogram) in declared.items():
        suffixes = ("_bucket", "_sum", "_count") if is_histogram else ("",)
        for suffix in suffixes:
            bucket_labels = {"le"} if suffix == "_bucket" else set()
            labels_by_series.setdefault(name + suffix, set()).update(
                labels | bucket_labels | {"instance", "job"}
            )
    return labels_by_series


KNOWN = known()


def nodes(expr: Any) -> Iterator[Any]:
    yield expr
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        inner = getattr(expr, name, None)
        if inner is not None:
            yield from nodes(inner)
    for inner in getattr(expr, "args", ()):
        yield from nodes(inner)


def problems(query: str) -> list[str]:
    """Metrics and labels of a query that the code does not export, a message each."""
    try:
        parsed = promql.parse(query)
    except ValueError as error:
        return [f"{query}: {error}"]
    messages, labels = [], set[str]()
    for node in nodes(parsed):
        if isinstance(node, promql.VectorSelector):
            if node.name not in KNOWN:
                messages.append(f"{query}: there is no {node.name}")
            labels |= KNOWN.get(node.name, set())
            matched_labels = {matcher.name for matcher in node.matchers.matchers}
            messages += [f"{query}: {node.name} has no {name}" for name in matched_labels - labels]
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\b(?:by|on) \(([^)]*)\)", query))))
    return messages + [f"{query}: nothing has {name}" for name in grouped - labels]


def panel_queries() -> list[str]:
    text = FILE.read_text(encoding="utf-8")
    return [t["expr"] for panel in json.loads(text)["panels"] for t in panel.get("targets", ())]


def documented() -> list[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    blocks = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(
    "query", [*panel_queries(), *[rule["expr"] for rule in RULES], *documented()]
)
def test_queries_name_what_there_is(query: str) -> None:
    assert problems(query) == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("sum(maskserve_no_such)", "there is no"),
        ('maskserve_worker_up{tier="x"}', "has no tier"),
        ("sum by (tier) (maskserve_worker_up)", "nothing has tier"),
        ("maskserve_edit_seconds", "there is no"),
        ("sum(rate(maskserve_steps_total[5m])", ""),
    ],
)
def test_a_wrong_query_is_found(query: str, message: str) -> None:
    assert any(message in problem for problem in problems(query))


def test_the_dashboard_is_what_its_script_writes() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == dashboard()


def test_legends_and_summaries_name_labels_that_their_series_have() -> None:
    pairs = [(r["expr"], r["annotations"]["summary"]) for r in RULES]
    for panel in dashboard()["panels"]:
        pairs += [(t["expr"], t["legendFormat"]) for t in panel.get("targets", ())]
    for query, text in pairs:
        named = set(re.findall(r"\{\{ ?\$labels\.(\w+) ?\}\}|\{\{(\w+)\}\}", text))
        series = [n for n in nodes(promql.parse(query)) if isinstance(n, promql.VectorSelector)]
        labels = set().union(*(KNOWN[metric.name] for metric in series))
        assert {a or b for a, b in named} <= labels, text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_is_explained_and_graded(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


def exported() -> list[str]:
    """Every metric that a worker or router publishes, without suffixes of histograms."""
    names = [PREFIX + name for name in ENGINE_METRICS | FRONT_METRICS]
    for collector in Metrics().registry._collector_to_names:
        metric: Any = collector
        names.append(metric._name + ("_total" if metric._type == "counter" else ""))
    return sorted(names)


@pytest.mark.parametrize("name", exported())
def test_each_metric_is_shown_or_alerted_on(name: str) -> None:
    queries = [*panel_queries(), *(rule["expr"] for rule in RULES)]
    used = re.compile(rf"\b{name}(_bucket|_sum|_count)?\b")
    assert any(used.search(query) for query in queries), "no panel and no alert has it"


def test_metrics_that_the_page_names_exist_and_it_explains_every_label() -> None:
    """The servers' pages say what each metric counts, as its HELP."""
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    section = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(maskserve_\w+)`", section))
    assert named
    assert named - set(exported()) == set()
    table = section.partition("\n### Labels\n")[2]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE)
    explained = {label for row in rows for label in re.findall(r"\w+", row)}
    labels = set().union(*(KNOWN[name] for name in KNOWN.keys() - OF_PROMETHEUS.keys()))
    assert explained == labels - {"instance", "job", "le"}


def test_what_a_router_counts_is_there_before_the_first_of_its_kind() -> None:
    """A rate, and increase(), see the first only if there was a zero before it."""
    metrics = Metrics()
    text = metrics.page().decode()
    by_worker = {"maskserve_ejections_total"}  # it begins with its worker
    for collector in metrics.registry._collector_to_names:
        metric: Any = collector
        if metric._type == "counter" and metric._labelnames:
            name = metric._name + "_total"
            assert (f"{name}{{" in text) == (name not in by_worker), name
