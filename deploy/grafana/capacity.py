"""How much more can it do? Rates for each replica and core, headroom at the objective, the machine."""

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.queries import JOB, MODEL, WINDOW, rate

_NOW = f"avg by (namespace, job) (instance:mhsa_tokens:rate5m{{{JOB}}})"
_BEST = f"job:mhsa_tokens_per_replica_at_objective:max7d{{{JOB}}}"
_CPU = f"sum by (instance) (rate(process_cpu_seconds_total{{{JOB}}}{WINDOW}))"

_HEADROOM = Row(
    "Headroom at the objective",
    (
        Panel(
            "Headroom",
            "How much more each replica has been seen to do within a week while latency held its objective. "
            "Below 0 it does more than that; and where the load was never high, little is known.",
            "percentunit",
            (Query(f"1 - {_NOW} / {_BEST}", "{{job}}"),),
            "stat",
            width=6,
        ),
        Panel(
            "Tokens per replica against the best at the objective",
            "The mean rate of a replica now, and the highest of the last week at which latency held its objective.",
            "short",
            (Query(_NOW, "now {{job}}"), Query(_BEST, "best {{job}}")),
            width=12,
        ),
        Panel(
            "Replicas",
            "Replicas that Prometheus reaches.",
            "none",
            (Query(f"sum by (job) (up{{{JOB}}})", "{{job}}"),),
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
            "Tokens that each replica computes in a second. Uneven where callers do not balance: see round_robin.",
            "short",
            (Query(rate("mhsa_tokens_total", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Tokens for a second of CPU",
            "What a core that is fully used computes: lower than usual means that something else costs time.",
            "short",
            (Query(f"{rate('mhsa_tokens_total', 'instance')} / {_CPU}", "{{instance}}"),),
        ),
        Panel(
            "Tokens for each core",
            "Tokens in a second for each core that the replica may use, used or not.",
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
            "The part of the time that runners are in a run. Waiting grows fast above 80%.",
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
            "Tokens in a second over the rate of full batches that was measured at load.",
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
            "Sequences computed in a second.",
            "short",
            (Query(rate("mhsa_sequences_total", "model, version"), "{{model}}/{{version}}"),),
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
            "Resident memory. It grows with the largest runs and stays: the arena keeps what it once needed.",
            "bytes",
            (Query(f"process_resident_memory_bytes{{{JOB}}}", "{{instance}}"),),
        ),
        Panel(
            "Open files",
            "File descriptors, of which each connection takes one, as a part of what the process may have.",
            "percentunit",
            (Query(f"process_open_fds{{{JOB}}} / process_max_fds{{{JOB}}}", "{{instance}}"),),
        ),
        Panel(
            "GPU",
            "Utilisation, from NVIDIA's dcgm-exporter; empty without one. A busy GPU says nothing of the headroom.",
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
    "How much more can be done: rates for each replica and core, headroom at the objective, the machine.",
    (_HEADROOM, _RATES, _MACHINE),
)
