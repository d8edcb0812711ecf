"""The pieces that queries of all three dashboards are made of."""

JOB = 'namespace=~"$namespace", job=~"$job"'
MODEL = f'{JOB}, model=~"$model"'
# Requests that carry sequences, as in the recording rules.
REQUESTS = f'{JOB}, method=~"Encode|EncodeStream|ModelInfer"'
WINDOW = "[$__rate_interval]"


def rate(metric: str, by: str, selector: str = MODEL) -> str:
    """How much a counter grows in a second."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}{WINDOW}))"


def mean(histogram: str, by: str, selector: str = MODEL) -> str:
    """The mean of what a histogram has observed."""
    return f"{rate(f'{histogram}_sum', by, selector)} / {rate(f'{histogram}_count', by, selector)}"


def quantile(q: float, histogram: str, by: str = "", selector: str = MODEL) -> str:
    """A quantile of what a histogram has observed."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, selector)})"


def buckets(histogram: str, selector: str = MODEL) -> str:
    """How many observations each bucket got, for a heat map."""
    return f"sum by (le) (increase({histogram}_bucket{{{selector}}}{WINDOW}))"


def filled(expression: str, *, interval: str, namespace: str = ".*", job: str = ".*", model: str = ".*") -> str:
    """A query with what Grafana puts in it: its interval, and what was chosen at the top of the page."""
    choices = {"$__rate_interval": interval, "$namespace": namespace, "$job": job, "$model": model}
    for name, value in choices.items():
        expression = expression.replace(name, value)
    return expression
