"""Dashboard Capacity: how much more load can it take? Headroom, rates, the machine."""

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.queries import JOB, MODEL, MODEL_LEGEND, WINDOW, rate, total

_NOW = f"avg by (namespace, job) (instance:mhsa_tokens:rate5m{{{JOB}}})"
_BEST = f"job:mhsa_tokens_per_replica_at_objective:max7d{{{JOB}}}"
_CPU = f"sum by (instance) (rate(process_cpu_seconds_total{{{JOB}}}{WINDOW}))"

_HEADROOM = Row(
    "Headroom",
    (
        Panel(
            "Headroom",
            "The part of its capacity that a replica does not use, now and in the busiest 5 minutes of the last week. "
            "Capacity is all runners busy, or the full rate measured at load, whichever is nearer. "
            "It does not depend on how long the service has run. Keep 20%: below that, queues grow quickly.",
            "percentunit",
            (
                Query(f"1 - job:mhsa_utilization:ratio_rate5m{{{JOB}}}", "now {{job}}"),
                Query(f"1 - job:mhsa_utilization:max7d{{{JOB}}}", "least of 7 days {{job}}"),
            ),
            "stat",
            width=6,
        ),
        Panel(
            "Tokens per replica against the best at the objective",
            "Mean rate of a replica now, and the highest of the last week at which latency met its objective.",
            "short",
            (Query(_NOW, "now {{job}}"), Query(_BEST, "best {{job}}")),
            width=12,
        ),
        Panel(
            "Replicas",
            "Replicas that Prometheus reaches.",
            "none",
            (Query(total("up", "job", JOB), "{{job}}"),),
            "stat",
            width=6,
        ),
    ),
)

_RATES = Row(
    "Rates",
    (
        Panel(
            "Tokens by replica",
            "Tokens per second of each replica. Uneven if clients do not balance their calls (round_robin).",
            "short",
            (Query(rate("mhsa_tokens_total", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Tokens for a second of CPU",
            "Tokens per second of CPU time. Lower than usual: something else costs CPU time.",
            "short",
            (Query(f"{rate('mhsa_tokens_total', 'instance')} / {_CPU}", "{{instance}}"),),
        ),
        Panel(
            "Tokens for each core",
            "Tokens per second for each core that the replica may use, busy or idle.",
            "short",
            (
                Query(
                    f"{rate('mhsa_tokens_total', 'instance')} / max by (instance) "
                    f"(mhsa_runners{{{MODEL}}} * mhsa_run_threads{{{MODEL}}})",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Busy runners",
            "The part of the time that runners are busy. Above 80% waits grow fast.",
            "percentunit",
            (
                Query(
                    f"{rate('mhsa_compute_seconds_sum', 'instance, model, version')} / "
                    f"sum by (instance, model, version) (mhsa_runners{{{MODEL}}})",
                    "{{instance}} {{model}}/{{version}}",
                ),
            ),
            limit=0.8,
        ),
        Panel(
            "Part of the full rate",
            "Tokens per second over the rate of full batches that was measured when the model was loaded.",
            "percentunit",
            (
                Query(
                    f"{rate('mhsa_tokens_total', 'instance, model, version')} / "
                    f"sum by (instance, model, version) (mhsa_plateau_tokens_per_second{{{MODEL}}})",
                    "{{instance}} {{model}}/{{version}}",
                ),
            ),
        ),
        Panel(
            "Sequences by model",
            "Sequences computed per second.",
            "short",
            (Query(rate("mhsa_sequences_total"), MODEL_LEGEND),),
            is_stacked=True,
        ),
    ),
)

_MACHINE = Row(
    "Machine",
    (
        Panel(
            "CPU by replica",
            "Cores that each replica uses.",
            "none",
            (Query(_CPU, "{{instance}}"),),
        ),
        Panel(
            "Memory by replica",
            "Resident memory. It grows with the largest runs and does not shrink: the arena keeps its memory.",
            "bytes",
            (Query(f"process_resident_memory_bytes{{{JOB}}}", "{{instance}}"),),
        ),
        Panel(
            "Open files",
            "Open file descriptors over the process' limit. Each connection needs one.",
            "percentunit",
            (Query(f"process_open_fds{{{JOB}}} / process_max_fds{{{JOB}}}", "{{instance}}"),),
        ),
        Panel(
            "GPU",
            "Utilisation, from NVIDIA's dcgm-exporter; empty without one. It says little about headroom.",
            "percent",
            (Query('avg by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL{namespace=~"$namespace"})', "{{Hostname}} {{gpu}}"),),
            width=12,
        ),
        Panel(
            "GPU memory",
            "Used memory, from NVIDIA's dcgm-exporter; empty without one.",
            "decmbytes",
            (Query('sum by (Hostname, gpu) (DCGM_FI_DEV_FB_USED{namespace=~"$namespace"})', "{{Hostname}} {{gpu}}"),),
            width=12,
        ),
    ),
)

DASHBOARD = Dashboard(
    "mhsa-capacity",
    "mhsa-serve: Capacity",
    "How much more load can it take? Headroom, rates of each replica and core, the machine.",
    (_HEADROOM, _RATES, _MACHINE),
)
