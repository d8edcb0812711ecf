"""The drawn dashboards: every panel in its place, in its units, from whatever Prometheus answers."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from PIL import Image

from deploy.grafana.files import DASHBOARDS, file_name
from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.prometheus import Prometheus, Series
from deploy.grafana.render import TimeRange, draw, save
from deploy.grafana.units import format_value
from tests.deploy.paths import GRAFANA, GUIDE

TIME_RANGE = TimeRange(0.0, 600.0, 60.0, interval="1m")
each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)


class FakePrometheus:
    """Answers everything with the same."""

    def __init__(self, *found: Series) -> None:
        self.found = list(found)

    def query(self, expression: str) -> list[Series]:
        return self.found

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        return self.found


def series(*values: float, **labels: str) -> Series:
    return Series(labels, np.arange(0.0, 60.0 * len(values), 60.0), np.array(values))


def drawn(dashboard: Dashboard, *found: Series) -> Figure:
    return draw(dashboard, cast("Prometheus", FakePrometheus(*found)), TIME_RANGE)


def one_panel(kind: str, unit: str = "s", limit: float | None = None) -> Dashboard:
    panel = Panel("Title", "What it shows.", unit, (Query("up", "{{le}}"),), kind, limit=limit)  # type: ignore[arg-type]  # a Kind
    return Dashboard("mhsa-one", "One", "One.", (Row("Row", (panel,)),))


def texts(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.texts} | {text.get_text() for axes in figure.axes for text in axes.texts}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0025, "s", "2.5 ms"),
        (0.5, "s", "500 ms"),
        (1.0, "s", "1 s"),
        (7200.0, "s", "2 h"),
        (0.0, "s", "0 s"),
        (1536.0, "bytes", "1.5 KiB"),
        (0.125, "percentunit", "12.5%"),
        (-12.5, "percentunit", "-1250%"),
        (4500.0, "short", "4.5 k"),
        (16.0, "short", "16"),
        (12.0, "reqps", "12 req/s"),
    ],
)
def test_values_are_written_as_grafana_writes_them(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


@each_dashboard
def test_every_heading_and_panel_is_drawn(dashboard: Dashboard) -> None:
    labels = {"le": "1.0", "job": "j", "instance": "i", "model": "m", "version": "1"}
    figure = drawn(dashboard, series(1.0, 2.0, 3.0, **labels))
    assert {dashboard.title, *(panel.title for panel in dashboard.panels)} <= texts(figure)
    assert {f"▾ {row.title}" for row in dashboard.rows} <= texts(figure)
    assert "No data" not in texts(figure)


@pytest.mark.parametrize("found", [(), (series(np.nan, np.nan),)], ids=["nothing", "no numbers"])
def test_a_panel_without_data_says_so(found: tuple[Series, ...]) -> None:
    assert "No data" in texts(drawn(one_panel("timeseries"), *found))


def test_a_gap_is_left_open() -> None:
    broken = Series({}, np.array([0.0, 60.0, 240.0]), np.array([1.0, 2.0, 3.0]))
    whole = series(0.0, 1.0, 2.0, 3.0, 4.0)
    lines = drawn(one_panel("timeseries"), whole, broken).axes[-1].get_lines()
    (found,) = [np.asarray(line.get_ydata(), np.float64) for line in lines if np.isnan(line.get_ydata()).any()]
    np.testing.assert_array_equal(found, [1.0, 2.0, np.nan, np.nan, 3.0])


def test_the_limit_is_drawn_only_where_the_values_come_near() -> None:
    assert len(drawn(one_panel("timeseries", limit=0.5), series(0.1, 0.9)).axes[-1].get_lines()) == 2
    assert len(drawn(one_panel("timeseries", limit=50.0), series(0.1, 0.9)).axes[-1].get_lines()) == 1


def test_a_heat_map_shows_each_bucket_without_those_below() -> None:
    buckets = [series(4.0, 4.0, le="+Inf"), series(1.0, 0.0, le="0.1"), series(3.0, 4.0, le="0.5")]
    axes = drawn(one_panel("heatmap"), *buckets).axes[-1]
    (mesh,) = [one for one in axes.collections if isinstance(one, QuadMesh)]
    counts = mesh.get_array()
    assert counts is not None
    np.testing.assert_array_equal(np.ma.getdata(counts), [[1, 0], [2, 4], [1, 0]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["100 ms", "500 ms", "+Inf"]


def test_a_number_is_the_last_one() -> None:
    assert "30%" in texts(drawn(one_panel("stat", "percentunit"), series(0.1, 0.3)))


def test_a_picture_is_small(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    save(drawn(DASHBOARDS[0], series(1.0, 2.0, le="1.0")), path)
    with Image.open(path) as picture:
        assert picture.mode == "P"
    assert path.stat().st_size < 150_000


@each_dashboard
def test_the_readme_shows_a_small_picture_of_each_dashboard(dashboard: Dashboard) -> None:
    path = GRAFANA / "pictures" / file_name(dashboard, ".png")
    assert 10_000 < path.stat().st_size < 150_000
    assert f"](grafana/pictures/{path.name})" in GUIDE.read_text()
