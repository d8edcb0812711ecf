"""A real server, scheduler and batcher over an engine whose runs end when the test says so.

Time is counted in batches: what a test says of waiting then holds on any machine.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
from prometheus_client import CollectorRegistry

from service.batcher import Batcher
from service.bounds import Bounds
from service.cancellation import Cancellation
from service.cost_model import CostModel
from service.cost_tracker import CostTracker
from service.engine import Outputs
from service.errors import StoppedError
from service.metrics import Metrics
from service.packing import PackedBatch
from service.request import Float32Array
from service.scheduler import Scheduler
from tests.fakes import HIDDEN_SIZE, LIMITS, fake_model, fake_repository
from tests.wire import Wire, running

# A machine so slow that no test can be: what the scheduler plans for a request then lies far in the future.
SLOW = CostModel(per_run=10.0, per_token=0.1, per_pair=0.0)
# So fast that no deadline is hopeless before it has passed.
FAST = CostModel(per_run=1e-6, per_token=1e-6, per_pair=0.0)
BATCH_TOKENS = 64
BOUNDS = Bounds(tokens=100_000, sequences=100_000, requests=1000, bytes=1 << 30)


def answer_to(first_id: int) -> Float32Array:
    """(E,): what a sequence is answered with, by its first id."""
    return np.full(HIDDEN_SIZE, first_id, np.float32)


class SteppedEngine:
    """Each run waits until it is let go, or stopped. `batches`: the tokens of each run begun, by sequence."""

    num_runners = 1

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.num_stopped = 0
        self._changed = threading.Condition()
        self._num_let_go = 0.0

    def run(self, batch: PackedBatch, *, wants_tokens: bool, alone: bool, cancellation: Cancellation | None) -> Outputs:
        assert cancellation is not None
        starts = np.cumsum(batch.lengths) - batch.lengths
        with self._changed:
            number = len(self.batches)
            self.batches.append([part.tolist() for part in np.split(batch.token_ids, starts[1:])])
            cancellation.attach(self._tell)
            assert self._changed.wait_for(lambda: cancellation.is_set or number < self._num_let_go, timeout=60)
            if cancellation.is_set:
                self.num_stopped += 1
                raise StoppedError("the run was stopped")
        pooled = np.stack([answer_to(first) for first in batch.token_ids[starts]])
        return Outputs(pooled, np.repeat(pooled, batch.lengths, axis=0) if wants_tokens else None)

    async def wait_for_batches(self, count: int) -> None:
        """Until so many runs have begun in all."""
        await until(lambda: len(self.batches) >= count)

    async def step(self) -> list[list[int]]:
        """Let the run that is going on end; what the next one, which must come, is of."""
        count = len(self.batches)
        self.let_go(count)
        await self.wait_for_batches(count + 1)
        return self.batches[count]

    def let_go(self, count: float = float("inf")) -> None:
        """The first `count` runs may end, whenever they begin."""
        with self._changed:
            self._num_let_go = count
            self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


@dataclass
class Stepped:
    """The wire and what is behind it."""

    wire: Wire
    engine: SteppedEngine
    scheduler: Scheduler
    batcher: Batcher

    async def wait_for_requests(self, count: int) -> None:
        """Until so many are in flight: waiting or running."""
        await until(lambda: self.scheduler.used.requests == count)


async def until(is_true: Callable[[], bool]) -> None:
    """Turn the event loop until something has happened."""
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0)


@asynccontextmanager
async def stepped(
    cost: CostModel = SLOW,
    *,
    bounds: Bounds = BOUNDS,
    weights: Mapping[str, float] | None = None,
    batcher_type: type[Batcher] = Batcher,
) -> AsyncIterator[Stepped]:
    """A server of one model that takes requests of 10,000 sequences; tenants share it."""
    engine = SteppedEngine()
    scheduler = Scheduler(CostTracker(cost, BATCH_TOKENS, num_runners=1), bounds, weights=weights)
    batcher = batcher_type(scheduler, engine, Metrics(CollectorRegistry()).of_model("fake", "1"))
    limits = replace(LIMITS, max_request_sequences=10_000, max_request_tokens=40_000)
    batcher.start()
    try:
        async with running(fake_repository(fake_model(batcher, limits=limits)), fairness="tenant") as wire:
            yield Stepped(wire, engine, scheduler, batcher)
    finally:
        engine.let_go()
        await batcher.stop()
