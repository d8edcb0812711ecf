"""Is it well? Objectives, requests, errors, saturation, and each model."""

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.queries import JOB, MODEL, REQUESTS, WINDOW, quantile, rate


def _budget_left(bad: str, of: str, objective: str) -> str:
    spent = f"sum_over_time({bad}{{{JOB}}}[30d]) / sum_over_time({of}{{{JOB}}}[30d])"
    return f"1 - {spent} / (1 - {objective}{{{JOB}}})"


def _burn(errors: str, objective: str) -> str:
    return f"{errors}{{{JOB}}} / (1 - {objective}{{{JOB}}})"


_OBJECTIVES = Row(
    "Objectives",
    (
        Panel(
            "Error budget left",
            "What is left of the failures that 30 days may have. Below 0 it is missed.",
            "percentunit",
            (
                Query(
                    _budget_left(
                        "job:mhsa_requests_bad:rate5m",
                        "job:mhsa_requests_judged:rate5m",
                        "job:mhsa_availability:objective",
                    ),
                    "{{job}}",
                ),
            ),
            "stat",
            width=6,
        ),
        Panel(
            "Latency budget left",
            "What is left of the slow requests that 30 days may have. Below 0 it is missed.",
            "percentunit",
            (
                Query(
                    _budget_left(
                        "job:mhsa_requests_slow:rate5m", "job:mhsa_requests_timed:rate5m", "job:mhsa_latency:objective"
                    ),
                    "{{job}}",
                ),
            ),
            "stat",
            width=6,
        ),
        Panel(
            "Burn rate over an hour",
            "How many times faster than the objective allows the budgets are used up. At 14.4 somebody is woken.",
            "none",
            (
                Query(
                    _burn("job:mhsa_availability_errors:ratio_rate1h", "job:mhsa_availability:objective"),
                    "errors {{job}}",
                ),
                Query(_burn("job:mhsa_latency_errors:ratio_rate1h", "job:mhsa_latency:objective"), "latency {{job}}"),
            ),
            width=12,
            limit=14.4,
        ),
    ),
)

_REQUESTS = Row(
    "Requests",
    (
        Panel(
            "Requests by method",
            "Requests answered in a second, well or not; each message of a stream is one.",
            "reqps",
            (Query(rate("mhsa_requests_total", "method", JOB), "{{method}}"),),
            is_stacked=True,
        ),
        Panel(
            "Errors by reason",
            "Requests that ended in an error. invalid, not_found, unauthenticated and cancelled are the callers' own.",
            "reqps",
            (Query(rate("mhsa_errors_total", "reason", REQUESTS), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "Duration",
            "Whole time of a request in the server, against the objective's threshold.",
            "s",
            (
                Query(quantile(0.5, "mhsa_request_duration_seconds", selector=REQUESTS), "median"),
                Query(quantile(0.95, "mhsa_request_duration_seconds", selector=REQUESTS), "95%"),
                Query(quantile(0.99, "mhsa_request_duration_seconds", selector=REQUESTS), "99%"),
                Query(f"max(job:mhsa_latency:threshold_seconds{{{JOB}}})", "threshold"),
            ),
        ),
        Panel(
            "Requests by code",
            "The same requests by the gRPC status that they were answered with.",
            "reqps",
            (Query(rate("mhsa_requests_total", "code", REQUESTS), "{{code}}"),),
            is_stacked=True,
        ),
        Panel(
            "Errors by replica",
            "Errors that are not the callers' own. One replica that leads is one to take out.",
            "reqps",
            (
                Query(
                    rate(
                        "mhsa_errors_total",
                        "instance",
                        f'{REQUESTS}, reason!~"invalid|not_found|unauthenticated|cancelled|draining"',
                    ),
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "In flight",
            "Requests that have come and are not answered, by replica.",
            "short",
            (Query(f"sum by (instance) (mhsa_requests_in_flight{{{JOB}}})", "{{instance}}"),),
        ),
    ),
)

_SATURATION = Row(
    "Saturation",
    (
        Panel(
            "Queue wait",
            "How long one of twenty sequences waits at least before its run. It rises before anything is refused.",
            "s",
            (Query(quantile(0.95, "mhsa_queue_wait_seconds", "model, version"), "{{model}}/{{version}}"),),
        ),
        Panel(
            "Fullness",
            "The used part of each bound, of the fullest replica. At 1, requests are refused or displaced.",
            "percentunit",
            (Query(f"max by (model, bound) (mhsa_queue_fullness_ratio{{{MODEL}}})", "{{model}} {{bound}}"),),
            limit=1.0,
        ),
        Panel(
            "Refused and late",
            "The part of requests that found no room, and the part whose deadline could not be met.",
            "percentunit",
            (
                Query(f"job:mhsa_refusals:ratio_rate5m{{{JOB}}}", "refused {{job}}"),
                Query(f"job:mhsa_deadline_misses:ratio_rate5m{{{JOB}}}", "late {{job}}"),
            ),
        ),
    ),
)

_MODELS = Row(
    "Models",
    (
        Panel(
            "Outcomes by model",
            "What became of the requests that came to each model's queue.",
            "reqps",
            (Query(rate("mhsa_model_requests_total", "model, version, outcome"), "{{model}}/{{version}} {{outcome}}"),),
        ),
        Panel(
            "Tokens by model",
            "Tokens computed in a second. Models of one replica share its CPUs.",
            "short",
            (Query(rate("mhsa_tokens_total", "model, version"), "{{model}}/{{version}}"),),
            is_stacked=True,
        ),
        Panel(
            "Sequences per request",
            "How large requests are: with larger ones, durations grow without anything being wrong.",
            "short",
            (
                Query(
                    f"{rate('mhsa_sequences_total', 'model, version')} / "
                    + rate("mhsa_model_requests_total", "model, version", f'{MODEL}, outcome="ok"'),
                    "{{model}}/{{version}}",
                ),
            ),
        ),
    ),
)

_REPLICAS = Row(
    "Replicas",
    (
        Panel(
            "Provider",
            "What each replica serves, in which precision, on which device, and which device it should have.",
            "none",
            (Query(f"mhsa_model_info{{{MODEL}}}"),),
            "table",
            width=12,
        ),
        Panel(
            "Ready",
            "Replicas that have each model loaded, healthy, and are not on their way out.",
            "none",
            (Query(f"sum by (model, version) (mhsa_model_ready{{{MODEL}}})", "{{model}}/{{version}}"),),
            width=6,
        ),
        Panel(
            "Engine failures",
            "Runs that failed, and sequences whose numbers were not finite.",
            "short",
            (
                Query(
                    f"sum by (instance, model) (increase(mhsa_engine_failures_total{{{MODEL}}}{WINDOW}))",
                    "{{instance}} {{model}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "Uptime",
            "Time since each replica's process started.",
            "s",
            (Query(f"time() - process_start_time_seconds{{{JOB}}}", "{{instance}}"),),
        ),
        Panel(
            "Load time",
            "How long each replica took to load, verify, warm and calibrate a model.",
            "s",
            (Query(f"mhsa_model_load_seconds{{{MODEL}}}", "{{instance}} {{model}}/{{version}}"),),
        ),
        Panel(
            "Certificate",
            "Time until the certificate that is served expires. Empty without TLS.",
            "s",
            (
                Query(
                    f"(mhsa_tls_certificate_expiry_timestamp_seconds{{{JOB}}} > 0) - time()",
                    "{{instance}}",
                ),
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    "mhsa-service",
    "mhsa-serve: Service",
    "Whether callers are served: objectives, requests, errors, saturation, models, replicas.",
    (_OBJECTIVES, _REQUESTS, _SATURATION, _MODELS, _REPLICAS),
)
