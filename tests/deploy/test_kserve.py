"""deploy/kserve: strictly valid, and in agreement with the server that it starts."""

import yaml

from service.bundle import FORMAT
from service.config import parse_settings
from service.healthcheck import READY
from service.server import HEALTH_NAMES
from service.servicers.health import PROCESS
from tests.deploy import chart
from tests.deploy.kubernetes import VERSIONS, Object, errors, is_restricted
from tests.deploy.paths import DEPLOY

# What an InferenceService waits for a pod to end where it says nothing: Kubernetes' default.
TERMINATION_SECONDS = 30


def read(name: str) -> Object:
    found: Object = yaml.safe_load((DEPLOY / "kserve" / f"{name}.yaml").read_text())
    return found


def container() -> Object:
    (found,) = read("clusterservingruntime")["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_both_are_strictly_valid_and_an_unknown_key_is_not() -> None:
    for name in ("clusterservingruntime", "inferenceservice"):
        assert [error for version in VERSIONS for error in errors(read(name), version)] == []
    runtime = read("clusterservingruntime")
    runtime["spec"]["protocolVersion"] = "grpc-v2"
    service = read("inferenceservice")
    service["spec"]["predictor"]["model"]["storageURI"] = "pvc://models"
    for wrong in (runtime, service):
        (error,) = errors(wrong, "1.37")
        assert "was unexpected" in error


def test_the_service_asks_for_what_the_runtime_offers() -> None:
    runtime = read("clusterservingruntime")
    model = read("inferenceservice")["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    (offered,) = runtime["spec"]["supportedModelFormats"]
    assert offered["autoSelect"], "services that name no runtime get this one"
    assert model["modelFormat"] == {"name": offered["name"], "version": offered["version"]}
    assert f"{offered['name']}/{offered['version']}" == FORMAT


def test_kserve_finds_the_container_by_its_name_and_http2_by_the_ports() -> None:
    assert container()["name"] == "kserve-container"
    (port,) = container()["ports"]
    assert (port["name"], port["containerPort"]) == ("h2c", 9000)


def test_the_server_takes_the_runtimes_arguments() -> None:
    settings = parse_settings(container()["args"], {})
    annotations = read("clusterservingruntime")["spec"]["annotations"]
    assert str(settings.models) == "/mnt/models"
    assert settings.grpc_port == container()["ports"][0]["containerPort"]
    assert str(settings.metrics_port) == annotations["prometheus.kserve.io/port"]
    assert settings.threads == 0, "the container's quota"
    assert container()["resources"]["limits"]["cpu"]
    assert settings.drain_seconds + settings.grace_seconds < TERMINATION_SECONDS


def test_its_probes_are_the_servers() -> None:
    for name, service in (("startupProbe", READY), ("readinessProbe", READY), ("livenessProbe", PROCESS)):
        assert container()[name]["grpc"] == {"port": 9000, "service": service}
    assert READY in HEALTH_NAMES


def test_but_for_its_port_its_container_is_the_charts() -> None:
    def comparable(found: Object) -> Object:
        probes = {name: found[name] | {"grpc": None} for name in ("startupProbe", "readinessProbe", "livenessProbe")}
        tmp = next(mount for mount in found["volumeMounts"] if mount["name"] == "tmp")
        limits = found["resources"]["limits"]
        return {key: found[key] for key in ("image", "command")} | probes | {"tmp": tmp, "limits": limits}

    assert comparable(container()) == comparable(chart.container())
    context = chart.pod()["securityContext"]
    alone = {key: context[key] for key in ("runAsNonRoot", "runAsUser", "seccompProfile")}
    assert container()["securityContext"] == chart.container()["securityContext"] | alone
    assert read("clusterservingruntime")["spec"]["volumes"] == [v for v in chart.pod()["volumes"] if v["name"] == "tmp"]


def test_prometheus_is_led_to_the_metrics() -> None:
    assert read("clusterservingruntime")["spec"]["annotations"] == {
        "prometheus.kserve.io/port": "8002",
        "prometheus.kserve.io/path": "/metrics",
    }


def test_the_example_needs_no_knative() -> None:
    assert read("inferenceservice")["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Standard"}


def test_its_container_is_restricted() -> None:
    context = container()["securityContext"]
    whole = {key: context.pop(key) for key in ("runAsNonRoot", "runAsUser", "seccompProfile")}
    own = container() | {"securityContext": context}
    assert is_restricted({"securityContext": whole, "containers": [own]})
