"""Does what the scheduler decided: runner threads that take, pack, run and hand back. Decides nothing.

One lock guards the scheduler. Runners sleep on it while nothing waits; each runs with the lock open, and ONNX Runtime
gives up the GIL meanwhile. A finished batch goes back to the event loop with one `call_soon_threadsafe`, and only
there are requests settled. Runners are woken once per turn of the event loop, after every request that came in that
turn has been queued: so the callers of one finished batch, who all come back at once, meet again in one batch, and
nobody waits on purpose for company.

A batch that fails is run again in halves, down to single sequences, so that only the culprit fails. A runner thread
that dies of anything else is a bug: everything queued fails, `is_alive` turns false and `on_death` is told.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from service.engine import Outputs, first_line
from service.errors import DeadlineError, EngineError, OutOfMemoryError, RequestError, UnavailableError
from service.metrics import ModelMetrics
from service.packing import PackedBatch, pack, unpack
from service.request import Encoding, Request
from service.scheduler import Entry, Scheduler, Taken

# Far longer than any batch of a bounded token budget takes.
JOIN_SECONDS = 5.0

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What the batcher needs of an engine."""

    num_runners: int

    def run(self, batch: PackedBatch, *, wants_tokens: bool, alone: bool) -> Outputs: ...


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """One sequence's answer or error, on its way back to the event loop."""

    entry: Entry
    started: float
    finished: float
    result: Encoding | RequestError


class Batcher:
    """The threads that serve one model's queue."""

    def __init__(
        self, scheduler: Scheduler, engine: Runner, metrics: ModelMetrics, on_death: Callable[[], None] = lambda: None
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._metrics = metrics
        self._on_death = on_death
        self._wakeup = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_stopping = False
        self._is_wakeup_due = False
        self.is_alive = True
        metrics.watch_queue(lambda: scheduler.num_queued_sequences, lambda: scheduler.num_queued_tokens)

    def start(self) -> None:
        """Start the runner threads; must be called from the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        for number in range(self._engine.num_runners):
            thread = threading.Thread(target=self._serve, name=f"runner-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    async def stop(self) -> None:
        """Fail what waits with `UnavailableError` and join the threads; a run that will not end is left behind."""
        with self._wakeup:
            self._is_stopping = True
            waiting = self._scheduler.clear()
            self._wakeup.notify_all()
        for request in waiting:
            request.fail(UnavailableError("the server is stopping"))
        for thread in self._threads:
            await asyncio.to_thread(thread.join, JOIN_SECONDS)

    async def submit(self, request: Request) -> None:
        """Run a request to its end; its encodings are then complete.

        Raises the request's own `RequestError`. If the caller is cancelled, what still waits leaves the queue at once.
        """
        settled = self._loop.create_future()
        request.on_settled = lambda: None if settled.done() else settled.set_result(None)
        with self._wakeup:
            if self._is_stopping or not self.is_alive:
                raise UnavailableError("the server is stopping")
            self._scheduler.put(request, time.monotonic())
            if self._num_idle and not self._is_wakeup_due:
                self._is_wakeup_due = True
                self._loop.call_soon(self._wake_runner)
        try:
            async with asyncio.timeout_at(request.deadline):
                await settled
        except TimeoutError:
            raise DeadlineError(
                f"the deadline passed {time.monotonic() - request.arrival:.3f} s after arrival"
            ) from None
        finally:
            self._withdraw(request)
        if request.error is not None:
            try:
                raise request.error
            finally:
                # Its traceback holds this frame, and with it the request: a cycle that only the collector would free.
                request.error = None

    def _withdraw(self, request: Request) -> None:
        if not request.is_settled:
            with self._wakeup:
                self._scheduler.remove(request)
            request.is_settled = True

    def _wake_runner(self) -> None:
        self._is_wakeup_due = False
        with self._wakeup:
            self._wakeup.notify()

    def _serve(self) -> None:
        taken = Taken([], [])
        try:
            while (work := self._next()) is not None:
                taken, is_alone = work
                ended = self._run(taken.batch, is_alone) if taken.batch else []
                self._withdraw_failed(ended)
                self._loop.call_soon_threadsafe(self._settle, taken.expired, ended)
        except BaseException:
            log.exception("a runner thread died; the model is no longer served")
            self._loop.call_soon_threadsafe(self._die, taken)

    def _next(self) -> tuple[Taken, bool] | None:
        """Wait for work. With it, whether it has the machine to itself; None when the batcher stops."""
        with self._wakeup:
            self._num_idle += 1
            while True:
                taken = self._scheduler.take(time.monotonic(), self._num_idle)
                if taken.batch or taken.expired:
                    break
                if self._is_stopping:
                    return None
                self._wakeup.wait()
            self._num_idle -= 1
            if self._scheduler.num_queued_sequences:
                self._wakeup.notify()
            is_alone = self._num_idle == self._engine.num_runners - 1 and not self._scheduler.num_queued_sequences
            return taken, is_alone

    def _run(self, batch: list[Entry], is_alone: bool) -> list[Ended]:
        """Run a batch; in halves if it fails, so that batch mates are not harmed."""
        started = time.monotonic()
        try:
            results = self._encode(batch, is_alone)
        except EngineError as error:
            self._metrics.engine_failures.inc()
            if len(batch) == 1:
                return [Ended(batch[0], started, time.monotonic(), error)]
            log.warning("a run of %d sequences failed, running its halves: %s", len(batch), first_line(error.__cause__))
            middle = len(batch) // 2
            return self._run(batch[:middle], is_alone) + self._run(batch[middle:], is_alone)
        finished = time.monotonic()
        self._metrics.compute_seconds.observe(finished - started)
        for entry in batch:
            self._metrics.queue_seconds.observe(started - entry.request.arrival)
        return [Ended(entry, started, finished, result) for entry, result in zip(batch, results, strict=True)]

    def _withdraw_failed(self, ended: Iterable[Ended]) -> None:
        """A request of which one sequence has failed has failed: the rest of it need not run."""
        failed = [end.entry.request for end in ended if isinstance(end.result, RequestError)]
        if failed:
            with self._wakeup:
                for request in failed:
                    self._scheduler.remove(request)

    def _encode(self, batch: list[Entry], is_alone: bool) -> list[Encoding | RequestError]:
        packed = self._pack(batch)
        wants_tokens = any(entry.request.wants_tokens for entry in batch)
        outputs = self._engine.run(packed, wants_tokens=wants_tokens, alone=is_alone)
        self._metrics.sequences.inc(packed.num_sequences)
        self._metrics.tokens.inc(packed.num_tokens)
        self._metrics.batch_sequences.observe(packed.num_sequences)
        self._metrics.batch_tokens.observe(packed.num_tokens)
        self._metrics.batch_fill.observe(packed.fill)
        if outputs.token_embeddings is None:
            return [self._checked(Encoding(pooled, None)) for pooled in outputs.sentence_embedding]
        rows = unpack(packed, outputs.token_embeddings)
        return [
            self._checked(Encoding(pooled, tokens if entry.request.wants_tokens else None))
            for entry, pooled, tokens in zip(batch, outputs.sentence_embedding, rows, strict=True)
        ]

    def _pack(self, batch: list[Entry]) -> PackedBatch:
        try:
            return pack([entry.sequence for entry in batch])
        except MemoryError as error:
            raise OutOfMemoryError("the host has no memory left for the batch") from error

    def _checked(self, encoding: Encoding) -> Encoding | RequestError:
        is_finite = np.isfinite(encoding.pooled).all() and (
            encoding.tokens is None or np.isfinite(encoding.tokens).all()
        )
        if is_finite:
            return encoding
        self._metrics.engine_failures.inc()
        return EngineError("the model gave numbers that are not finite")

    def _settle(self, expired: Iterable[Request], ended: Iterable[Ended]) -> None:
        for request in expired:
            request.fail(DeadlineError("the deadline passed in the queue"))
        for end in ended:
            if isinstance(end.result, Encoding):
                end.entry.request.complete(end.entry.place, end.result, end.started, end.finished)
            else:
                end.entry.request.fail(end.result)

    def _die(self, taken: Taken) -> None:
        with self._wakeup:
            self.is_alive = False
            waiting = self._scheduler.clear()
        for entry in taken.batch:
            entry.request.fail(EngineError("the engine has died"))
        for request in (*taken.expired, *waiting):
            request.fail(UnavailableError("the engine has died"))
        self._on_death()
