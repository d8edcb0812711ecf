"""The dashboards, and the JSON file of each."""

import json
from pathlib import Path

from deploy.grafana import batching, capacity, service
from deploy.grafana.panels import Dashboard, to_json

DASHBOARDS: tuple[Dashboard, ...] = (service.DASHBOARD, batching.DASHBOARD, capacity.DASHBOARD)
DIRECTORY = Path(__file__).parent / "dashboards"


def file_name(dashboard: Dashboard, suffix: str = ".json") -> str:
    """`service.json`; with another suffix, the name of a dashboard's picture."""
    return dashboard.uid.removeprefix("mhsa-") + suffix


def json_text(dashboard: Dashboard) -> str:
    """What the file contains."""
    return json.dumps(to_json(dashboard), indent=1) + "\n"
