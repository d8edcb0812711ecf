"""How urgent each sequence of a request is: a key that never changes, the smallest first.

- Without a deadline, arrival + PATIENCE, and for what a request has beyond a full batch, SPREAD times the seconds of
  that work.
- With a deadline, the latest moment at which it can start so that the rest of its request still makes it, if that is
  sooner. Keys less the present are slack; since the present is the same for all, they need no updating.

So requests of up to a full batch leave in the order of arrival, and end one after the other instead of all late. One of
10,000 sequences is spread over more than the time that it would take alone: a single sequence that comes meanwhile
waits for a batch of it at most. Nobody starves: whatever is put after a key's moment has passed has a larger one,
unless its deadline cannot be met, and then it is refused.
"""

from collections.abc import Iterator, Sequence

from service.request import Request

# How long a request without a deadline lets those with one pass.
PATIENCE_SECONDS = 1.0
# A large request yields to those who come later also on a machine that has become so many times slower than predicted.
SPREAD = 8.0


def keys(
    request: Request, shares: Sequence[float], *, per_run: float, at_once: float, num_runners: int
) -> Iterator[float]:
    """The key of each sequence, in order.

    `shares`: the seconds that each adds to a run. `per_run`: of a run's own. `at_once`: the whole machine's seconds for
    a full batch of it.
    """
    before, after = 0.0, sum(shares) / num_runners
    for share in shares:
        seconds = share / num_runners
        beyond = max(0.0, before + seconds - max(at_once, shares[0] / num_runners))
        key = request.arrival + PATIENCE_SECONDS + SPREAD * beyond
        if request.deadline is not None:
            # One sequence runs on one runner, however many there are.
            key = min(key, request.deadline - max(after, share) - per_run)
        yield key
        before += seconds
        after -= seconds
