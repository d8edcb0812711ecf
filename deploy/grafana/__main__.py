"""`python -m deploy.grafana`: write the dashboards' JSON; with --check, fail where what is committed is not current."""

import argparse
import json
import sys
from pathlib import Path

from deploy.grafana import batching, capacity, service
from deploy.grafana.panels import Dashboard, to_json

DASHBOARDS: tuple[Dashboard, ...] = (service.DASHBOARD, batching.DASHBOARD, capacity.DASHBOARD)
DIRECTORY = Path(__file__).parent / "dashboards"


def path_of(dashboard: Dashboard) -> Path:
    """Where its JSON is."""
    return DIRECTORY / f"{dashboard.uid.removeprefix('mhsa-')}.json"


def text_of(dashboard: Dashboard) -> str:
    """Its JSON."""
    return json.dumps(to_json(dashboard), indent=1) + "\n"


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="deploy.grafana", description="Write the dashboards' JSON.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it would change something")
    is_check = parser.parse_args().check
    stale = [one for one in DASHBOARDS if not path_of(one).exists() or path_of(one).read_text() != text_of(one)]
    for dashboard in stale:
        if is_check:
            print(f"{path_of(dashboard)} is not current; run python -m deploy.grafana")
        else:
            path_of(dashboard).write_text(text_of(dashboard))
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
