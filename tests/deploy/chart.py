"""The Helm chart, rendered by Helm itself (PyPI's helm-python-sdk: Helm 4 as a library; it needs no cluster)."""

import functools
from collections.abc import Iterator
from typing import Any

import helm_python
import yaml

from tests.deploy.kubernetes import Object
from tests.deploy.paths import CHART

Values = dict[str, Any]  # Any: what YAML holds
# The one value without which nothing can be served.
NEEDED: Values = {"model": {"pvc": {"claimName": "models"}}}
# Maps whose keys are the users': one value each.
_FREE = ("resources.limits", "monitoring.dashboardLabels")


def defaults() -> Values:
    """values.yaml."""
    values: Values = yaml.safe_load((CHART / "values.yaml").read_text())
    return values


def leaves(values: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no map, by its path; an empty map is one that users fill."""
    for key, value in values.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" not in _FREE:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def merged(base: Values, changes: Values) -> Values:
    """`base` with `changes`, maps key by key, as Helm merges values."""
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        out[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def texts(values: Values | None = None, *, release: str = "mhsa-serve") -> dict[str, str]:
    """What each template gives in namespace `default`, for `values` over the one that is needed."""
    return _chart().render(merged(NEEDED, values or {}), name=release, namespace="default")


@functools.cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def objects(values: Values | None = None, *, release: str = "mhsa-serve") -> list[Object]:
    """Every object of a release, for `values` over the one that is needed."""
    rendered = [text for name, text in texts(values, release=release).items() if name.endswith(".yaml")]
    return [document for text in rendered for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def one(kind: str, values: Values | None = None, *, name: str = "mhsa-serve") -> Object:
    """The release's only object of a kind and name."""
    (found,) = (o for o in objects(values) if o["kind"] == kind and o["metadata"]["name"] == name)
    return found


def pod(values: Values | None = None) -> Object:
    """The spec of the server's pods."""
    spec: Object = one("Deployment", values)["spec"]["template"]["spec"]
    return spec


def container(values: Values | None = None) -> Object:
    """The server's container."""
    (found,) = pod(values)["containers"]
    assert isinstance(found, dict)
    return found
