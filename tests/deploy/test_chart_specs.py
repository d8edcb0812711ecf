"""What the chart makes of values is what chart_specs.yml says, to the letter."""

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import Values, objects

CASES = yaml.safe_load(Path(__file__).with_name("chart_specs.yml").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"].replace(" ", "-"))
def test_an_object_says_what_was_promised(case: dict[str, Any]) -> None:
    kind, name, *path = case["at"].split()
    found = [o for o in objects(case.get("values")) if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1
    assert functools.reduce(_step, path[0].split(".") if path else (), found[0]) == case["is"]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("PodDisruptionBudget", {"podDisruptionBudget": {"enabled": False}}),
        ("NetworkPolicy", {"networkPolicy": {"enabled": False}}),
        ("ServiceAccount", {"serviceAccount": {"create": False}}),
        ("HorizontalPodAutoscaler", {}),
        ("ScaledObject", {}),
        ("ConfigMap", {}),
    ],
)
def test_what_is_not_enabled_is_not_made(kind: str, values: Values) -> None:
    assert [o for o in objects(values) if o["kind"] == kind] == []


def _step(node: Any, key: str) -> Any:
    """One level down; None where there is nothing of that name."""
    return node[int(key)] if isinstance(node, list) else node.get(key)
