"""Dashboard Service: are callers served? Objectives, requests, errors, saturation, models, replicas."""

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.queries import BY_MODEL, JOB, MODEL, MODEL_LEGEND, REQUESTS, increase, quantile, rate, total


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
            "The part of the 30-day error budget that is left. Below 0 the objective is missed.",
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
            "The part of the 30-day budget of slow requests that is left. Below 0 the objective is missed.",
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
            "How many times faster than allowed the budgets are used up. Above 14.4 an alert pages.",
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
            "Requests answered per second, successfully or not. Each message of a stream counts.",
            "reqps",
            (Query(rate("mhsa_requests_total", "method", JOB), "{{method}}"),),
            is_stacked=True,
        ),
        Panel(
            "Errors by reason",
            "Requests that failed. invalid, not_found, unauthenticated and cancelled are the callers' doing.",
            "reqps",
            (Query(rate("mhsa_errors_total", "reason", REQUESTS), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "Duration",
            "Time from arrival to answer in the server, and the objective's threshold.",
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
            "Requests by the gRPC status code of their answer.",
            "reqps",
            (Query(rate("mhsa_requests_total", "code", REQUESTS), "{{code}}"),),
            is_stacked=True,
        ),
        Panel(
            "Errors by replica",
            "Errors that are not the callers' doing. If one replica has most of them, delete it.",
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
            "Requests that are not answered yet, by replica.",
            "short",
            (Query(total("mhsa_requests_in_flight", "instance", JOB), "{{instance}}"),),
        ),
    ),
)

_SATURATION = Row(
    "Saturation",
    (
        Panel(
            "Queue wait",
            "The 95th percentile of the time that sequences wait in the queue. It rises before anything is refused.",
            "s",
            (Query(quantile(0.95, "mhsa_queue_wait_seconds", BY_MODEL), MODEL_LEGEND),),
        ),
        Panel(
            "Fullness",
            "How much of each bound is used, on the fullest replica. At 100% requests are refused or displaced.",
            "percentunit",
            (Query(f"max by (model, bound) (mhsa_queue_fullness_ratio{{{MODEL}}})", "{{model}} {{bound}}"),),
            limit=1.0,
        ),
        Panel(
            "Refused and late",
            "The part of requests that were refused since the queue was full, and the part that missed their deadline.",
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
            "Requests to each model's queue, by their outcome: ok, or the reason of the error.",
            "reqps",
            (Query(rate("mhsa_model_requests_total", "model, version, outcome"), "{{model}}/{{version}} {{outcome}}"),),
        ),
        Panel(
            "Tokens by model",
            "Tokens computed per second. The models of one replica share its CPUs.",
            "short",
            (Query(rate("mhsa_tokens_total"), MODEL_LEGEND),),
            is_stacked=True,
        ),
        Panel(
            "Sequences per request",
            "The size of requests. Larger ones take longer, without anything being wrong.",
            "short",
            (
                Query(
                    f"{rate('mhsa_sequences_total', 'model, version')} / "
                    + rate("mhsa_model_requests_total", selector=f'{MODEL}, outcome="ok"'),
                    MODEL_LEGEND,
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
            "What each replica serves, in which precision, on which device, and which device was wanted.",
            "none",
            (Query(f"mhsa_model_info{{{MODEL}}}"),),
            "table",
            width=12,
        ),
        Panel(
            "Ready",
            "Replicas on which the model is loaded and healthy, and which do not drain.",
            "none",
            (Query(total("mhsa_model_ready"), MODEL_LEGEND),),
            width=6,
        ),
        Panel(
            "Engine failures",
            "Runs that failed, and sequences whose numbers were not finite.",
            "short",
            (
                Query(
                    increase("mhsa_engine_failures_total", "instance, model"),
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
            "Time until the TLS certificate in use expires. Empty without TLS.",
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
    "Are callers served? Objectives, requests, errors, saturation, models, replicas.",
    (_OBJECTIVES, _REQUESTS, _SATURATION, _MODELS, _REPLICAS),
)
