"""The names of all metrics that the server exports, from the code that exports them."""

from prometheus_client import CollectorRegistry

from service.metrics import Metrics

# Prometheus adds it to whatever it scrapes.
_OF_A_SCRAPE = {"up"}


def exported_names(label: str | None = None) -> set[str]:
    """Every name that a scrape of the server brings; only those with a label."""
    metrics = Metrics(CollectorRegistry())
    metrics.declare_requests(["Encode"], ["OK"], ["internal"])
    metrics.of_model("m", "1").set_info("CPUExecutionProvider", "fp32", "d", "cpu")
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    named = {sample.name for sample in samples if label is None or label in sample.labels}
    return {name for name in named if not name.endswith("_created")} | (_OF_A_SCRAPE if label is None else set())
