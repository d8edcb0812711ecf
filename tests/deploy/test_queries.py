"""Every query there is, asked of a real Prometheus that scrapes a real server under load: each has data.

Conditions of alerts are asked for in their parts, since the whole has data only when something is wrong. What cannot
have data here is listed with its reason.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
import yaml

from deploy.grafana.files import DASHBOARDS
from deploy.grafana.panels import Dashboard, Panel, Query
from deploy.grafana.prometheus import Prometheus, QueryError, Series
from deploy.grafana.queries import interpolate
from deploy.process import free_ports
from tests.deploy import chart
from tests.deploy.paths import ADAPTER
from tests.deploy.prometheus_process import PrometheusProcess
from tests.deploy.promql import operands
from tests.deploy.rule_files import alerting_rules, recording_rules
from tests.deploy.traffic import MAX_IN_FLIGHT, drive, in_background
from tests.integration.server_process import TestedServer, write_certificate
from tests.waiting import wait_for

# A machine that swaps stalls server and Prometheus for minutes; on a free one a query waits some seconds at most.
patiently = partial(wait_for, seconds=400.0, pause_seconds=0.2)
pytestmark = pytest.mark.timeout(900)
JOB, LABELS = "mhsa-serve", {"namespace": "default", "pod": "mhsa-serve-0"}

NOT_HERE = {
    "DCGM_FI_DEV_": "NVIDIA's exporter; there is no GPU",
    'provider!="CPUExecutionProvider"': "there is no GPU",
    'wanted="cuda"': "there is no GPU",
    "absent(up": "says nothing while there is a replica",
}


@pytest.fixture(scope="module")
def prometheus(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scraping a server with TLS and traces, while callers of every kind call it."""
    directory = tmp_path_factory.mktemp("watched")
    authority = trustme.CA()
    soon = datetime.now(UTC) + timedelta(days=3)
    certificate, key = write_certificate(authority, directory / "tls", not_after=soon)
    (nobody,) = free_ports(1)
    flags = [
        *("--tls-cert", str(certificate), "--tls-key", str(key)),
        *("--max-requests-in-flight", str(MAX_IN_FLIGHT)),
        *("--otlp-endpoint", f"http://127.0.0.1:{nobody}"),  # traces for exemplars, which need no collector
    ]
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with TestedServer(tiny_bundle.parents[1], *flags) as server:
        server.wait_for_log("serving ")
        with (
            PrometheusProcess(directory, {server.metrics_port: LABELS}, job=JOB) as process,
            in_background(drive([server.target], credentials, much=200)),
        ):
            yield process.api


@pytest.fixture(scope="module")
def counts(show: Callable[[str], None]) -> Iterator[dict[str, Counter[str]]]:
    """How many series each panel of each dashboard found; shown at the end."""
    found: dict[str, Counter[str]] = {dashboard.uid: Counter() for dashboard in DASHBOARDS}
    yield found
    for uid, panels in found.items():
        listed = ", ".join(f"{panel} {number}" for panel, number in panels.items())
        show(f"series that the queries of {uid} found: {listed}")


def has_data(found: list[Series]) -> bool:
    return any(np.isfinite(series.values).any() for series in found)


def wait_for_data(prometheus: Prometheus, expression: str) -> list[Series]:
    """What a query gives as soon as it gives a number. Fails when it never does."""
    return patiently(
        lambda: found if has_data(found := prometheus.query(expression)) else None,
        lambda: f"no data, only {prometheus.query(expression)}: {expression}",
    )


def reason_of(expression: str) -> str | None:
    return next((reason for part, reason in NOT_HERE.items() if part in expression), None)


def ask(prometheus: Prometheus, expression: str) -> list[Series]:
    """Wait for data, or skip with the reason why there can be none."""
    if reason := reason_of(expression):
        assert not has_data(prometheus.query(expression)), f"it has data, so it should not be excused: {reason}"
        pytest.skip(f"{reason}: {expression}")
    return wait_for_data(prometheus, expression)


@pytest.mark.parametrize("reason", ["queue_full", "deadline", "cancelled", "invalid"])
def test_the_callers_bring_about_every_error_that_they_can(prometheus: Prometheus, reason: str) -> None:
    wait_for_data(prometheus, f'sum(mhsa_errors_total{{reason="{reason}"}}) > 0')


@pytest.mark.parametrize("method", ["Encode", "EncodeStream", "ModelInfer"])
def test_each_method_that_carries_sequences_is_called(prometheus: Prometheus, method: str) -> None:
    wait_for_data(prometheus, f'mhsa_requests_total{{code="OK", method="{method}"}} > 0')


QUERIES = [
    pytest.param(dashboard, panel, query, id=f"{dashboard.uid}: {panel.title} {query.legend}".strip())
    for dashboard in DASHBOARDS
    for panel in dashboard.panels
    for query in panel.queries
]


@pytest.mark.parametrize(("dashboard", "panel", "query"), QUERIES)
def test_a_dashboards_query_has_data_and_the_labels_of_its_legend(
    prometheus: Prometheus, counts: dict[str, Counter[str]], dashboard: Dashboard, panel: Panel, query: Query
) -> None:
    found = ask(prometheus, interpolate(query.expression, interval="10s", job=JOB))
    counts[dashboard.uid][panel.title] += len(found)
    for series in found:
        wanted = {part.partition("}}")[0] for part in query.legend.split("{{")[1:]}
        assert wanted <= series.labels.keys()


@pytest.mark.parametrize("name", [rule.name for rule in recording_rules()])
def test_a_recorded_series_has_data(prometheus: Prometheus, name: str) -> None:
    ask(prometheus, name)


CONDITIONS = [
    pytest.param(part, id=f"{rule.name}-{number}")
    for rule in alerting_rules()
    for number, part in enumerate(operands(rule.expression), 1)
]


@pytest.mark.parametrize("expression", CONDITIONS)
def test_each_part_of_an_alerts_condition_has_data(prometheus: Prometheus, expression: str) -> None:
    ask(prometheus, expression)


def test_prometheus_evaluates_every_rule_without_an_error(prometheus: Prometheus) -> None:
    names = {rule.name for rule in (*recording_rules(), *alerting_rules())}
    patiently(
        lambda: {rule["name"] for rule in _rules(prometheus) if rule["health"] == "ok"} == names,
        lambda: json.dumps(_rules(prometheus), indent=1),
    )


def test_an_alert_that_fires_says_so_in_words(prometheus: Prometheus) -> None:
    name = "MhsaCertificateExpires"
    found = patiently(
        lambda: [a for a in prometheus.get("alerts")["alerts"] if a["labels"]["alertname"] == name],
        lambda: "the certificate expires in three days, and no alert fires",
    )
    assert re.fullmatch(
        r"127\.0\.0\.1:\d+: the certificate expires in 2d 23h \d+m \d+s", found[0]["annotations"]["summary"]
    )


def test_what_the_autoscaler_asks_the_adapter_for_has_data(prometheus: Prometheus) -> None:
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod")
    matchers = ",".join(f'{name}="{value}"' for name, value in LABELS.items())
    (series,) = wait_for_data(prometheus, query.replace("<<.LabelMatchers>>", matchers))
    assert series.labels == {"pod": "mhsa-serve-0"}
    wait_for_data(prometheus, rule["seriesQuery"])


def test_what_the_autoscaler_asks_keda_for_has_data(prometheus: Prometheus) -> None:
    values: chart.Values = {"autoscaling": {"keda": {"enabled": True}}}
    trigger = chart.one("ScaledObject", values)["spec"]["triggers"][0]
    assert len(wait_for_data(prometheus, trigger["metadata"]["query"])) == 1


@pytest.mark.parametrize("name", ["mhsa_request_duration_seconds", "mhsa_queue_wait_seconds", "mhsa_compute_seconds"])
def test_a_duration_leads_to_the_trace_of_one_that_took_so_long(prometheus: Prometheus, name: str) -> None:
    start, end = str(time.time() - 3600), str(time.time() + 3600)
    found = patiently(
        lambda: prometheus.get("query_exemplars", query=f"{name}_bucket", start=start, end=end), lambda: "no exemplar"
    )
    assert re.fullmatch("[0-9a-f]{32}", found[0]["exemplars"][0]["labels"]["trace_id"])


def test_a_query_that_prometheus_does_not_take_is_refused_in_its_words(prometheus: Prometheus) -> None:
    with pytest.raises(QueryError, match="unclosed left parenthesis"):
        prometheus.query("rate(up")


def _rules(prometheus: Prometheus) -> list[dict[str, str]]:
    return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
