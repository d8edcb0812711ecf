"""Is the work put together well? Batches, queue against compute, cost model, deadlines, the engine."""

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.queries import MODEL, WINDOW, buckets, mean, quantile, rate

_BY, _VERSION = "model, version", "{{model}}/{{version}}"

_BATCHES = Row(
    "Batches",
    (
        Panel(
            "Batch size",
            "Sequences in one run: how many runs had how many.",
            "short",
            (Query(buckets("mhsa_batch_sequences"), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Tokens in a run",
            "Tokens in one run: how many runs had how many. Under load they should be near the budget.",
            "short",
            (Query(buckets("mhsa_batch_tokens"), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Fill",
            "Real tokens over sequences x longest. Only attention works on the empty slots of what is missing to 100%.",
            "percentunit",
            (
                Query(mean("mhsa_batch_fill_ratio", _BY), f"mean {_VERSION}"),
                Query(quantile(0.1, "mhsa_batch_fill_ratio", _BY), f"worst tenth {_VERSION}"),
            ),
        ),
        Panel(
            "Runs",
            "Runs of the engine in a second.",
            "ops",
            (Query(rate("mhsa_compute_seconds_count", _BY), _VERSION),),
        ),
        Panel(
            "Mean batch",
            "Mean sequences in a run. At 1 nothing is batched: the load is small, or sequences are long.",
            "short",
            (Query(mean("mhsa_batch_sequences", _BY), _VERSION),),
        ),
        Panel(
            "Time for a token",
            "Time of the engine for each token. It falls with the size of a batch up to the budget and then stays.",
            "s",
            (
                Query(
                    f"{rate('mhsa_compute_seconds_sum', _BY)} / {rate('mhsa_tokens_total', _BY)}",
                    _VERSION,
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
            "Mean wait of a sequence before its run, and mean time of a run: which of the two makes callers wait.",
            "s",
            (
                Query(mean("mhsa_queue_wait_seconds", _BY), f"queue {_VERSION}"),
                Query(mean("mhsa_compute_seconds", _BY), f"compute {_VERSION}"),
            ),
        ),
        Panel(
            "Wait",
            "How many sequences waited how long.",
            "s",
            (Query(buckets("mhsa_queue_wait_seconds"), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Compute",
            "How many runs took how long.",
            "s",
            (Query(buckets("mhsa_compute_seconds"), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Tokens waiting",
            "Tokens in the queues of all replicas.",
            "short",
            (Query(f"sum by (model, version) (mhsa_queue_tokens{{{MODEL}}})", _VERSION),),
        ),
        Panel(
            "Sequences waiting",
            "Sequences in the queues of all replicas.",
            "short",
            (Query(f"sum by (model, version) (mhsa_queue_sequences{{{MODEL}}})", _VERSION),),
        ),
        Panel(
            "Bytes in flight",
            "Memory that messages and answers of requests in flight hold, in all replicas.",
            "bytes",
            (Query(f"sum by (model, version) (mhsa_model_bytes_in_flight{{{MODEL}}})", _VERSION),),
        ),
    ),
)

_COSTS = Row(
    "Cost model",
    (
        Panel(
            "Cost model error",
            "How far single runs are from their prediction, the worst tenth left out. Others on the machine show here.",
            "percentunit",
            (Query(f"max by (model, version) (mhsa_cost_error_ratio{{{MODEL}}})", _VERSION),),
        ),
        Panel(
            "Drift",
            "Observed over predicted time of the middle run. Beyond 0.8 and 1.2 the model is fitted again.",
            "none",
            (Query(f"mhsa_cost_drift_ratio{{{MODEL}}}", "{{instance}} {{model}}/{{version}}"),),
        ),
        Panel(
            "Refits",
            "How often the cost model was fitted again. Often, where neighbours come and go on the machine.",
            "short",
            (Query(f"sum by (model, version) (increase(mhsa_cost_refits_total{{{MODEL}}}{WINDOW}))", _VERSION),),
        ),
        Panel(
            "Predicted time of a run",
            "What a run of no tokens costs, and what each thousand tokens adds.",
            "s",
            (
                Query(f"avg by (model, version) (mhsa_cost_run_seconds{{{MODEL}}})", f"each run {_VERSION}"),
                Query(
                    f"1000 * avg by (model, version) (mhsa_cost_token_seconds{{{MODEL}}})", f"1,000 tokens {_VERSION}"
                ),
            ),
            width=12,
        ),
        Panel(
            "Mean tokens in a run against the budget",
            "Under load runs come near the budget; far below it, a runner was free and did not wait for more.",
            "short",
            (
                Query(mean("mhsa_batch_tokens", _BY), f"mean {_VERSION}"),
                Query(f"max by (model, version) (mhsa_batch_budget_tokens{{{MODEL}}})", f"budget {_VERSION}"),
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
            "Requests that were refused, left the queue or came back too late for their deadline.",
            "reqps",
            (
                Query(
                    rate("mhsa_model_requests_total", _BY, f'{MODEL}, outcome="deadline"'),
                    _VERSION,
                ),
            ),
        ),
        Panel(
            "Stopped runs",
            "Runs that were stopped in the middle since every caller had left.",
            "short",
            (Query(f"sum by (model, version) (increase(mhsa_stopped_runs_total{{{MODEL}}}{WINDOW}))", _VERSION),),
        ),
        Panel(
            "Engine healthy",
            "Replicas whose engine passes its own test.",
            "none",
            (Query(f"sum by (model, version) (mhsa_engine_healthy{{{MODEL}}})", _VERSION),),
        ),
    ),
)

DASHBOARD = Dashboard(
    "mhsa-batching",
    "mhsa-serve: Batching",
    "How requests become runs: size and fill of batches, queue against compute, the cost model, deadlines.",
    (_BATCHES, _TIME, _COSTS, _DEADLINES),
)
