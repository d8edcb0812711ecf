"""What the server believes a model costs, as gauges: one declaration here is the field, the metric and its help."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge


def _gauge(help_text: str) -> Any:  # Any: a field's declared type is what callers see
    return field(metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class Costs:
    """Each field is a gauge, `mhsa_` before its name."""

    cost_run_seconds: float = _gauge("Fixed part of a run's seconds, by the cost model in force.")
    cost_token_seconds: float = _gauge("Part of a run's seconds for each token, by the cost model in force.")
    cost_pair_seconds: float = _gauge(
        "Part of a run's seconds for each pair of slots that attention compares, by the cost model in force."
    )
    cost_error_ratio: float = _gauge(
        "Largest relative error of the cost model: on its grid at load, then of the last 64 runs, their worst tenth "
        "left out."
    )
    cost_drift_ratio: float = _gauge(
        "Observed over predicted seconds of the middle one of the last 64 runs; past 0.8 or 1.2 the model is re-fitted."
    )
    batch_budget_tokens: float = _gauge("Tokens that one run may have.")
    plateau_tokens_per_second: float = _gauge("Rate of full batches with every runner busy, measured at load.")
    runners: float = _gauge("Runs that may go on at once.")
    run_threads: float = _gauge("CPU threads of each of them.")
    lone_run_threads: float = _gauge("CPU threads of a run that has the machine to itself.")


class CostMetrics:
    """The gauges, and how often the model was fitted again."""

    def __init__(self, registry: CollectorRegistry, label_names: Sequence[str]) -> None:
        self._gauges = {
            f.name: Gauge(f"mhsa_{f.name}", f.metadata["help"], label_names, registry=registry)
            for f in dataclasses.fields(Costs)
        }
        self._refits = Counter(
            "mhsa_cost_refits",
            "How often the cost model was fitted again, since runs took longer or shorter.",
            label_names,
            registry=registry,
        )

    def of_model(self, *labels: str) -> "ModelCostMetrics":
        """The series of one model, all at 0."""
        gauges = {name: gauge.labels(*labels) for name, gauge in self._gauges.items()}
        return ModelCostMetrics(gauges, self._refits.labels(*labels))


class ModelCostMetrics:
    """Of one model."""

    def __init__(self, gauges: dict[str, Gauge], refits: Counter) -> None:
        self._gauges = gauges
        self.refits = refits

    def watch(self, read: Callable[[], Costs]) -> None:
        """Read them at each scrape."""
        for name, gauge in self._gauges.items():
            gauge.set_function(partial(_field, read, name))


def _field(read: Callable[[], Costs], name: str) -> float:
    return float(getattr(read(), name))
