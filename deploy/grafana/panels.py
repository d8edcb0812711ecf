"""A dashboard's rows, panels and queries, and the JSON that Grafana reads.

The dashboards are 4,500 lines of JSON, nearly all of it repetition, so they are generated. Without a library: the only
one on PyPI that knows Grafana's schema installs a version for Grafana 10.1 unless it is pinned by epoch.
"""

from dataclasses import dataclass
from typing import Any, Literal

# Grafana 10.4 and later read it; later ones migrate it when they load it.
_SCHEMA_VERSION = 39
NUM_COLUMNS = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_PALE, _SOLID = 10, 60

Kind = Literal["timeseries", "stat", "heatmap", "table"]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    """A query in PromQL; `legend` may contain {{label}}."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is Grafana's name for it; `limit` draws a line; `is_stacked` stacks the series."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    limit: float | None = None
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, side by side as they fit."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`uid` is part of its URL, so it must never change."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> list[Panel]:
        """All of them, from top to bottom."""
        return [panel for row in self.rows for panel in row.panels]


def grid_positions(dashboard: Dashboard) -> list[tuple[Row | Panel, Json]]:
    """Each row's heading and panel, with its position on the grid: Grafana's `gridPos`."""
    placed: list[tuple[Row | Panel, Json]] = []
    y = 0
    for row in dashboard.rows:
        placed.append((row, {"x": 0, "y": y, "w": NUM_COLUMNS, "h": 1}))
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > NUM_COLUMNS:
                x, y, height = 0, y + height, 0
            placed.append((panel, {"x": x, "y": y, "w": panel.width, "h": panel.height}))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return placed


def to_json(dashboard: Dashboard) -> Json:
    """The file that Grafana reads."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["mhsa-serve"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "tags": ["mhsa-serve"], "title": "mhsa-serve", "asDropdown": False, "keepTime": True}
            | {"includeVars": True}
        ],
        "panels": [
            _row(number, one, place) if isinstance(one, Row) else _panel(number, one, place)
            for number, (one, place) in enumerate(grid_positions(dashboard), 1)
        ],
    }


def _variables() -> list[Json]:
    jobs = 'label_values(mhsa_model_ready{namespace=~"$namespace"}, job)'
    models = 'label_values(mhsa_model_ready{namespace=~"$namespace", job=~"$job"}, model)'
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0},
        # Without Kubernetes this label does not exist; .* matches that too.
        _variable("namespace", "Namespace", "label_values(mhsa_model_ready, namespace)") | {"allValue": ".*"},
        _variable("job", "Job", jobs),  # only jobs of this server, although other processes export process_ metrics too
        _variable("model", "Model", models) | {"allValue": ".*"},
    ]


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
        "hide": 0,
    }


def _row(number: int, row: Row, place: Json) -> Json:
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, place: Json) -> Json:
    defaults: Json = {"unit": panel.unit, "custom": {}, "thresholds": _thresholds(panel)}
    if panel.kind == "timeseries":
        defaults |= {"min": 0, "custom": _lines(panel)}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [_target(panel, letter, query) for letter, query in zip("ABCDEFGH", panel.queries, strict=False)],
    } | ({"transformations": _columns()} if panel.kind == "table" else {})


def _lines(panel: Panel) -> Json:
    return {
        "fillOpacity": _SOLID if panel.is_stacked else _PALE,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.is_stacked else "none"},
        "thresholdsStyle": {"mode": "off" if panel.limit is None else "line"},
    }


def _thresholds(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
    return {"mode": "absolute", "steps": steps}


def _options(panel: Panel) -> Json:
    if panel.kind == "heatmap":
        return {"calculate": False, "color": {"mode": "scheme", "scheme": "Oranges"}, "yAxis": {"unit": panel.unit}}
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "none"}
    if panel.kind == "table":
        return {"showHeader": True}
    legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max"]}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _target(panel: Panel, letter: str, query: Query) -> Json:
    shape = {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series")
    target = {"refId": letter, "datasource": _DATASOURCE, "expr": query.expression, "legendFormat": query.legend}
    is_instant = panel.kind in ("table", "stat")  # an error budget must not look back 30 days for each point of a graph
    return target | {"format": shape, "instant": is_instant, "range": not is_instant, "exemplar": not is_instant}


def _columns() -> list[Json]:
    hidden = dict.fromkeys(("Time", "Value", "__name__", "namespace"), True)
    return [{"id": "organize", "options": {"excludeByName": hidden}}]
