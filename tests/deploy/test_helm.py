"""The chart: lints, renders in every combination of what its README offers, and each object is strictly valid."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import helm_python
import pytest

from service.config import parse_settings
from tests.deploy.chart import NEEDED, Values, container, defaults, merged, objects, one, pod, texts
from tests.deploy.kubernetes import VERSIONS, Object, errors, is_restricted
from tests.deploy.paths import CHART, GRAFANA

AXES: dict[str, list[Values]] = {
    "model": [
        {"model": {"pvc": {"subPath": "team/models"}}},
        {"model": {"source": "init", "init": {"image": "fetch:1", "command": ["fetch"], "args": ["s3://a/b"]}}},
        {"model": {"source": "image", "image": {"reference": "registry.example.com/models:3", "subPath": "models"}}},
    ],
    "device": [{}, {"gpu": {"enabled": True}, "runtimeClassName": "nvidia"}],
    "scaling": [{}, {"autoscaling": {"hpa": {"enabled": True}}}, {"autoscaling": {"keda": {"enabled": True}}}],
    "access": [{}, {"tls": {"secretName": "certificate"}, "auth": {"secretName": "tokens"}}],
    "watching": [
        {"monitoring": {"serviceMonitor": "never", "prometheusRule": "never"}},
        {"monitoring": {"serviceMonitor": "always", "prometheusRule": "always", "dashboards": True}},
    ],
    "policies": [
        {},
        {
            "podDisruptionBudget": {"enabled": False},
            "networkPolicy": {"enabled": False},
            "serviceAccount": {"create": False},
            "topologySpread": {"zone": "", "hostname": ""},
        },
    ],
}
EVERYTHING: Values = {
    "image": {"digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "pull"}],
    "settings": {"maxMessageBytes": 67108864, "logLevel": "debug", "precision": "int8"},
    "extraArgs": ["--max-queued-tokens=5000"],
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "more", "configMap": {"name": "more"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "networkPolicy": {
        "grpcFrom": [{"podSelector": {"matchLabels": {"app": "caller"}}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "egress": [{"ports": [{"port": 4317}]}],
    },
    "podDisruptionBudget": {"maxUnavailable": "25%"},
    "monitoring": {"serviceMonitor": "always", "labels": {"release": "kube-prometheus-stack"}},
    "serviceAccount": {"annotations": {"a": "b"}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"a": "b"},
    "nodeSelector": {"a": "b"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}


def combinations() -> Iterator[Values]:
    yield {}
    yield EVERYTHING
    for choices in itertools.product(*AXES.values()):
        values: Values = {}
        for choice in choices:
            values = merged(values, choice)
        yield values


@pytest.fixture(scope="module")
def releases() -> list[list[Object]]:
    """Every combination's objects."""
    return [objects(values) for values in combinations()]


def has_image_volume(found: Object) -> bool:
    return '"image": {"pullPolicy"' in json.dumps(found, sort_keys=True)


def test_the_chart_lints() -> None:
    for values in ({}, EVERYTHING):
        report = helm_python.lint(CHART, merged(NEEDED, values), strict=True)
        assert not report["errors"]
        assert [m["error"] for m in report["messages"] if m["severity"] > 1] == []


def test_every_object_of_every_combination_is_strictly_valid_in_every_version(releases: list[list[Object]]) -> None:
    distinct = {json.dumps(found, sort_keys=True): found for release in releases for found in release}
    wrong = [
        (version, found["kind"], error)
        for found in distinct.values()
        for version in (VERSIONS[3:] if has_image_volume(found) else VERSIONS)  # since 1.33, as the README says
        for error in errors(found, version)
    ]
    assert wrong == []
    assert {found["kind"] for found in distinct.values()} == {
        *("Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy", "Pod"),
        *("HorizontalPodAutoscaler", "ScaledObject", "ServiceMonitor", "PrometheusRule", "ConfigMap"),
    }


def test_every_pod_of_every_combination_is_restricted(releases: list[list[Object]]) -> None:
    for release in releases:
        for found in release:
            if found["kind"] == "Deployment":
                assert is_restricted(found["spec"]["template"]["spec"])
            if found["kind"] == "Pod":
                assert is_restricted(found["spec"])


def test_no_two_objects_of_a_release_have_one_name(releases: list[list[Object]]) -> None:
    for release in releases:
        found = [(o["kind"], o["metadata"]["name"]) for o in release]
        assert len(set(found)) == len(found)


def test_names_fit_however_long_the_release_is_called() -> None:
    for found in objects(EVERYTHING, release="a-release-with-a-name-as-long-as-helm-allows-it-x"):
        assert len(found["metadata"]["name"]) <= 63


@pytest.mark.parametrize("release", ["team.search-v1.2", "a-release-that-is-cut-between-its-two-dashes-----x"])
def test_names_are_those_of_services_whatever_helm_takes_for_a_release(release: str) -> None:
    for found in objects(release=release):
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", found["metadata"]["name"])


def test_a_release_whose_name_no_service_can_have_is_refused() -> None:
    with pytest.raises(helm_python.HelmError, match=r"2nd-mhsa-serve cannot be .*: set fullnameOverride"):
        objects(release="2nd")


def test_a_smaller_limit_is_not_less_than_what_is_reserved() -> None:
    """Kubernetes would refuse the pods. Without requests it takes the limits."""
    resources = container({"resources": {"limits": {"cpu": "500m"}}})["resources"]
    assert resources == {"limits": {"cpu": "500m", "memory": "1Gi"}, "requests": {}}


def test_the_chart_renders_without_any_resources() -> None:
    assert "resources" in container({"resources": None, "settings": {"threads": 2}})


def test_helms_own_test_may_call_where_callers_are_named() -> None:
    policy = one("NetworkPolicy", {"networkPolicy": {"grpcFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}]}})
    labels = one("Pod", name="mhsa-serve-test")["metadata"]["labels"]
    callers, _ = policy["spec"]["ingress"]
    assert any(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in callers["from"])


def test_selectors_find_the_servers_pods_and_no_others() -> None:
    found = objects({"monitoring": {"serviceMonitor": "always"}})
    labels = one("Deployment")["spec"]["template"]["metadata"]["labels"]
    other = one("Pod", name="mhsa-serve-test")["metadata"]["labels"]
    selectors = [o["spec"]["selector"] for o in found if o["kind"] == "Service"]
    selectors += [
        o["spec"]["selector"]["matchLabels"] for o in found if o["kind"] in ("Deployment", "PodDisruptionBudget")
    ]
    selectors += [o["spec"]["podSelector"]["matchLabels"] for o in found if o["kind"] == "NetworkPolicy"]
    assert len(selectors) == 5
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= other.items()


def test_the_monitor_finds_one_service_that_has_its_port() -> None:
    monitor = one("ServiceMonitor", {"monitoring": {"serviceMonitor": "always"}})["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    (service,) = (o for o in objects() if o["kind"] == "Service" and wanted <= o["metadata"]["labels"].items())
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_custom_resources_are_not_made_where_the_cluster_has_no_such_kind() -> None:
    assert not [o for o in objects() if "monitoring.coreos.com" in o["apiVersion"]]


def test_replicas_are_left_to_whoever_scales() -> None:
    assert one("Deployment", {"replicas": 3})["spec"]["replicas"] == 3
    for scaler in ("hpa", "keda"):
        values = {"autoscaling": {scaler: {"enabled": True}}}
        assert "replicas" not in one("Deployment", values)["spec"]


def test_a_gpu_is_given_back_before_the_next_pod_asks_for_it() -> None:
    strategy = one("Deployment", {"gpu": {"enabled": True}})["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert container({"gpu": {"enabled": True}})["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_a_cpu_rollout_never_takes_a_pod_away_first() -> None:
    assert one("Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 0}


def test_a_slow_start_is_not_called_a_failed_rollout() -> None:
    for seconds in (5, 33, 600, 7200):
        spec = one("Deployment", {"startupSeconds": seconds})["spec"]
        probe = spec["template"]["spec"]["containers"][0]["startupProbe"]
        allowed = probe["periodSeconds"] * probe["failureThreshold"]
        assert seconds <= allowed < spec["progressDeadlineSeconds"]


def test_the_kubelet_waits_longer_than_the_server_takes_to_end() -> None:
    for shutdown in ({}, {"preStopSeconds": 0, "drainSeconds": 0.5, "graceSeconds": 0.2}, {"graceSeconds": 300}):
        spec = pod({"shutdown": shutdown})
        (server,) = spec["containers"]
        settings = parse_settings(server["args"], {})
        sleep = server["lifecycle"]["preStop"]["sleep"]["seconds"] if "lifecycle" in server else 0
        assert sleep == merged(defaults()["shutdown"], shutdown)["preStopSeconds"]
        needed = sleep + settings.drain_seconds + settings.grace_seconds
        assert needed + 4 < spec["terminationGracePeriodSeconds"] < needed + 7


def test_where_the_cluster_assigns_users_the_chart_names_none() -> None:
    assert pod()["securityContext"]["runAsUser"] == 10001
    assert not pod({"user": None})["securityContext"].keys() & {"runAsUser", "runAsGroup", "fsGroup"}
    assert is_restricted(pod({"user": None}))


def test_large_numbers_reach_the_server_as_they_were_written() -> None:
    assert "--max-message-bytes=67108864" in container(EVERYTHING)["args"]
    assert "--max-wait-seconds=0.0025" in container({"settings": {"maxWaitSeconds": 0.0025}})["args"]


def test_dashboards_are_the_files_with_the_label_that_grafana_looks_for() -> None:
    found = [o for o in objects({"monitoring": {"dashboards": True}}) if o["kind"] == "ConfigMap"]
    files = sorted((GRAFANA / "dashboards").glob("*.json"))
    assert {name: text for o in found for name, text in o["data"].items()} == {f.name: f.read_text() for f in files}
    assert all(o["metadata"]["labels"]["grafana_dashboard"] == "1" for o in found)


def test_what_is_mounted_is_a_volume_and_what_is_a_volume_is_mounted(releases: list[list[Object]]) -> None:
    for release in releases:
        (spec,) = (o["spec"]["template"]["spec"] for o in release if o["kind"] == "Deployment")
        mounts = {m["name"] for c in spec["containers"] + spec.get("initContainers", []) for m in c["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["volumes"]}


def test_the_notes_name_the_headless_service() -> None:
    notes = texts()["mhsa-serve/templates/NOTES.txt"]
    assert one("Service", name="mhsa-serve-headless")["spec"]["clusterIP"] == "None"
    assert 'EncoderClient("dns:///mhsa-serve-headless.default.svc:8001")' in notes


def test_the_notes_show_a_call_that_the_server_takes() -> None:
    notes = texts({"tls": {"secretName": "cert"}, "auth": {"secretName": "tokens"}})["mhsa-serve/templates/NOTES.txt"]
    assert 'svc:8001", credentials=grpc.ssl_channel_credentials(ca), token=token)' in notes
    assert "The certificate in cert must be for mhsa-serve-headless.default.svc" in notes
    assert "credentials" not in texts()["mhsa-serve/templates/NOTES.txt"]


REFUSED: list[tuple[Values, str]] = [
    ({"model": {"pvc": {"claimName": ""}}}, "set model.pvc.claimName to the claim"),
    ({"model": {"source": "init"}}, "set model.init.image to the image"),
    ({"model": {"source": "image"}}, "set model.image.reference to the OCI image"),
    ({"model": {"source": "s3"}}, "at '/model/source': value must be one of 'pvc', 'init', 'image'"),
    ({"shutdown": {"terminationGracePeriodSeconds": 40}}, r"it must be more than .* = 40"),
    ({"shutdown": {"graceSeconds": 60, "terminationGracePeriodSeconds": 45}}, r"it must be more than .* = 70"),
    ({"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}}, "both enabled: KEDA makes a Horizontal"),
    ({"autoscaling": {"minReplicas": 11}}, "autoscaling.minReplicas 11 is more than maxReplicas 10"),
    ({"autoscaling": {"minReplicas": 0}}, "at '/autoscaling/minReplicas': minimum: got 0, want 1"),
    ({"settings": {"threads": 4}}, "remove settings.threads"),
    ({"resources": {"limits": {"cpu": None}}}, "the server would take every CPU of the node"),
    ({"extraArgs": ["--grpc-port=9000"]}, "extraArgs has --grpc-port=9000: set ports.grpc"),
    ({"extraArgs": ["--models", "/a"]}, "extraArgs has --models: set model"),
    ({"extraEnv": [{"name": "MHSA_DRAIN_SECONDS", "value": "1"}]}, "set shutdown.drainSeconds"),
    ({"extraArgs": ["--threads=9"]}, "extraArgs has --threads=9: set resources.limits.cpu"),
    ({"extraEnv": [{"name": "MHSA_THREADS", "value": "9"}]}, "MHSA_THREADS: set resources.limits.cpu"),
    ({"settings": {"logLevel": "debug"}, "extraArgs": ["--log-level", "info"]}, "set settings.logLevel"),
    ({"settings": {"host": "127.0.0.1"}}, "neither callers nor the kubelet's probes would reach the server"),
    (
        {
            "autoscaling": {"hpa": {"enabled": True}},
            "resources": {"limits": {"cpu": None}},
            "settings": {"threads": 2},
        },
        "set resources.requests.cpu, or autoscaling.cpuPercent to null",
    ),
    ({"podLabels": {"app.kubernetes.io/name": "mine"}}, "invalid propertyName 'app.kubernetes.io/name'"),
    ({"podDisruptionBudget": {"maxUnavailable": "0%"}}, "'0%' does not match pattern"),
    ({"ports": {"metrics": 8001}}, "ports.grpc and ports.metrics are the same port"),
    ({"ports": {"grpc": 80}}, "at '/ports/grpc': minimum: got 80, want 1,024"),
    ({"user": 0}, "at '/user': minimum: got 0, want 1"),
    (
        {"monitoring": {"objectives": {"latencySeconds": "0.3"}}},
        "at '/monitoring/objectives/latencySeconds': value must be",
    ),
    ({"monitoring": {"objectives": {"availability": 1}}}, "at '/monitoring/objectives/availability': exclusiveMaximum"),
    ({"monitoring": {"runbookBase": "https://example.com"}}, "at '/monitoring/runbookBase': .* does not match pattern"),
    ({"settings": {"maxBatchToken": 4}}, "invalid propertyName 'maxBatchToken'"),
    ({"settings": {"grpcPort": 9000}}, "invalid propertyName 'grpcPort'"),
    ({"settings": {"logFormat": "yaml"}}, "at '/settings/logFormat': value must be one of 'text', 'json'"),
    ({"settings": {"maxQueuedTokens": "many"}}, "at '/settings/maxQueuedTokens': 'many' does not match pattern"),
    ({"replicaCount": 3}, "additional properties 'replicaCount' not allowed"),
    ({"tls": {"secret": "a"}}, "at '/tls': additional properties 'secret' not allowed"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_is_wrong_is_refused_with_what_to_do(values: Values, message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        objects(values)


def test_threads_may_be_told_where_there_is_no_limit() -> None:
    values = {"resources": {"limits": {"cpu": None}}, "settings": {"threads": 4}}
    assert "--threads=4" in container(values)["args"]


def test_the_package_holds_every_file_that_a_release_needs(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as chart:
        rendered = chart.render(NEEDED, name="mhsa-serve", namespace="default")
    assert rendered == texts()
