"""Dashboard Batching: are requests batched well? Batches, queue against compute, cost model, deadlines, faults."""

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.queries import BY_MODEL, MODEL, MODEL_LEGEND, buckets, increase, mean, quantile, rate, total

_BATCHES = Row(
    "Batches",
    (
        Panel(
            "Batch size",
            "Sequences per run; darker where more runs had that many.",
            "short",
            (Query(buckets("mhsa_batch_sequences"), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Tokens in a run",
            "Tokens per run; darker where more runs had that many. Under load they should be near the budget.",
            "short",
            (Query(buckets("mhsa_batch_tokens"), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Fill",
            "Real tokens over sequences x longest. The rest are empty slots, on which only attention computes.",
            "percentunit",
            (
                Query(mean("mhsa_batch_fill_ratio"), f"mean {MODEL_LEGEND}"),
                Query(quantile(0.1, "mhsa_batch_fill_ratio", BY_MODEL), f"worst tenth {MODEL_LEGEND}"),
            ),
        ),
        Panel(
            "Runs",
            "Runs of the engine per second.",
            "ops",
            (Query(rate("mhsa_compute_seconds_count"), MODEL_LEGEND),),
        ),
        Panel(
            "Mean batch",
            "Mean number of sequences per run. At 1 nothing is batched: the load is small, or sequences are long.",
            "short",
            (Query(mean("mhsa_batch_sequences"), MODEL_LEGEND),),
        ),
        Panel(
            "Time for a token",
            "The engine's time per token. Larger batches lower it, up to the budget.",
            "s",
            (
                Query(
                    f"{rate('mhsa_compute_seconds_sum')} / {rate('mhsa_tokens_total')}",
                    MODEL_LEGEND,
                ),
            ),
        ),
    ),
)

_TIME = Row(
    "Queue against compute",
    (
        Panel(
            "Queue against compute",
            "Mean wait of a sequence in the queue, and mean time of a run. The larger one is what callers wait for.",
            "s",
            (
                Query(mean("mhsa_queue_wait_seconds"), f"queue {MODEL_LEGEND}"),
                Query(mean("mhsa_compute_seconds"), f"compute {MODEL_LEGEND}"),
            ),
        ),
        Panel(
            "Wait",
            "Wait of sequences in the queue; darker where more waited that long.",
            "s",
            (Query(buckets("mhsa_queue_wait_seconds"), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Compute",
            "Time of runs; darker where more took that long.",
            "s",
            (Query(buckets("mhsa_compute_seconds"), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Tokens waiting",
            "Tokens in the queues of all replicas.",
            "short",
            (Query(total("mhsa_queue_tokens"), MODEL_LEGEND),),
        ),
        Panel(
            "Sequences waiting",
            "Sequences in the queues of all replicas.",
            "short",
            (Query(total("mhsa_queue_sequences"), MODEL_LEGEND),),
        ),
        Panel(
            "Bytes in flight",
            "Memory for messages and answers of requests in flight, in all replicas.",
            "bytes",
            (Query(total("mhsa_model_bytes_in_flight"), MODEL_LEGEND),),
        ),
    ),
)

_COSTS = Row(
    "Cost model",
    (
        Panel(
            "Cost model error",
            "Largest error of the last predictions, without the worst tenth. Other load on the machine raises it.",
            "percentunit",
            (Query(f"max by (model, version) (mhsa_cost_error_ratio{{{MODEL}}})", MODEL_LEGEND),),
        ),
        Panel(
            "Drift",
            "Median of observed over predicted time of a run. Below 0.8 and above 1.2 the cost model is fitted again.",
            "none",
            (Query(f"mhsa_cost_drift_ratio{{{MODEL}}}", "{{instance}} {{model}}/{{version}}"),),
        ),
        Panel(
            "Refits",
            "How often the cost model was fitted again: often if other load on the machine comes and goes.",
            "short",
            (Query(increase("mhsa_cost_refits_total"), MODEL_LEGEND),),
        ),
        Panel(
            "Predicted time of a run",
            "Predicted time of a run without tokens, and what each 1,000 tokens add.",
            "s",
            (
                Query(f"avg by (model, version) (mhsa_cost_run_seconds{{{MODEL}}})", f"each run {MODEL_LEGEND}"),
                Query(
                    f"1000 * avg by (model, version) (mhsa_cost_token_seconds{{{MODEL}}})",
                    f"1,000 tokens {MODEL_LEGEND}",
                ),
            ),
            width=12,
        ),
        Panel(
            "Mean tokens in a run against the budget",
            "Under load runs are near the budget. Far below it, runners are free and do not wait for more requests.",
            "short",
            (
                Query(mean("mhsa_batch_tokens"), f"mean {MODEL_LEGEND}"),
                Query(f"max by (model, version) (mhsa_batch_budget_tokens{{{MODEL}}})", f"budget {MODEL_LEGEND}"),
            ),
            width=12,
        ),
    ),
)

_DEADLINES = Row(
    "Deadlines and faults",
    (
        Panel(
            "Deadline misses",
            "Requests that were refused for their deadline, or missed it in the queue or in their run.",
            "reqps",
            (
                Query(
                    rate("mhsa_model_requests_total", selector=f'{MODEL}, outcome="deadline"'),
                    MODEL_LEGEND,
                ),
            ),
        ),
        Panel(
            "Stopped runs",
            "Runs that were stopped because all their callers had left.",
            "short",
            (Query(increase("mhsa_stopped_runs_total"), MODEL_LEGEND),),
        ),
        Panel(
            "Engine healthy",
            "Replicas whose engine works.",
            "none",
            (Query(total("mhsa_engine_healthy"), MODEL_LEGEND),),
        ),
    ),
)

DASHBOARD = Dashboard(
    "mhsa-batching",
    "mhsa-serve: Batching",
    "Are requests batched well? Size and fill of batches, queue against compute, cost model, deadlines, faults.",
    (_BATCHES, _TIME, _COSTS, _DEADLINES),
)
