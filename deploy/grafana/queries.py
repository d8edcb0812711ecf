"""Parts of PromQL that the dashboards share."""

JOB = 'namespace=~"$namespace", job=~"$job"'
MODEL = f'{JOB}, model=~"$model"'
# Requests that carry sequences, as in the recording rules.
REQUESTS = f'{JOB}, method=~"Encode|EncodeStream|ModelInfer"'
WINDOW = "[$__rate_interval]"
BY_MODEL, MODEL_LEGEND = "model, version", "{{model}}/{{version}}"


def rate(counter: str, by: str = BY_MODEL, selector: str = MODEL) -> str:
    """How much a counter grows in a second, added up."""
    return f"sum by ({by}) (rate({counter}{{{selector}}}{WINDOW}))"


def increase(counter: str, by: str = BY_MODEL) -> str:
    """How much a model's counter grows between two points of a graph, added up."""
    return f"sum by ({by}) (increase({counter}{{{MODEL}}}{WINDOW}))"


def total(gauge: str, by: str = BY_MODEL, selector: str = MODEL) -> str:
    """A gauge, added up."""
    return f"sum by ({by}) ({gauge}{{{selector}}})"


def mean(histogram: str, by: str = BY_MODEL, selector: str = MODEL) -> str:
    """The mean of what a histogram has observed."""
    return f"{rate(f'{histogram}_sum', by, selector)} / {rate(f'{histogram}_count', by, selector)}"


def quantile(q: float, histogram: str, by: str = "", selector: str = MODEL) -> str:
    """A quantile of what a histogram has observed."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, selector)})"


def buckets(histogram: str) -> str:
    """How many observations each bucket got, for a heat map."""
    return increase(f"{histogram}_bucket", "le")


def interpolate(expression: str, *, interval: str, namespace: str = ".*", job: str = ".*", model: str = ".*") -> str:
    """A query with its variables replaced, as Grafana does: its interval, and what is chosen at the top of the page."""
    choices = {"$__rate_interval": interval, "$namespace": namespace, "$job": job, "$model": model}
    for name, value in choices.items():
        expression = expression.replace(name, value)
    return expression
