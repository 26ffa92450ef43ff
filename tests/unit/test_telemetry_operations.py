"""The dashboard and the alert rules of examples/operations are made of metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from oncely.telemetry.metrics import METRICS
from oncely.telemetry.prometheus import PrometheusObserver
from tests.telemetry import RECORDS, a_record

OPERATIONS = Path(__file__).parents[2] / "examples" / "operations"
DASHBOARD: dict[str, Any] = json.loads((OPERATIONS / "grafana.json").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((OPERATIONS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]

STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
WORDS = {"sum", "max", "by", "and", "or", "unless", "rate", "increase", "deriv", "histogram_quantile"}


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (rule["expr"] for rule in RULES)


def names_in(expression: str) -> set[str]:
    """The names of metrics in a PromQL expression: what is neither a word, a label, a range nor a string."""
    bare = re.sub(r"\bby\s*\([^)]*\)", "", STRINGS.sub('""', expression))
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\boffset \w+", "", bare)
    return set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare)) - WORDS


def labels_in(expression: str) -> set[str]:
    """The labels that it chooses or groups by."""
    grouped = {
        name.strip() for group in re.findall(r"\bby\s*\(([^)]*)\)", expression) for name in group.split(",")
    }
    chosen = re.findall(r"(\w+)\s*=~?\s*\"", expression)
    return (grouped | set(chosen)) - {"le"}


def series() -> dict[str, set[str]]:
    """Every series that the Prometheus adapter exposes, with its labels."""
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    for kind in RECORDS:
        observer(a_record(kind))
    return {
        sample.name: set(sample.labels) - {"le"} for family in registry.collect() for sample in family.samples
    }


def test_a_name_is_found_wherever_it_stands() -> None:
    expression = (
        'histogram_quantile(0.99, sum by (le, topic) (rate(a_seconds_bucket{x="not_this"}[5m])))'
        " > 1.5 and max by (b) (c_total unless d_total offset 5m) > 1"
    )
    assert names_in(expression) == {"a_seconds_bucket", "c_total", "d_total"}
    assert labels_in(expression) == {"topic", "x", "b"}


def test_every_metric_that_is_named_exists_and_has_the_labels_that_are_asked_for() -> None:
    exposed = series()
    for expression in expressions():
        names = names_in(expression)
        assert names, expression
        assert names <= set(exposed), expression
        for name in names:
            assert labels_in(expression) <= exposed[name], expression


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {
        name
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
        for name in names_in(target["expr"])
    }
    missing = {
        metric.prometheus
        for metric in METRICS
        if not {metric.prometheus, f"{metric.prometheus}_bucket"} & shown
    }
    assert missing == set()


def test_legends_show_labels_by_which_is_grouped() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels_in(target["expr"])


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_there_are_alerts_for_lag_dead_letters_outages_and_lost_claims() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    assert {
        "OncelyOutboxLags",
        "OncelyStreamLags",
        "OncelyDeadEvents",
        "OncelyDeadMessages",
        "OncelyBrokerDown",
        "OncelyDatabaseDown",
        "OncelyClaimsLost",
    } <= set(names)
    for rule in RULES:
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert labels <= labels_in(rule["expr"]), rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
