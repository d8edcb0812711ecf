"""`python -m deploy.grafana.render`: draw the dashboards from a Prometheus' answers, without a Grafana.

Layout, queries and data are the same; Grafana's own drawing looks different. `make dashboards-pictures` uses it for the
README's pictures.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from deploy.grafana.files import DASHBOARDS, file_name
from deploy.grafana.panels import NUM_COLUMNS, Dashboard, Json, Panel, Query, Row, grid_positions
from deploy.grafana.prometheus import Prometheus, Series, Values
from deploy.grafana.queries import interpolate
from deploy.grafana.units import format_value

_INCHES = 0.6, 0.36  # of a column and of a unit of height
_DOTS_PER_INCH = 80
_COLORS_OF_A_PNG = 128
_LETTERS_OF_A_COLUMN = 11
_TEXT, _FAINT, _RED, _GREEN = "#24292e", "#8a8f98", "#d44a3a", "#2f8f46"


@dataclass(frozen=True, slots=True)
class TimeRange:
    """What is drawn: Unix times, the step between points, `$__rate_interval`, and the job."""

    start: float
    end: float
    step: float
    interval: str
    job: str = ".*"


def draw(dashboard: Dashboard, prometheus: Prometheus, time_range: TimeRange) -> Figure:
    """The whole page."""
    placed = grid_positions(dashboard)
    rows = max(place["y"] + place["h"] for _, place in placed) + 1
    figure = Figure(figsize=(NUM_COLUMNS * _INCHES[0], rows * _INCHES[1]), dpi=_DOTS_PER_INCH, facecolor="#f4f5f5")
    figure.text(0.01, 1 - 0.6 / rows, dashboard.title, va="center", fontsize=13, weight="bold", color=_TEXT)
    for one, place in placed:
        if isinstance(one, Row):
            y = 1 - (place["y"] + 1.6) / rows
            figure.text(0.01, y, f"▾ {one.title}", va="center", fontsize=10, weight="bold", color=_TEXT)
        else:
            _draw_panel(_axes(figure, place, rows, one.title), one, prometheus, time_range)
    return figure


def save(figure: Figure, path: Path) -> None:
    """As a PNG with few colours, which is a third of the size."""
    figure.savefig(path, format="png")
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(_COLORS_OF_A_PNG, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def _axes(figure: Figure, place: Json, rows: int, title: str) -> Axes:
    """A white card with a title, and axes in the middle of it."""
    x, width = place["x"] / NUM_COLUMNS, place["w"] / NUM_COLUMNS
    y, height = 1 - (place["y"] + place["h"] + 1) / rows, place["h"] / rows
    card = figure.add_axes((x + 0.002, y + 0.1 / rows, width - 0.004, height - 0.2 / rows))
    card.set(xticks=[], yticks=[])
    for side in card.spines.values():
        side.set_color("#d8dadf")
    figure.text(x + 0.01, y + height - 0.7 / rows, title, va="center", fontsize=9, weight="bold", color=_TEXT)
    return figure.add_axes((x + 0.05, y + 2.1 / rows, width - 0.065, height - 3.4 / rows))


def _draw_panel(axes: Axes, panel: Panel, prometheus: Prometheus, time_range: TimeRange) -> None:
    axes.tick_params(labelsize=7, colors=_FAINT, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    answers = [(query, series) for query in panel.queries for series in _fetch(panel, query, prometheus, time_range)]
    if not answers:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "No data", ha="center", va="center", fontsize=11, color=_FAINT, transform=axes.transAxes)
        return
    _DRAWERS[panel.kind](axes, panel, answers)
    if panel.kind in ("timeseries", "heatmap"):
        axes.xaxis.set_major_locator(AutoDateLocator(minticks=4, maxticks=8))  # type: ignore[no-untyped-call]  # matplotlib's
        axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))  # type: ignore[no-untyped-call]  # likewise
        axes.set_xlim(*_datetimes(np.array([time_range.start, time_range.end])))


def _fetch(panel: Panel, query: Query, prometheus: Prometheus, time_range: TimeRange) -> Sequence[Series]:
    expression = interpolate(query.expression, interval=time_range.interval, job=time_range.job)
    if panel.kind in ("stat", "table"):
        found = prometheus.query(expression)
    else:
        found = prometheus.query_range(expression, time_range.start, time_range.end, time_range.step)
    return [series for series in found if np.isfinite(series.values).any()]


Answers = list[tuple[Query, Series]]


def _draw_lines(axes: Axes, panel: Panel, answers: Answers) -> None:
    answers = sorted(answers, key=lambda answer: -float(np.nanmax(answer[1].values)))
    grid, lines = _on_one_grid([series for _, series in answers])
    names = [_legend(query, series) for query, series in answers]
    if panel.is_stacked:
        axes.stackplot(_datetimes(grid), np.nan_to_num(lines), labels=names, alpha=0.7)
    else:
        for line, name in zip(lines, names, strict=True):
            axes.plot(_datetimes(grid), line, linewidth=1.1, label=name)
    axes.set_ylim(bottom=0)
    if panel.limit is not None and panel.limit <= axes.get_ylim()[1]:
        axes.axhline(panel.limit, color=_RED, linestyle="--", linewidth=1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value, panel.unit)))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="y", color="#e6e7ea", linewidth=0.6)
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, int(panel.width * _LETTERS_OF_A_COLUMN / (5 + max(map(len, labels)))))
    axes.legend(
        handles[: 2 * columns],
        labels[: 2 * columns],
        loc="upper left",
        bbox_to_anchor=(-0.1, -0.1),
        ncols=columns,
        fontsize=6,
        frameon=False,
        handlelength=1,
        columnspacing=1,
        labelcolor=_TEXT,
    )


def _draw_stat(axes: Axes, panel: Panel, answers: Answers) -> None:
    axes.set_axis_off()
    values = [float(series.values[-1]) for _, series in answers]
    text, color = "\n".join(format_value(value, panel.unit) for value in values), _RED if min(values) < 0 else _GREEN
    axes.text(0.45, 0.5, text, ha="center", va="center", fontsize=24, color=color, transform=axes.transAxes)


def _draw_heatmap(axes: Axes, panel: Panel, answers: Answers) -> None:
    """Prometheus' buckets are cumulative. The picture shows the count of each alone, and only buckets in use."""
    ordered = sorted((series for _, series in answers), key=lambda series: float(series.labels["le"]))
    grid, below = _on_one_grid(ordered)
    counts = np.diff(np.nan_to_num(below), axis=0, prepend=0).clip(min=0)
    used = np.flatnonzero(counts.sum(axis=1) > 0)
    if len(used):
        ordered, counts = ordered[used[0] : used[-1] + 1], counts[used[0] : used[-1] + 1]
    heights = np.arange(len(ordered))
    axes.pcolormesh(_datetimes(grid), heights, np.ma.masked_equal(counts, 0), cmap="Oranges", shading="nearest")
    edges = [series.labels["le"] for series in ordered]
    axes.set_yticks(heights, [edge if edge == "+Inf" else format_value(float(edge), panel.unit) for edge in edges])


def _draw_table(axes: Axes, _panel: Panel, answers: Answers) -> None:
    axes.set_axis_off()
    columns = [name for name in answers[0][1].labels if name not in ("__name__", "job", "namespace", "pod")]
    rows = [[series.labels.get(name, "")[:22] for name in columns] for _, series in answers]
    table = axes.table(rows, colLabels=columns, loc="upper left", cellLoc="left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(7)
    table.auto_set_column_width(list(range(len(columns))))


_DRAWERS: dict[str, Callable[[Axes, Panel, Answers], None]] = {
    "timeseries": _draw_lines,
    "stat": _draw_stat,
    "heatmap": _draw_heatmap,
    "table": _draw_table,
}


def _on_one_grid(found: Sequence[Series]) -> tuple[Values, Values]:
    """The times of all series, and each series at these times: NaN where it has no value."""
    grid = np.unique(np.concatenate([series.times for series in found]))  # (T,)
    values = np.full((len(found), len(grid)), np.nan)  # (series, T)
    for row, series in zip(values, found, strict=True):
        row[np.searchsorted(grid, series.times)] = series.values
    return grid, values


def _datetimes(times: Values) -> "NDArray[np.datetime64]":
    return times.astype("datetime64[s]")


def _legend(query: Query, series: Series) -> str:
    text = query.legend
    for name, value in series.labels.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="deploy.grafana.render", description="Draw the dashboards from a Prometheus.")
    parser.add_argument("--prometheus", default="http://localhost:9090", help="its address (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(), help="directory for the pictures (default: here)")
    parser.add_argument("--hours", type=float, default=6.0, help="how much is shown (default: %(default)s)")
    options = parser.parse_args()
    end = time.time()
    time_range = TimeRange(end - 3600 * options.hours, end, max(15.0, 3600 * options.hours / 300), interval="1m")
    for dashboard in DASHBOARDS:
        path = options.output / file_name(dashboard, ".png")
        save(draw(dashboard, Prometheus(options.prometheus), time_range), path)
        print(path)


if __name__ == "__main__":
    main()
