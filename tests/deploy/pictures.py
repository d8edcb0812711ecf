"""`python -m tests.deploy.pictures`: the README's pictures of the dashboards, from some minutes of real load.

Two servers of the demo model with a thread each, callers of every kind whose number goes up and down, and Debian's
Prometheus. It also lists how many series each query found.
"""

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

from deploy.grafana.files import DASHBOARDS, file_name
from deploy.grafana.panels import Dashboard
from deploy.grafana.prometheus import Prometheus
from deploy.grafana.queries import interpolate
from deploy.grafana.render import TimeRange, draw, save
from tests.deploy.paths import GRAFANA
from tests.deploy.prometheus_process import PrometheusProcess
from tests.deploy.traffic import MAX_STEADY, drive, in_background
from tests.integration.server_process import TestedServer

_PERIOD_SECONDS = 150.0
_MAX_TOKENS, _MAX_IN_FLIGHT = 200, 40  # of a crowd, nearly all find room


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests.deploy.pictures", description="Draw the dashboards from real load.")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--seconds", type=float, default=420.0)
    options = parser.parse_args()
    flags = ("--threads", "1", "--max-requests-in-flight", str(_MAX_IN_FLIGHT))
    with (
        tempfile.TemporaryDirectory() as directory,
        TestedServer(options.models, *flags) as one,
        TestedServer(options.models, *flags) as other,
    ):
        servers = (one, other)
        for server in servers:
            server.wait_until_serving()
        targets = {server.metrics_port: {"pod": f"mhsa-serve-{k}"} for k, server in enumerate(servers)}
        traffic = drive([server.target for server in servers], max_tokens=_MAX_TOKENS, busy=_busy, pause=0.1)
        with PrometheusProcess(Path(directory), targets, interval_seconds=5) as prometheus, in_background(traffic):
            started = time.time()
            time.sleep(options.seconds)
            time_range = TimeRange(started, time.time(), 5.0, interval="30s", job="mhsa-serve")
            for dashboard in DASHBOARDS:
                _list(dashboard, prometheus.api, time_range)
                save(draw(dashboard, prometheus.api, time_range), GRAFANA / "pictures" / file_name(dashboard, ".png"))


def _busy(seconds: float) -> int:
    """From one caller to all of them and back."""
    return round(1 + (MAX_STEADY - 1) * (1 - math.cos(2 * math.pi * seconds / _PERIOD_SECONDS)) / 2)


def _list(dashboard: Dashboard, prometheus: Prometheus, time_range: TimeRange) -> None:
    for panel in dashboard.panels:
        for query in panel.queries:
            found = prometheus.query(interpolate(query.expression, interval=time_range.interval, job=time_range.job))
            sys.stdout.write(f"{dashboard.uid:<14} {panel.title:<52} {query.legend:<32} {len(found):>3} series\n")


if __name__ == "__main__":
    main()
