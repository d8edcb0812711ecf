"""The files of deploy/prometheus, read: what tests of rules and of queries both look at."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from service.metrics import Metrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RECORDING, ALERTS = PROMETHEUS / "rules" / "recording.yml", PROMETHEUS / "rules" / "alerts.yml"
# Every scrape has it, whatever is scraped.
_OF_A_SCRAPE = {"up"}


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


def exported_names(label: str | None = None) -> set[str]:
    """Every name that a scrape of the server brings, from the code that exports it; only those with a label."""
    metrics = Metrics(CollectorRegistry())
    metrics.declare_requests(["Encode"], ["OK"], ["internal"])
    metrics.of_model("m", "1").set_info("CPUExecutionProvider", "fp32", "d", "cpu")
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    named = {sample.name for sample in samples if label is None or label in sample.labels}
    return {name for name in named if not name.endswith("_created")} | (_OF_A_SCRAPE if label is None else set())


def need(program: str) -> str:
    """The path of a program that Debian's prometheus or prometheus-alertmanager has; skips the test without it."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed: apt-get install prometheus prometheus-alertmanager")
    return found


def _rules(path: Path) -> list[Any]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
