"""Metrics by what a scrape shows: names by Prometheus' conventions, every series from the start, live gauges."""

import asyncio
import math
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from service.bounds import Bounds
from service.errors import DeadlineError
from service.metrics import Metrics
from service.version import installed_version

METHODS, CODES, REASONS = (
    ("EncoderService/Encode", "GRPCInferenceService/ModelInfer"),
    ("OK", "NOT_FOUND"),
    ("invalid",),
)
MODEL = {"model": "tiny", "version": "3"}
README = Path(__file__).parents[2] / "README.md"
# What is counted or measured here, and Prometheus' base units; a name ends in one of them.
UNITS = (
    "seconds",
    "ratio",
    "sequences",
    "tokens",
    "requests",
    "errors",
    "failures",
    "info",
    "in_flight",
    "runs",
    "healthy",
    "ready",
    "per_second",
    "runners",
    "threads",
    "refits",
)


@pytest.fixture
def metrics() -> Metrics:
    """As a server has them once its model is loaded, before the first request."""
    metrics = Metrics(CollectorRegistry())
    metrics.declare_requests(METHODS, CODES, REASONS)
    metrics.of_model("tiny", "3").set_info("CPUExecutionProvider", "fp32", "abc", "cuda")
    return metrics


def families(metrics: Metrics) -> list[Metric]:
    """Our own families; the rest are the process collector's, named by its convention."""
    found = [family for family in metrics.registry.collect() if not family.name.startswith("process_")]
    assert len(found) == 36
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_every_name_has_our_prefix(metrics: Metrics) -> None:
    assert all(re.fullmatch(r"mhsa_[a-z]+(_[a-z]+)*", family.name) for family in families(metrics))


def test_counters_and_only_counters_end_in_total(metrics: Metrics) -> None:
    for family in families(metrics):
        names = {sample.name for sample in family.samples}
        assert (f"{family.name}_total" in names) == (family.type == "counter")
        assert not family.name.endswith("_total")


def test_every_name_ends_in_what_is_counted_or_in_a_base_unit(metrics: Metrics) -> None:
    for family in families(metrics):
        assert family.name.endswith(UNITS), family.name
        assert not re.search("milli|micro|nano|_ms|percent|bytes_kb|minutes", family.name)


def test_no_name_repeats_its_type_or_a_label(metrics: Metrics) -> None:
    for family in families(metrics):
        parts = family.name.split("_")
        assert not {"counter", "gauge", "histogram", "count", "sum", "bucket"} & set(parts)
        assert not any(f"by_{label}" in family.name for sample in family.samples for label in sample.labels)


def test_every_metric_says_what_it_is_in_a_sentence(metrics: Metrics) -> None:
    for family in families(metrics):
        assert re.fullmatch(r"\S.{10,}\.", family.documentation), family.name


def test_no_two_metrics_say_the_same(metrics: Metrics) -> None:
    texts = [family.documentation for family in families(metrics)]
    assert len(set(texts)) == len(texts)


def test_every_label_is_a_plain_word(metrics: Metrics) -> None:
    labels = {label for family in families(metrics) for sample in family.samples for label in sample.labels}
    assert labels == {
        "method",
        "code",
        "reason",
        "release",
        "model",
        "version",
        "provider",
        "precision",
        "digest",
        "wanted",
        "outcome",
        "bound",
        "le",
    }


def test_every_metric_has_its_series_at_0_before_the_first_request(metrics: Metrics) -> None:
    for family in families(metrics):
        values = {sample.value for sample in family.samples if not sample.name.endswith("_created")}
        assert values == ({1.0} if family.name.endswith("_info") else {0.0}), family.name


def test_the_series_of_a_model_name_it(metrics: Metrics) -> None:
    for family in families(metrics):
        for sample in family.samples:
            assert MODEL.items() <= sample.labels.items() or "model" not in sample.labels, family.name


@pytest.mark.parametrize("method", METHODS)
def test_the_series_of_each_method_exist_from_the_start(metrics: Metrics, method: str) -> None:
    for code in CODES:
        assert value(metrics, "mhsa_requests_total", method=method, code=code) == 0
    assert value(metrics, "mhsa_request_duration_seconds_count", method=method) == 0
    assert value(metrics, "mhsa_requests_in_flight", method=method) == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_series_of_each_reason_exist_from_the_start(metrics: Metrics, method: str) -> None:
    assert value(metrics, "mhsa_errors_total", method=method, reason="invalid") == 0


def test_the_outcomes_of_a_model_exist_from_the_start(metrics: Metrics) -> None:
    for outcome in ("ok", "invalid"):
        assert value(metrics, "mhsa_model_requests_total", **MODEL, outcome=outcome) == 0


def test_the_model_is_described_by_its_labels(metrics: Metrics) -> None:
    labels = {"provider": "CPUExecutionProvider", "precision": "fp32", "digest": "abc", "wanted": "cuda"}
    assert value(metrics, "mhsa_model_info", **MODEL, **labels) == 1


@dataclass
class FakeQueue:
    used: Bounds
    bounds: Bounds = Bounds(tokens=160, sequences=6, requests=8, bytes=500)


def test_what_waits_and_what_is_in_flight_is_read_at_each_scrape(metrics: Metrics) -> None:
    names = ("queue_sequences", "queue_tokens", "model_requests_in_flight", "model_bytes_in_flight")
    queue = FakeQueue(Bounds(tokens=40, sequences=3, requests=2, bytes=500))
    metrics.of_model("tiny", "3").watch_queue(queue)
    assert [value(metrics, f"mhsa_{name}", **MODEL) for name in names] == [3, 40, 2, 500]
    queue.used = Bounds(0, 0, 0, 0)
    assert [value(metrics, f"mhsa_{name}", **MODEL) for name in names] == [0, 0, 0, 0]


def test_how_full_each_bound_is_is_read_at_each_scrape(metrics: Metrics) -> None:
    queue = FakeQueue(Bounds(tokens=40, sequences=3, requests=6, bytes=500))
    metrics.of_model("tiny", "3").watch_queue(queue)
    bounds = ("tokens", "sequences", "requests", "bytes")
    found = [value(metrics, "mhsa_queue_fullness_ratio", **MODEL, bound=bound) for bound in bounds]
    assert found == [0.25, 0.5, 0.75, 1.0]
    queue.used = Bounds(0, 0, 0, 0)
    assert value(metrics, "mhsa_queue_fullness_ratio", **MODEL, bound="tokens") == 0.0


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (DeadlineError("late"), "deadline"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyError("a bug"), "internal"),
    ],
    ids=["ok", "refused", "cancelled", "bug"],
)
def test_a_models_request_is_counted_by_what_became_of_it(
    metrics: Metrics, error: BaseException | None, outcome: str
) -> None:
    with nullcontext() if error is None else pytest.raises(type(error)), metrics.of_model("tiny", "3").count_request():
        if error is not None:
            raise error
    assert value(metrics, "mhsa_model_requests_total", **MODEL, outcome=outcome) == 1


def test_readiness_is_asked_at_each_scrape(metrics: Metrics) -> None:
    answers = [True, False]
    metrics.of_model("tiny", "3").watch_ready(answers.pop)
    assert value(metrics, "mhsa_model_ready", **MODEL) == 0
    assert value(metrics, "mhsa_model_ready", **MODEL) == 1


def test_the_release_is_a_label(metrics: Metrics) -> None:
    assert value(metrics, "mhsa_build_info", release=installed_version()) == 1


def test_without_tls_no_certificate_expires(metrics: Metrics) -> None:
    assert value(metrics, "mhsa_tls_certificate_expiry_timestamp_seconds") == 0


def test_two_models_have_series_of_their_own(metrics: Metrics) -> None:
    metrics.of_model("tiny", "4").tokens.inc(7)
    assert value(metrics, "mhsa_tokens_total", model="tiny", version="4") == 7
    assert value(metrics, "mhsa_tokens_total", **MODEL) == 0


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("sequences", "mhsa_sequences_total"),
        ("tokens", "mhsa_tokens_total"),
        ("engine_failures", "mhsa_engine_failures_total"),
        ("load_seconds", "mhsa_model_load_seconds"),
    ],
)
def test_each_of_a_models_counts_goes_to_its_own_metric(metrics: Metrics, attribute: str, name: str) -> None:
    getattr(metrics.of_model("tiny", "3"), attribute).inc(2)
    assert value(metrics, name, **MODEL) == 2


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("queue_seconds", "mhsa_queue_wait_seconds"),
        ("compute_seconds", "mhsa_compute_seconds"),
        ("batch_sequences", "mhsa_batch_sequences"),
        ("batch_tokens", "mhsa_batch_tokens"),
        ("batch_fill", "mhsa_batch_fill_ratio"),
    ],
)
def test_each_of_a_models_observations_goes_to_its_own_metric(metrics: Metrics, attribute: str, name: str) -> None:
    getattr(metrics.of_model("tiny", "3"), attribute).observe(0.5)
    assert value(metrics, f"{name}_sum", **MODEL) == 0.5


def test_a_full_batch_is_not_past_the_last_bucket_of_the_fill(metrics: Metrics) -> None:
    metrics.of_model("tiny", "3").batch_fill.observe(1.0)
    assert value(metrics, "mhsa_batch_fill_ratio_bucket", **MODEL, le="1.0") == 1
    assert value(metrics, "mhsa_batch_fill_ratio_bucket", **MODEL, le="0.95") == 0


def test_buckets_are_these(metrics: Metrics) -> None:
    """Queries, alerts and objectives name edges, and one that has gone finds nothing."""
    seconds = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
    powers = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    found = {
        family.name: sorted({float(s.labels["le"]) for s in family.samples if "le" in s.labels} - {math.inf})
        for family in families(metrics)
        if family.type == "histogram"
    }
    assert found == {
        "mhsa_request_duration_seconds": seconds,
        "mhsa_queue_wait_seconds": seconds,
        "mhsa_compute_seconds": seconds,
        "mhsa_batch_sequences": powers,
        "mhsa_batch_tokens": powers,
        "mhsa_batch_fill_ratio": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0],
    }


def test_two_registries_share_nothing() -> None:
    one, other = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    one.of_model("tiny", "3").tokens.inc(5)
    other.of_model("tiny", "3")
    assert value(other, "mhsa_tokens_total", **MODEL) == 0


def test_the_readme_has_the_table_of_metrics(metrics: Metrics) -> None:
    lines = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for family in families(metrics):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in family.samples[0].labels if label != "le")
        lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    table = "\n".join(lines)
    assert README.exists(), (
        f"README.md is missing; between <!-- metrics --> and <!-- /metrics --> it needs\n\n{table}\n"
    )
    found = README.read_text().partition("<!-- metrics -->\n")[2].partition("<!-- /metrics -->")[0].strip()
    assert found == table, f"between <!-- metrics --> and <!-- /metrics --> README.md needs\n\n{table}\n"
