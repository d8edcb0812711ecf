"""The chart on clusters of several kinds: Helm installs, with a stand-in for the API server, up to the last step."""

import helm_python
import pytest

from tests.deploy.api_server import OPERATOR, manifest
from tests.deploy.chart import Values

IMAGE: Values = {"model": {"source": "image", "image": {"reference": "registry.example.com/models:3"}}}


@pytest.mark.parametrize(
    ("kind", "value"), [("ServiceMonitor", "serviceMonitor"), ("PrometheusRule", "prometheusRule")]
)
def test_the_operators_kinds_are_made_where_the_cluster_has_them(kind: str, value: str) -> None:
    assert f"kind: {kind}" not in manifest({})
    assert f"kind: {kind}" in manifest({}, more=OPERATOR)
    assert f"kind: {kind}" not in manifest({"monitoring": {value: "never"}}, more=OPERATOR)


def test_a_cluster_that_is_too_old_is_refused() -> None:
    with pytest.raises(helm_python.HelmError, match=r"incompatible with Kubernetes v1\.29\.9"):
        manifest({}, version="1.29.9")
    assert "kind: Deployment" in manifest({}, version="1.30.0")


def test_image_volumes_are_refused_where_pod_security_would_refuse_them() -> None:
    with pytest.raises(helm_python.HelmError, match=r"Kubernetes v1\.32\.9 is too old"):
        manifest(IMAGE, version="1.32.9")
    assert "registry.example.com/models:3" in manifest(IMAGE, version="1.33.0")
