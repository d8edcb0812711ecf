"""When requests come, whoever answers and however long that takes: an open loop.

A caller who waits for an answer before it sends the next request slows down with the server, and overload never shows.
So times are drawn beforehand, from a seed: the same in every run, for every contender.
"""

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


def poisson_times(rng: np.random.Generator, rate: float, seconds: float) -> Times:
    """Arrivals at `rate` a second until `seconds`: independent callers, each of whom comes when it likes."""
    # Gaps of a mean of 1, scaled: with one seed, another rate is the same trace played faster.
    count = int(rate * seconds + 10 * (rate * seconds) ** 0.5 + 10)
    times = np.cumsum(rng.exponential(size=count)) / rate
    return times[times < seconds]


def bursty_times(rng: np.random.Generator, rate: float, seconds: float, burst: float) -> Times:
    """Arrivals at `rate` in the mean, in bursts of `burst` requests in the mean that come at once."""
    starts = poisson_times(rng, rate / burst, seconds)
    return np.repeat(starts, rng.geometric(1 / burst, len(starts)))
