import numpy as np
import pytest

from benchmarks.arrivals import bursty_times, poisson_times


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_poisson_arrivals_have_the_rate_and_gaps_that_forget_the_past() -> None:
    times = poisson_times(rng(), 50.0, 400.0)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert times[0] > 0
    assert times[-1] < 400.0
    # 20,000 gaps: their mean and deviation, which are equal, are each within 1% (a standard error is 0.7%).
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)


def test_twice_the_rate_is_the_same_trace_played_twice_as_fast() -> None:
    slow, fast = poisson_times(rng(), 10.0, 20.0), poisson_times(rng(), 20.0, 10.0)
    np.testing.assert_allclose(slow, 2 * fast)


def test_bursts_come_at_once_and_keep_the_rate() -> None:
    times = bursty_times(rng(), 50.0, 400.0, burst=10.0)
    assert len(times) / 400.0 == pytest.approx(50, rel=0.15)  # 2,000 bursts of a size that deviates as much as it is
    assert len(times) / len(np.unique(times)) == pytest.approx(10, rel=0.1)
