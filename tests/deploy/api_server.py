"""A stand-in for a cluster's API server, as far as Helm asks it before it installs: its version, and its kinds."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import helm_python

from tests.deploy.chart import NEEDED, Values, merged
from tests.deploy.paths import CHART

_KINDS: dict[str, Sequence[str]] = {
    "v1": ("ConfigMap", "Pod", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
}
OPERATOR: Mapping[str, Sequence[str]] = {"monitoring.coreos.com/v1": ("ServiceMonitor", "PrometheusRule")}


def manifest(values: Values, *, version: str = "1.34.2", more: Mapping[str, Sequence[str]] | None = None) -> str:
    """What `helm install --dry-run=server` would make in a cluster of this version with `more` kinds."""
    with _api_server(version, {**_KINDS, **(more or {})}) as address:
        with helm_python.Config(kube_apiserver=address, storage_driver="memory", namespace="default") as cluster:
            release = cluster.install(CHART, "mhsa-serve", merged(NEEDED, values), dry_run="server")
    return str(release["manifest"])


@contextmanager
def _api_server(version: str, kinds: Mapping[str, Sequence[str]]) -> Iterator[str]:
    answers = _answers(version, kinds)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
            """Say nothing."""

        def do_GET(self) -> None:
            body = answers.get(self.path.partition("?")[0])
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answers(version: str, kinds: Mapping[str, Sequence[str]]) -> dict[str, bytes]:
    major, minor, _ = version.split(".")
    groups = [group.split("/") for group in kinds if "/" in group]
    found: dict[str, Any] = {
        "/version": {"major": major, "minor": minor, "gitVersion": f"v{version}"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {"name": name, "versions": [{"groupVersion": f"{name}/{number}", "version": number}]}
                for name, number in groups
            ],
        },
    }
    for group, names in kinds.items():
        resources = [
            {"name": f"{name.lower()}s", "kind": name, "namespaced": True, "singularName": "", "verbs": ["get"]}
            for name in names
        ]
        path = f"/apis/{group}" if "/" in group else f"/api/{group}"
        found[path] = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}
    # A schema document of no kinds, in protobuf: nothing to check here, kubernetes.py does that.
    return {path: json.dumps(answer).encode() for path, answer in found.items()} | {"/openapi/v2": b""}
