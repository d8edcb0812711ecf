"""The chart's PrometheusRule is deploy/prometheus/rules, with this release's job and objectives in it."""

import json
import re
import subprocess
from pathlib import Path

import yaml

from service.metrics import SECONDS_BUCKETS
from tests.deploy.chart import Values, objects
from tests.deploy.kubernetes import Object
from tests.deploy.paths import CHART, PROMETHEUS
from tests.deploy.programs import need

RULES = PROMETHEUS / "rules"
CHANGED: Values = {
    "availability": 0.9995,
    "latency": 0.95,
    "latencySeconds": "0.25",
}


def groups(values: Values | None = None, *, release: str = "mhsa-serve") -> list[Object]:
    monitoring = {"prometheusRule": "always", **(values or {})}
    (rule,) = (o for o in objects({"monitoring": monitoring}, release=release) if o["kind"] == "PrometheusRule")
    found: list[Object] = rule["spec"]["groups"]
    return found


def shipped() -> list[Object]:
    return [group for path in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]


def test_by_default_the_rules_are_the_files_for_one_namespace() -> None:
    text = json.dumps(shipped()).replace('job=\\"mhsa-serve\\"', 'namespace=\\"default\\", job=\\"mhsa-serve\\"')
    assert groups() == json.loads(text)


def test_every_expression_selects_this_release() -> None:
    text = json.dumps(groups(release="other"))
    assert 'job=\\"mhsa-serve\\"' not in text
    assert 'namespace=\\"default\\", job=\\"other-mhsa-serve\\"' in text


def test_objectives_are_the_values() -> None:
    rules = {
        rule["record"]: rule["expr"]
        for group in groups({"objectives": CHANGED})
        for rule in group["rules"]
        if "record" in rule
    }
    assert rules["job:mhsa_availability:objective"].startswith("0.9995 * group by")
    assert rules["job:mhsa_latency:objective"].startswith("0.95 * group by")
    assert rules["job:mhsa_latency:threshold_seconds"].startswith("0.25 * group by")
    slow = rules["job:mhsa_requests_slow:rate5m"]
    assert set(re.findall(r'le="([^"]*)"', slow)) == {"0.25"}


def test_alerts_have_the_severities_that_the_clusters_routes_know() -> None:
    def severities(monitoring: Values) -> set[str]:
        return {rule["labels"]["severity"] for g in groups(monitoring) for rule in g["rules"] if "alert" in rule}

    assert severities({}) == {"page", "ticket"}
    assert severities({"severities": {"page": "critical", "ticket": "warning"}}) == {"critical", "warning"}
    assert severities({"severities": {"page": "1", "ticket": "no"}}) == {"1", "no"}, (
        "which YAML takes for something else"
    )


def test_thresholds_are_the_edges_of_the_buckets() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    objectives = schema["properties"]["monitoring"]["properties"]["objectives"]["properties"]
    assert objectives["latencySeconds"]["enum"] == [str(edge) for edge in SECONDS_BUCKETS]


def test_runbooks_are_linked_where_people_read_them() -> None:
    base = "https://git.example.com/mhsa-serve/blob/main/"
    alerts = [rule for group in groups({"runbookBase": base}) for rule in group["rules"] if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert alert["annotations"]["runbook_url"] == f"{base}deploy/README.md#{alert['alert'].lower()}"


def test_prometheus_takes_them_with_other_objectives_too(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": groups({"objectives": CHANGED}, release="other")}))
    checked = subprocess.run(
        [need("promtool"), "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
