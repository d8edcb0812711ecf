"""Who sends a request to which replica: what stands in front of many servers.

A balancer knows how many tokens each replica has not answered yet, without delay. Real ones know less: requests in
flight, of their own alone. So what is lost between least-loaded and round-robin here is the most that is to be had.
"""

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from benchmarks.simulator import Balance, Replica


def round_robin(_rng: np.random.Generator) -> Balance:
    """In turn: what gRPC's clients and nginx do."""
    turns = count()
    return lambda replicas: replicas[next(turns) % len(replicas)]


def at_random(rng: np.random.Generator) -> Balance:
    """Any of them: what a Kubernetes service does with connections."""
    return lambda replicas: replicas[int(rng.integers(len(replicas)))]


def two_choices(rng: np.random.Generator) -> Balance:
    """The less loaded of two at random. Source: Mitzenmacher 2001, the power of two choices."""

    def choose(replicas: Sequence[Replica]) -> Replica:
        one, other = (int(number) for number in rng.integers(len(replicas), size=2))
        return min(replicas[one], replicas[other], key=_load)

    return choose


def least_loaded(rng: np.random.Generator) -> Balance:
    """The one with the fewest tokens; of several, any."""

    def choose(replicas: Sequence[Replica]) -> Replica:
        first = int(rng.integers(len(replicas)))
        return min((*replicas[first:], *replicas[:first]), key=_load)

    return choose


def _load(replica: Replica) -> int:
    return replica.num_tokens


BALANCERS: dict[str, Callable[[np.random.Generator], Balance]] = {
    "round-robin": round_robin,
    "at random": at_random,
    "two choices": two_choices,
    "least loaded": least_loaded,
}
