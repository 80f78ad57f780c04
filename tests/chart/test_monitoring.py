"""Prometheus' and Grafana's objects: only where the cluster knows them, and only real metrics."""

import itertools
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.core import Metric
from tests.chart.helm import CHART, EVERYTHING, MONITORING, REPOSITORY, Helm, Rendered

from sangam_core.placement import FleetLoad, Role, WorkerLoad
from sangam_router.fleet_report import FleetReport
from sangam_router.ledger import FleetSnapshot
from sangam_router.metrics import RouterMetrics
from sangam_worker.metrics import WorkerMetrics

KINDS = ("ServiceMonitor", "ScrapeConfig", "PrometheusRule")
DASHBOARD = json.loads((REPOSITORY / "manifests/grafana/sangam.json").read_text("utf-8"))
ALERTS = yaml.safe_load((REPOSITORY / "manifests/prometheus/alerts.yaml").read_text("utf-8"))
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
SCRAPED = {"namespace", "release", "job", "instance"}
"""Labels that the scrape adds to every series."""


def fleet_report() -> list[Metric]:
    """The families of a fleet of one worker."""
    worker = WorkerLoad("w", "e", Role.COLOCATED, 0, 1, 1)
    snapshot = FleetSnapshot(FleetLoad((worker,)), {}, (), 0, 0, 0.0)
    ledger: Any = SimpleNamespace(keys=None)
    fleet: Any = SimpleNamespace(snapshot=snapshot)
    redis: Any = None
    return FleetReport(redis, ledger, fleet, timeout_seconds=1).collect()


def series(families: list[Metric], added: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Every series' name of some metrics, with the labels it can have."""
    for family in families:
        labels = SCRAPED | added | {name for s in family.samples for name in s.labels}
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        for suffix in suffixes.get(family.type, [""]):
            yield family.name + suffix, labels | ({"le"} if suffix == "_bucket" else set())


def labelled(metrics: RouterMetrics | WorkerMetrics) -> dict[str, set[str]]:
    """Names of the labels of each metric: a labelled one has no sample before its first use."""
    own = itertools.chain(
        vars(metrics).values(),
        vars(getattr(metrics, "fleet_watch", None) or SimpleNamespace()).values(),
    )
    return {
        next(iter(metric.describe())).name: set(getattr(metric, "_labelnames", ()))
        for metric in own
        if hasattr(metric, "describe")
    }


def known_series() -> dict[str, set[str]]:
    router, worker = RouterMetrics(), WorkerMetrics()
    names = dict(series([*router.registry.collect(), *fleet_report()], {"pod", "service"}))
    names |= dict(series(list(worker.registry.collect()), {"worker", "node"}))
    for base, labels in (labelled(router) | labelled(worker)).items():
        for suffix in ("", "_total", "_bucket", "_sum", "_count"):
            if base + suffix in names:
                names[base + suffix] |= labels
    return names


KNOWN = known_series()


def plain(expression: str) -> str:
    """A dashboard's query as Prometheus gets it."""
    return re.sub(r"\$__(rate_)?interval", "5m", expression)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


QUERIES = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{panel['title']} {target['refId']}": plain(target["expr"])
    for panel in panels()
    for target in panel["targets"]
}


def selectors(expression: str) -> list[tuple[str, list[str]]]:
    """Every metric that an expression names, with the labels that it is matched by."""
    found = re.findall(r"\b(sangam_[a-z0-9_]+)(?:\{([^}]*)\})?", expression)
    return [(name, re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inner)) for name, inner in found]


def grouped_by(expression: str) -> set[str]:
    lists = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression)
    return {label.strip() for names in lists for label in names.split(",") if label.strip()}


def test_the_registries_are_seen() -> None:
    assert KNOWN["sangam_requests_total"] >= {"outcome"}
    assert KNOWN["sangam_fleet_free_pages"] >= {"worker", "worker_id", "role"}
    assert KNOWN["sangam_worker_transfer_failures_total"] >= {"direction", "reason", "worker"}
    assert "le" in KNOWN["sangam_worker_iteration_seconds_bucket"]
    assert "sangam_desired_role_refused_total" in KNOWN


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_is_promql_over_metrics_that_exist(name: str) -> None:
    expression = QUERIES[name]
    promql_parser.parse(expression)
    found = selectors(expression)
    assert found, "no metric of Sangam's"
    for metric, labels in found:
        assert metric in KNOWN, f"no service has {metric}"
        assert set(labels) <= KNOWN[metric], metric
    everything = set().union(*(KNOWN[metric] for metric, _ in found))
    assert grouped_by(expression) <= everything
    assert set(re.findall(r'role=~?"([^"]*)"', expression)) <= {
        "decode|colocated",
        "prefill|colocated",
    }


def test_the_check_sees_a_metric_that_does_not_exist() -> None:
    assert "sangam_worker_free_page" not in KNOWN
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        promql_parser.parse("sum by (worker (sangam_worker_free_pages)")


def test_alerts_say_how_bad_it_is_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 40, rule["alert"]
        # Releases must not be thrown together.
        assert {"namespace", "release"} <= grouped_by(rule["expr"]), rule["alert"]
        named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert named <= grouped_by(rule["expr"]), rule["alert"]


def test_the_dashboard_covers_what_operators_ask_for() -> None:
    queries = " ".join(QUERIES[name] for name in QUERIES if name not in {r["alert"] for r in RULES})
    for metric in (
        "sangam_requests_total",
        "sangam_request_latency_seconds_bucket",
        "sangam_fleet_outstanding_prefill_tokens",
        "sangam_fleet_free_pages",
        "sangam_waiting_line",
        "sangam_worker_carried_tokens",
        "sangam_worker_iteration_seconds_bucket",
        "sangam_worker_gap_seconds_bucket",
        "sangam_worker_transfer_seconds_bucket",
        "sangam_desired_role_refused_total",
    ):
        assert metric in queries
    assert all(panel["description"] for panel in panels())
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )
        assert not taken & cells, panel["title"]
        taken |= cells


@pytest.mark.parametrize(
    ("copy", "source"),
    [("dashboard.json", "grafana/sangam.json"), ("alerts.yaml", "prometheus/alerts.yaml")],
)
def test_the_charts_copies_are_the_sources(copy: str, source: str) -> None:
    ours = (CHART / "files" / copy).read_text("utf-8")
    assert ours == (REPOSITORY / "manifests" / source).read_text("utf-8"), "run `make manifests`"


def test_everything_is_off_by_default(default: Rendered) -> None:
    assert default.of(*KINDS) == []
    assert [m for m in default.of("ConfigMap") if "dashboards" in m["metadata"]["name"]] == []


@pytest.mark.parametrize(
    ("kind", "api"),
    [
        ("ServiceMonitor", MONITORING[0]),
        ("PrometheusRule", MONITORING[1]),
        ("ScrapeConfig", MONITORING[2]),
    ],
)
def test_a_kind_is_rendered_only_where_the_cluster_knows_it(
    helm: Helm, kind: str, api: str
) -> None:
    assert len(helm.render(EVERYTHING).of(kind)) == 1
    others = tuple(each for each in MONITORING if each != api)
    assert helm.render(EVERYTHING, kinds=others).of(kind) == []
    assert len(helm.render(EVERYTHING, kinds=others).of(*KINDS)) == 2


def test_the_rules_reach_the_cluster_as_they_are(everything: Rendered) -> None:
    assert everything.one("PrometheusRule", "sangam")["spec"] == ALERTS


def test_the_dashboard_reaches_the_cluster_as_it_is(everything: Rendered) -> None:
    found = everything.one("ConfigMap", "sangam-dashboards")
    assert json.loads(found["data"]["sangam.json"]) == DASHBOARD
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"folder": "LLM"}


def test_routers_are_scraped_through_their_internal_service(everything: Rendered) -> None:
    monitor = everything.one("ServiceMonitor", "sangam-router")
    assert monitor["metadata"]["labels"]["prometheus"] == "main"
    wanted = monitor["spec"]["selector"]["matchLabels"]
    (service,) = [
        each
        for each in everything.of("Service")
        if wanted.items() <= each["metadata"]["labels"].items()
    ]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["path"] == "/metrics"


def test_workers_are_found_through_the_routers(everything: Rendered) -> None:
    spec = everything.one("ScrapeConfig", "sangam-worker")["spec"]
    (discovery,) = spec["httpSDConfigs"]
    service = everything.one("Service", "sangam-router-internal")
    (port,) = service["spec"]["ports"]
    assert discovery["url"] == (
        f"http://sangam-router-internal.serving.svc:{port['port']}/admin/prometheus-targets"
    )
    labels = {each["targetLabel"]: each["replacement"] for each in spec["relabelings"]}
    assert labels == {"release": "sangam", "namespace": "serving", "job": "sangam-worker"}
