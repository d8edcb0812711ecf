"""The rules in deploy/prometheus/rules, as they stand in their files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.paths import ALERTS, RECORDING


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as it stands in its file."""

    name: str
    expression: str
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


def recording_rules() -> list[Rule]:
    """What is recorded, in the order of evaluation."""
    return [Rule(rule["record"], rule["expr"]) for rule in _rules(RECORDING)]


def alerting_rules() -> list[Rule]:
    """The alerts, in the order of their file."""
    return [Rule(rule["alert"], rule["expr"], rule["labels"], rule["annotations"]) for rule in _rules(ALERTS)]


def _rules(path: Path) -> list[Any]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
