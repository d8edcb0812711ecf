"""The dashboards as files: current, complete, and true to what the server exports."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as grafana

from deploy.grafana.files import DASHBOARDS, DIRECTORY, file_name, json_text
from deploy.grafana.panels import Dashboard, Panel, Query, Row, grid_positions, to_json
from deploy.grafana.queries import interpolate
from tests.deploy.exported import exported_names
from tests.deploy.paths import ALERTS, GUIDE
from tests.deploy.promql import selectors
from tests.deploy.rule_files import recording_rules

PANELS = [(dashboard, panel) for dashboard in DASHBOARDS for panel in dashboard.panels]
each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
each_panel = pytest.mark.parametrize(
    ("dashboard", "panel"), PANELS, ids=[f"{dashboard.uid}: {panel.title}" for dashboard, panel in PANELS]
)
OF_OTHERS = {"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"}  # NVIDIA's exporter, where there is a GPU
RECORDED = {rule.name for rule in recording_rules()}
# Grafana's names: https://grafana.com/docs/grafana/latest/panels-visualizations/configure-standard-options
UNITS = {"s", "bytes", "decmbytes", "percent", "percentunit", "reqps", "ops", "short", "none"}


@each_dashboard
def test_the_committed_file_is_current(dashboard: Dashboard) -> None:
    assert (DIRECTORY / file_name(dashboard)).read_text() == json_text(dashboard), "run python -m deploy.grafana"


@each_dashboard
def test_grafana_s_own_schema_knows_every_key(dashboard: Dashboard) -> None:
    """Grafana ignores what it does not know, as its own types do: what they do not give back would have no effect."""
    plugins.register_default_plugins()
    given = to_json(dashboard)
    kept = json.loads(JSONEncoder().encode(grafana.Dashboard.from_json(given)))
    unknown = {path for path in changed(given, kept) if not re.fullmatch(r"/templating/list/\d/definition", path)}
    assert unknown == set()  # Grafana writes `definition` itself, though its schema lacks it


def changed(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Paths of what is in one JSON value and not, or not the same, in the other."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from changed(value, kept.get(key), f"{path}/{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from changed(one, other, f"{path}/{index}")
    elif given != kept:
        yield path


def test_no_file_is_without_its_dashboard() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == {file_name(dashboard) for dashboard in DASHBOARDS}


def test_each_dashboard_has_an_address_of_its_own() -> None:
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len({d.title for d in DASHBOARDS}) == 3


@each_dashboard
def test_data_source_namespace_job_and_model_are_chosen_and_nothing_is_edited(dashboard: Dashboard) -> None:
    written = to_json(dashboard)
    variables = {variable["name"]: variable for variable in written["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "job", "model"]
    for name in ("namespace", "job", "model"):
        assert variables[name]["includeAll"]
        assert variables[name]["datasource"]["uid"] == "${datasource}"
    assert written["editable"] is False
    for panel in written["panels"]:
        targets: list[dict[str, Any]] = panel.get("targets", [])
        assert (panel["type"] == "row") == (not targets)
        assert all(part["datasource"]["uid"] == "${datasource}" for part in (panel, *targets) if targets)


@each_dashboard
def test_ids_are_unique(dashboard: Dashboard) -> None:
    ids = [panel["id"] for panel in to_json(dashboard)["panels"]]
    assert len(set(ids)) == len(ids)


@each_dashboard
def test_titles_are_unique(dashboard: Dashboard) -> None:
    titles = [panel.title for panel in dashboard.panels]
    assert len(set(titles)) == len(titles)


@each_dashboard
def test_panels_stand_on_the_grid_under_their_heading_and_not_on_each_other(dashboard: Dashboard) -> None:
    placed = grid_positions(dashboard)
    assert isinstance(placed[0][0], Row)
    assert sum(isinstance(one, Panel) for one, _ in placed) == len(dashboard.panels)
    for _, place in placed:
        assert place["x"] + place["w"] <= 24
    for (_, a), (_, b) in combinations(placed, 2):
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert is_beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]


@each_panel
def test_a_panel_says_what_it_shows_and_in_which_unit(dashboard: Dashboard, panel: Panel) -> None:
    assert panel.unit in UNITS
    assert re.fullmatch(r"[A-Z].{20,}\.", panel.description)
    assert panel.queries


@each_panel
def test_only_what_is_one_number_looks_back_over_days(dashboard: Dashboard, panel: Panel) -> None:
    for target in to_json(Dashboard("uid", "Title", "Text.", (Row("Row", (panel,)),)))["panels"][1]["targets"]:
        assert target["instant"] != target["range"]
        assert target["instant"] or not re.search(r"\[\d+d", target["expr"])


@each_panel
def test_a_query_reads_only_what_is_exported_or_recorded(dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        assert {selector.name for selector in selectors(example(query))} <= (exported_names() | RECORDED | OF_OTHERS)


@each_panel
def test_a_query_reads_what_was_chosen(dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        for selector in selectors(example(query)):
            assert 'namespace=~"NAMESPACE"' in selector.matchers
            assert selector.name in OF_OTHERS or 'job=~"JOB"' in selector.matchers
            is_of_a_model = selector.name in _of_models()
            assert ('model=~"MODEL"' in selector.matchers) == is_of_a_model


@each_panel
def test_counters_are_asked_for_their_growth_within_grafanas_interval(dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        raw = re.sub(r"\w+:\w+:\w+\{[^}]*\}(\[\w+\])?", "recorded", query.expression)
        counted = re.findall(r"\b\w+_(?:total|count|sum|bucket)\{", raw)
        grown = re.findall(r"(?:rate|increase)\(\w+\{[^}]*\}\[\$__rate_interval\]\)", raw)
        assert len(counted) == len(grown)
        assert "[" not in raw.replace("[$__rate_interval]", "")


def test_what_the_runbooks_tell_to_look_at_is_there() -> None:
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", GUIDE.read_text()))
    assert named
    assert named <= {panel.title for _, panel in PANELS}


def test_what_the_alerts_tell_to_look_at_is_there() -> None:
    alerts = ALERTS.read_text()
    named = set(re.findall(r"panel ([A-Z][a-z]+(?: [a-z]+)*?)(?= over| against|:|,|\.)", alerts))
    assert named
    assert named <= {panel.title for _, panel in PANELS}
    titles = {dashboard.title.removeprefix("mhsa-serve: ") for dashboard in DASHBOARDS}
    assert set(re.findall(r"dashboard ([A-Z]\w+)", alerts)) <= titles


def example(query: Query) -> str:
    """The query with something chosen that nothing else could be."""
    return interpolate(query.expression, interval="1m", namespace="NAMESPACE", job="JOB", model="MODEL")


def _of_models() -> set[str]:
    """The names whose series have the label model, from the code that exports them."""
    return exported_names(label="model")
