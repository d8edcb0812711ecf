"""The files of this repository that the tests here read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GUIDE = DEPLOY / "README.md"
DOCKERFILE = DEPLOY / "Dockerfile"
CHART = DEPLOY / "helm" / "mhsa-serve"
ADAPTER = DEPLOY / "helm" / "prometheus-adapter.values.yaml"
PROMETHEUS = DEPLOY / "prometheus"
RECORDING, ALERTS = PROMETHEUS / "rules" / "recording.yml", PROMETHEUS / "rules" / "alerts.yml"
GRAFANA = DEPLOY / "grafana"
