"""Gauges of what a model costs, by what a scrape shows."""

import dataclasses

from prometheus_client import CollectorRegistry

from service.cost_metrics import CostMetrics, Costs

COSTS = Costs(*(float(place) for place, _ in enumerate(dataclasses.fields(Costs), start=1)))


def shown(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(f"mhsa_{name}", {"model": "tiny", "version": "1"})


def test_every_series_is_there_at_0_before_anything_is_known() -> None:
    registry = CollectorRegistry()
    CostMetrics(registry, ("model", "version")).of_model("tiny", "1")
    assert {shown(registry, f.name) for f in dataclasses.fields(Costs)} == {0.0}
    assert shown(registry, "cost_refits_total") == 0


def test_each_gauge_shows_its_field_as_it_is_now() -> None:
    registry = CollectorRegistry()
    now = [COSTS]
    CostMetrics(registry, ("model", "version")).of_model("tiny", "1").watch(lambda: now[0])
    assert {f.name: shown(registry, f.name) for f in dataclasses.fields(Costs)} == dataclasses.asdict(COSTS)
    now[0] = dataclasses.replace(COSTS, cost_drift_ratio=0.5)
    assert shown(registry, "cost_drift_ratio") == 0.5
