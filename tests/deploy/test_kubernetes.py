"""The validator itself: it must fail where an API server would."""

import copy

import pytest

from tests.deploy.chart import one, pod
from tests.deploy.kubernetes import VERSIONS, errors, is_restricted

MONITORED = {"serviceMonitor": "always", "prometheusRule": "always"}


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_key_fails_in_every_version(version: str) -> None:
    deployment = one("Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    (error,) = errors(deployment, version)
    assert "'imagePolicy' was unexpected" in error


@pytest.mark.parametrize("kind", ["ScaledObject", "ServiceMonitor", "PrometheusRule"])
def test_an_unknown_key_of_a_custom_resource_fails(kind: str) -> None:
    found = one(kind, {"autoscaling": {"keda": {"enabled": True}}, "monitoring": MONITORED})
    assert not errors(found, "1.37")
    found["spec"]["intervall"] = "15s"
    (error,) = errors(found, "1.37")
    assert "'intervall' was unexpected" in error


def test_a_custom_resource_without_a_schema_fails() -> None:
    with pytest.raises(LookupError, match=r"no example\.com/v1 Thing"):
        errors({"apiVersion": "example.com/v1", "kind": "Thing"}, "1.37")


def test_a_field_is_not_known_before_its_version() -> None:
    deployment = one("Deployment")
    deployment["spec"]["template"]["spec"]["volumes"] = [{"name": "m", "image": {"reference": "a"}}]
    assert errors(deployment, "1.30")
    assert not errors(deployment, "1.31")


def test_a_pod_that_could_become_root_is_not_restricted() -> None:
    spec = pod()
    assert is_restricted(spec)
    for change in ({"runAsUser": 0}, {"runAsNonRoot": False}):
        other = copy.deepcopy(spec)
        other["securityContext"].update(change)
        assert not is_restricted(other)
    spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    assert not is_restricted(spec)
