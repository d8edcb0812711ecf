"""What the chart says and what the code does are one thing: arguments, ports, probes, grace periods, metric names."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import grpc
import pytest
import trustme
import yaml
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from service.config import Settings, parse_settings, setting_rows
from service.healthcheck import READY
from service.server import HEALTH_NAMES
from service.servicers.health import PROCESS
from tests.deploy.chart import Values, container, defaults, one, pod
from tests.deploy.exported import exported_names
from tests.deploy.kubernetes import Object
from tests.deploy.paths import ADAPTER, CHART, DEPLOY, DOCKERFILE, ROOT
from tests.integration.server_process import TestedServer, write_certificate

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
TLS: Values = {"tls": {"secretName": "certificate"}}
# As numbers or, since people quote large ones, as text.
_NUMBERS: dict[Any, dict[str, Any]] = {
    int: {"type": ["integer", "string"], "pattern": "^[0-9]+$"},
    float: {"type": ["number", "string"], "pattern": r"^[0-9]+(\.[0-9]+)?$"},
}


def test_the_server_takes_the_charts_arguments_and_reads_in_them_what_the_values_say() -> None:
    settings = parse_settings(container({**TLS, "auth": {"secretName": "tokens"}})["args"], {})
    values = defaults()
    assert settings.models == Path("/models")
    assert (settings.grpc_port, settings.metrics_port) == (values["ports"]["grpc"], values["ports"]["metrics"])
    assert settings.drain_seconds == values["shutdown"]["drainSeconds"]
    assert settings.grace_seconds == values["shutdown"]["graceSeconds"]
    assert settings.threads == 0, "the container's quota"
    assert settings.device == "cpu"
    mounted = {mount["mountPath"] for mount in container({**TLS, "auth": {"secretName": "tokens"}})["volumeMounts"]}
    assert {str(settings.models), "/etc/mhsa/tls", "/etc/mhsa/auth"} <= mounted
    assert str(settings.tls_cert) == "/etc/mhsa/tls/tls.crt"
    assert str(settings.tls_key) == "/etc/mhsa/tls/tls.key"
    assert str(settings.auth_token_file) == "/etc/mhsa/auth/tokens"


def test_defaults_are_the_servers_own() -> None:
    own = {row.flag: row.default for row in setting_rows()}
    values = defaults()
    assert own["--grpc-port"] == str(values["ports"]["grpc"])
    assert own["--metrics-port"] == str(values["ports"]["metrics"])
    assert float(own["--drain-seconds"]) == values["shutdown"]["drainSeconds"]
    assert float(own["--grace-seconds"]) == values["shutdown"]["graceSeconds"]


def test_settings_are_all_that_the_server_has_and_the_chart_does_not_set_itself() -> None:
    everything = {**TLS, "auth": {"secretName": "tokens"}}
    own = {argument.partition("=")[0] for argument in container(everything)["args"]}
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]
    offered = schema["propertyNames"]["enum"]
    flags = ["--" + re.sub("[A-Z]", lambda letter: f"-{letter[0].lower()}", name) for name in offered]
    assert flags == [row.flag for row in setting_rows() if row.flag not in own], "values.schema.json: settings"


def test_settings_take_what_the_server_takes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]
    wanted: dict[str, Any] = {}
    for field, hint in get_type_hints(Settings).items():
        name = re.sub("_(.)", lambda letter: letter[1].upper(), field)
        if get_origin(hint) is Literal:
            wanted[name] = {"enum": list(get_args(hint))}
        elif hint in _NUMBERS:
            wanted[name] = _NUMBERS[hint]
        else:
            wanted[name] = {"type": "string"}
    assert schema["properties"] == {name: wanted[name] for name in schema["propertyNames"]["enum"]}


def test_images_and_user_are_those_that_the_dockerfile_and_compose_make() -> None:
    composed = (ROOT / "docker-compose.yml").read_text() + (DEPLOY / "compose.gpu.yml").read_text()
    images = re.findall(r"image: (mhsa-serve:\S+)", composed.replace("${TAG:-0.1.0}", "0.1.0"))
    assert container()["image"] in images
    assert container({"gpu": {"enabled": True}})["image"] in images
    assert (
        yaml.safe_load((DEPLOY / "kserve" / "clusterservingruntime.yaml").read_text())["spec"]["containers"][0]["image"]
        in images
    )
    context = pod()["securityContext"]
    users = re.findall(r"^USER (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert set(users) == {f"{context['runAsUser']}:{context['runAsGroup']}"}


def test_the_charts_version_is_the_programs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


def test_a_gpu_pod_never_falls_back_to_its_cpu() -> None:
    assert parse_settings(container({"gpu": {"enabled": True}})["args"], {}).device == "cuda"


def test_ports_have_the_numbers_that_the_server_listens_on() -> None:
    changed = {"ports": {"grpc": 9000, "metrics": 9001}}
    settings = parse_settings(container(changed)["args"], {})
    ports = {port["name"]: port["containerPort"] for port in container(changed)["ports"]}
    assert ports == {"grpc": 9000, "metrics": 9001} == {"grpc": settings.grpc_port, "metrics": settings.metrics_port}
    assert all(container(changed)[probe]["grpc"]["port"] == 9000 for probe in PROBES)


def test_probes_ask_for_services_that_the_server_answers_for() -> None:
    asked = [container()[probe]["grpc"]["service"] for probe in PROBES]
    assert asked == [READY, READY, PROCESS]
    assert READY in HEALTH_NAMES


def run_probe(probe: Object, port: int) -> bool:
    """As the kubelet does, on this machine and another port."""
    if "grpc" in probe:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = HealthCheckRequest(service=probe["grpc"]["service"])
            status = HealthStub(channel).Check(request, timeout=probe["timeoutSeconds"]).status
        return bool(status == HealthCheckResponse.SERVING)
    name, *arguments = probe["exec"]["command"]
    assert name == "mhsa-serve"
    arguments = [re.sub(r"(--target=127\.0\.0\.1):8001", rf"\1:{port}", argument) for argument in arguments]
    command = [sys.executable, "-m", "service", *arguments, "--timeout=30"]  # no test of how fast this machine is
    return subprocess.run(command, check=False).returncode == 0


@pytest.fixture(scope="module", params=["plain", "TLS"])
def released(
    request: pytest.FixtureRequest, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Values, TestedServer]]:
    """The values of a release, and a server with the arguments that they give, its paths and ports ours."""
    values: Values = TLS if request.param == "TLS" else {}
    path = tmp_path_factory.mktemp("tls")
    write_certificate(trustme.CA(), path / "tls", name="mhsa-serve.default.svc")
    arguments = [argument.replace("/etc/mhsa/tls", str(path)) for argument in container(values)["args"]]
    ours = [argument for argument in arguments if not re.match("--(models|grpc-port|metrics-port)=", argument)]
    with TestedServer(tiny_bundle.parents[1], *ours, "--drain-seconds=0") as server:
        yield values, server


def test_every_probe_succeeds_on_a_server_that_the_charts_arguments_started(
    released: tuple[Values, TestedServer],
) -> None:
    values, server = released
    server.wait_for_log("serving tiny/1")
    for probe in PROBES:
        assert run_probe(container(values)[probe], server.grpc_port), probe


def test_tls_is_probed_by_our_own_command() -> None:
    assert all("exec" in container(TLS)[probe] and "grpc" not in container(TLS)[probe] for probe in PROBES)
    assert all(container(TLS)[probe]["timeoutSeconds"] > 3 for probe in PROBES), "the command's own limit is 3 s"
    assert [container(TLS)[probe]["periodSeconds"] for probe in PROBES] == [5, 10, 20]
    assert [container()[probe]["periodSeconds"] for probe in PROBES] == [5, 5, 10]


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\bmhsa_\w+", query))


def test_the_scalers_ask_for_metrics_that_are_exported_names() -> None:
    trigger, _ = one("ScaledObject", {"autoscaling": {"keda": {"enabled": True}}})["spec"]["triggers"]
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    for query in (trigger["metadata"]["query"], rule["metricsQuery"], rule["seriesQuery"]):
        assert names_in(query)
        assert names_in(query) <= exported_names()


def test_the_autoscaler_asks_for_what_the_adapters_rule_is_called() -> None:
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    metrics = one("HorizontalPodAutoscaler", {"autoscaling": {"hpa": {"enabled": True}}})["spec"]["metrics"]
    assert metrics[0]["pods"]["metric"]["name"] == rule["name"]["as"]
    assert metrics[0]["pods"]["target"]["averageValue"] == "100m"
    assert metrics[1]["containerResource"]["container"] == container()["name"]


def test_the_query_selects_the_job_that_the_monitor_names() -> None:
    values: Values = {"autoscaling": {"keda": {"enabled": True}}, "monitoring": {"serviceMonitor": "always"}}
    (endpoint,) = one("ServiceMonitor", values)["spec"]["endpoints"]
    (relabeling,) = endpoint["relabelings"]
    assert relabeling == {"targetLabel": "job", "replacement": "mhsa-serve"}
    query = one("ScaledObject", values)["spec"]["triggers"][0]["metadata"]["query"]
    assert '{namespace="default",job="mhsa-serve"}' in query
