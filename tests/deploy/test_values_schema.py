"""values.schema.json by itself: what is just within its bounds is taken, what is just without is not."""

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft7Validator

from tests.deploy.chart import defaults, leaves
from tests.deploy.paths import CHART

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
NAMES = (
    *("model.pvc.claimName", "tls.secretName", "auth.secretName", "autoscaling.keda.authenticationRef"),
    *("serviceAccount.name", "priorityClassName", "runtimeClassName"),
)
OURS = ("nameOverride", "fullnameOverride")
BOUNDS: list[tuple[str, Any, Any]] = [
    *((path, "", None) for path in (*NAMES, *OURS)),
    *((path, "a.b-3", "a_b") for path in NAMES),
    *((path, "0a", "-a") for path in NAMES),
    *((path, "a", "A") for path in (*NAMES, *OURS)),
    *((path, "a", "a-") for path in (*NAMES, *OURS)),
    *((path, "a1-b", "1a") for path in OURS),
    *((path, "a" * 50, "a" * 51) for path in OURS),
    ("image.repository", "a", ""),
    ("image.digest", "", "sha256:0"),
    ("image.digest", "sha256:" + "0f" * 32, "sha256:" + "0g" * 32),
    ("image.pullPolicy", "Always", "always"),
    ("image.pullPolicy", "IfNotPresent", ""),
    ("image.pullPolicy", "Never", "Sometimes"),
    ("imagePullSecrets", [{"name": "a"}], [{}]),
    ("imagePullSecrets", [], ["a"]),
    ("model.source", "pvc", ""),
    ("model.source", "init", "Init"),
    ("model.source", "image", "s3"),
    ("model.init.env", [{"name": "A", "value": "b"}], [{"value": "b"}]),
    ("model.init.env", [{"name": "A"}], [{"name": ""}]),
    ("model.image.pullPolicy", "Always", "always"),
    ("model.image.pullPolicy", "IfNotPresent", ""),
    ("model.image.pullPolicy", "Never", "Sometimes"),
    ("extraEnv", [{"name": "A", "value": "b"}], [{"value": "b"}]),
    ("extraEnv", [{"name": "A"}], [{"name": ""}]),
    ("replicas", 0, -1),
    ("gpu.resource", "a", ""),
    *((f"ports.{name}", 1024, 1023) for name in ("grpc", "metrics")),
    *((f"ports.{name}", 65535, 65536) for name in ("grpc", "metrics")),
    ("service.type", "ClusterIP", "ExternalName"),
    ("service.type", "NodePort", ""),
    ("service.type", "LoadBalancer", "None"),
    ("auth.key", "to-k_e.N5", ""),
    ("auth.key", "a", "a/b"),
    ("startupSeconds", 5, 4),
    *((f"shutdown.{name}Seconds", 0, -1) for name in ("preStop", "drain", "grace")),
    *((f"shutdown.{name}Seconds", 0.5, "1") for name in ("drain", "grace")),
    ("shutdown.preStopSeconds", 1, 0.5),
    ("shutdown.terminationGracePeriodSeconds", 1, 0),
    ("autoscaling.minReplicas", 1, 0),
    ("autoscaling.maxReplicas", 1, 0),
    ("autoscaling.queueWaitSeconds", 0.001, 0.0009),
    ("autoscaling.cpuPercent", 1, 0),
    ("autoscaling.cpuPercent", 100, 101),
    ("autoscaling.cpuPercent", None, "80"),
    ("autoscaling.keda.serverAddress", "a", ""),
    ("autoscaling.keda.fallbackReplicas", 1, 0),
    ("podDisruptionBudget.maxUnavailable", 1, 0),
    ("podDisruptionBudget.maxUnavailable", "1%", "0%"),
    ("podDisruptionBudget.maxUnavailable", "25%", "25"),
    *((f"topologySpread.{name}", "ScheduleAnyway", "Always") for name in ("zone", "hostname")),
    *((f"topologySpread.{name}", "DoNotSchedule", "Never") for name in ("zone", "hostname")),
    *((f"topologySpread.{name}", "", None) for name in ("zone", "hostname")),
    *((f"monitoring.{name}", "auto", True) for name in ("serviceMonitor", "prometheusRule")),
    *((f"monitoring.{name}", "always", "") for name in ("serviceMonitor", "prometheusRule")),
    *((f"monitoring.{name}", "never", "on") for name in ("serviceMonitor", "prometheusRule")),
    ("monitoring.interval", "500ms", "500"),
    ("monitoring.interval", "15s", "15 s"),
    ("monitoring.interval", "1m", "1h"),
    *((f"monitoring.objectives.{name}", 0.0001, 0) for name in ("availability", "latency")),
    *((f"monitoring.objectives.{name}", 0.9999, 1) for name in ("availability", "latency")),
    *((f"monitoring.severities.{name}", "P-1_a", "") for name in ("page", "ticket")),
    *((f"monitoring.severities.{name}", "critical", 'a"b') for name in ("page", "ticket")),
    ("monitoring.runbookBase", "", "https://example.com"),
    ("monitoring.runbookBase", "https://example.com/", "/"),
    ("user", 1, 0),
    ("user", None, "10001"),
]


def values_with(path: str, value: Any) -> Any:
    return functools.reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)


@pytest.mark.parametrize(("path", "inside", "outside"), BOUNDS, ids=lambda value: str(value)[:60])
def test_a_bound_is_where_it_is_said_to_be(path: str, inside: Any, outside: Any) -> None:
    validator = Draft7Validator(SCHEMA)
    assert validator.is_valid(values_with(path, inside))
    assert not validator.is_valid(values_with(path, outside))


@pytest.mark.parametrize(("path", "value"), list(leaves(defaults())), ids=lambda value: str(value)[:40])
def test_every_value_has_a_type(path: str, value: Any) -> None:
    validator = Draft7Validator(SCHEMA)
    assert validator.is_valid(values_with(path, value)), "its own default"
    wrong = 3.5 if isinstance(value, dict | list) else [value]
    assert not validator.is_valid(values_with(path, wrong))


def test_a_name_that_is_no_value_is_refused_wherever_it_stands() -> None:
    def maps(node: dict[str, Any], path: str) -> Iterator[str]:
        if "properties" in node:
            yield path
        for key, inner in node.get("properties", {}).items():
            yield from maps(inner, f"{path}{key}.")

    paths = list(maps(SCHEMA, ""))
    assert len(paths) > 20
    for path in paths:
        assert not Draft7Validator(SCHEMA).is_valid(values_with(f"{path}noSuchValue", {})), path
