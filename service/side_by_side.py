"""Times runs as the server makes them: several at once, each on a thread of its own.

Runs beside each other share caches and memory, so one of them takes longer than it would with the machine to itself.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

from service.packing import PackedBatch
from service.shapes import Shape, batch_of

# Short runs are repeated, or threads that wake a tenth of a millisecond apart would not run beside each other.
_LEAST_SECONDS = 0.004


class Timed(NamedTuple):
    """Seconds of one run, and how many runs there were."""

    seconds: float
    num_runs: int


def time_shape(
    run: Callable[[PackedBatch], object],
    shape: Shape,
    num_runners: int,
    *,
    clock: Callable[[], float],
    input_size: int = 0,
) -> Timed:
    """Make `num_runners` runs of a shape at once, a few times if they are short; the seconds are the slowest runner's.

    Raises what a run raised.
    """
    batch = batch_of(shape, input_size)
    found: list[Timed] = []
    errors: list[Exception] = []
    start = threading.Barrier(num_runners)

    def work() -> None:
        start.wait()
        started, num_runs, seconds = clock(), 0, 0.0
        try:
            while num_runs == 0 or 0 < seconds < _LEAST_SECONDS:
                run(batch)
                num_runs += 1
                seconds = clock() - started
        except Exception as error:
            errors.append(error)
        else:
            found.append(Timed(seconds / num_runs, num_runs))

    # One of them is this thread. Daemons: SIGTERM need not wait for a run.
    others = [threading.Thread(target=work, name=f"timed-{number}", daemon=True) for number in range(1, num_runners)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return Timed(max(found).seconds, sum(timed.num_runs for timed in found))
