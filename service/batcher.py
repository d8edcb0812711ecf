"""Does what the scheduler decided: runner threads that take a batch, have it run and hand it back. Decides nothing.

One lock guards scheduler and supervisor. Runners sleep on it while nothing waits; each runs with the lock open, and
ONNX Runtime gives up the GIL meanwhile. A finished batch goes back to the event loop with one `call_soon_threadsafe`,
and only there are requests settled. Runners are woken once per turn of the event loop, after every request that came in
that turn has been queued: so the callers of one finished batch, who all come back at once, meet again in one batch, and
nobody waits on purpose for company.

A run whose callers have all left is stopped. One that does not end, and an engine that fails again and again, make the
model unhealthy (`supervisor.py`): what waits fails, nothing is accepted, and `on_health` is told, until the engine
passes its test again. If it does not, or if a runner thread dies, which is a bug, `is_alive` turns false and `on_death`
is told.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import TYPE_CHECKING

from service.cost_model import Sample
from service.errors import DeadlineError, EngineError, RequestError, StoppedError, UnavailableError
from service.executor import Ended, Executor, Runner
from service.metrics import ModelMetrics
from service.request import Encoding, Request
from service.runs import WATCH_SECONDS, Runs
from service.scheduler import Scheduler, Taken
from service.supervisor import TEST_SECONDS, Supervisor

if TYPE_CHECKING:
    from service.tracing import ModelTracing

# Far longer than any batch of a bounded token budget takes.
JOIN_SECONDS = 5.0

log = logging.getLogger(__name__)


class Batcher:
    """The threads that serve one model's queue.

    `test` asks the engine for something known to be right, and raises if it cannot do it. `on_health` and `on_death`
    are called on the event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Runner,
        metrics: ModelMetrics,
        *,
        test: Callable[[], object] = lambda: None,
        on_health: Callable[[], None] = lambda: None,
        on_death: Callable[[], None] = lambda: None,
        tracing: "ModelTracing | None" = None,
    ) -> None:
        self._scheduler = scheduler
        self._num_runners = engine.num_runners
        self._executor = Executor(engine, metrics, self._note_run, tracing)
        self._supervisor = Supervisor()
        self._metrics = metrics
        self._test_engine = test
        self._on_health = on_health
        self._on_death = on_death
        self._wakeup = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._runs = Runs()
        self._num_idle = 0
        self._is_stopping = False
        self._is_wakeup_due = False
        self.is_alive = True
        self.is_healthy = True
        metrics.engine_healthy.set(1)
        metrics.watch_queue(scheduler)

    def start(self) -> None:
        """Start the runner threads; must be called from the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        for number in range(self._num_runners):
            # In this context, where the model has its name in the log; threads have none of their own.
            run = copy_context().run
            thread = threading.Thread(target=run, args=(self._serve,), name=f"runner-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._watching = self._loop.call_later(WATCH_SECONDS, self._watch)

    def stop_waiting(self) -> None:
        """No more requests will come: start what waits for company."""
        with self._wakeup:
            self._scheduler.stop_waiting()
            self._wakeup.notify_all()

    async def stop(self) -> None:
        """Fail what waits with `UnavailableError` and join the threads; a run that will not end is left behind."""
        self._watching.cancel()
        with self._wakeup:
            self._is_stopping = True
            waiting = self._scheduler.clear()
            self._wakeup.notify_all()
        _fail(waiting, UnavailableError, "the server is stopping")
        for thread in self._threads:
            await asyncio.to_thread(thread.join, JOIN_SECONDS)

    async def submit(self, request: Request) -> None:
        """Run a request to its end; its encodings are then complete.

        Raises the request's own `RequestError`. If the caller is cancelled, what still waits leaves the queue at once,
        and what runs is stopped if nobody else waits for it.
        """
        with self._metrics.count_request():
            await self._submit(request)

    async def _submit(self, request: Request) -> None:
        settled = self._loop.create_future()
        request.on_settled = lambda: None if settled.done() else settled.set_result(None)
        self._put(request)
        try:
            async with asyncio.timeout_at(request.deadline):
                await settled
        except TimeoutError:
            waited_ms = 1000 * (time.monotonic() - request.arrival)
            raise DeadlineError(f"the deadline passed before the answer, {waited_ms:.1f} ms after arrival") from None
        finally:
            self._end(request)
        if request.error is not None:
            try:
                raise request.error
            finally:
                # Its traceback holds this frame, and with it the request: a cycle that only the collector would free.
                request.error = None

    def _put(self, request: Request) -> None:
        with self._wakeup:
            if self._is_stopping or not self.is_alive:
                raise UnavailableError("the server is stopping")
            if not self._supervisor.is_healthy:
                raise UnavailableError("the engine does not work; it is tried again")
            displaced = self._scheduler.put(request, time.monotonic())
            if self._num_idle and not self._is_wakeup_due:
                self._is_wakeup_due = True
                self._loop.call_soon(self._wake_runner)
            for victim, error in displaced:
                victim.fail(error)
            if displaced:
                self._metrics.stopped_runs.inc(self._runs.stop_deserted())

    def _end(self, request: Request) -> None:
        has_left = not request.is_settled
        request.is_settled = True
        with self._wakeup:
            self._scheduler.end(request)
            if has_left:
                self._metrics.stopped_runs.inc(self._runs.stop_deserted())

    def _wake_runner(self) -> None:
        self._is_wakeup_due = False
        with self._wakeup:
            self._wakeup.notify()

    def _serve(self) -> None:
        taken: Taken | None = None
        try:
            while (taken := self._next()) is not None:
                if taken.expired:
                    self._loop.call_soon_threadsafe(_expire, taken.expired)
                if taken.batch:
                    self._loop.call_soon_threadsafe(self._settle, self._run(taken))
        except BaseException:
            log.exception("a runner thread died; the model is no longer served")
            self._loop.call_soon_threadsafe(self._die, taken)

    def _next(self) -> Taken | None:
        """Wait for work; None when the batcher stops."""
        with self._wakeup:
            self._num_idle += 1
            try:
                while not self._is_stopping:
                    if self._supervisor.needs_test:
                        self._test()
                        continue
                    taken = self._scheduler.take(time.monotonic(), self._num_idle)
                    if taken.batch:
                        self._begin(taken)
                    if taken.batch or taken.expired:
                        return taken
                    self._wakeup.wait(None if taken.wake_at is None else taken.wake_at - time.monotonic())
                return None
            finally:
                self._num_idle -= 1

    def _begin(self, taken: Taken) -> None:
        self._runs.begin(taken)
        if self._scheduler.used.sequences:
            self._wakeup.notify()

    def _run(self, taken: Taken) -> list[Ended]:
        run = self._runs.mine
        ended = self._executor.run(taken.batch, alone=taken.is_alone, cancellation=run.cancellation)
        with self._wakeup:
            self._runs.end()
            self._scheduler.finish(taken)
            if run.lacked_memory:
                self._scheduler.note_out_of_memory(taken, run.most_tokens, time.monotonic())
            # A request of which one sequence has failed has failed: the rest of it need not run.
            for end in ended:
                if isinstance(end.result, RequestError):
                    self._scheduler.drop(end.entry.request)
        return ended

    def _note_run(self, sample: Sample, error: EngineError | None) -> None:
        with self._wakeup:
            run = self._runs.mine
            run.note(sample.num_tokens, error)
            if error is None:
                self._supervisor.note_success()
                self._scheduler.observe(sample, is_alone=run.taken.is_alone)
            elif not isinstance(error, StoppedError) or self._supervisor.is_overdue(sample.seconds, run.taken.seconds):
                self._supervisor.note_fault()

    def _test(self) -> None:
        """Ask the engine for something known to be right, one runner with the lock open, the others waiting."""
        if self._num_idle < self._num_runners:
            self._wakeup.wait(TEST_SECONDS)
            return
        self._num_idle -= 1
        self._runs.begin(Taken([], []))
        self._wakeup.release()
        error: Exception | None = None
        try:
            self._test_engine()
        except Exception as caught:
            error = caught
        finally:
            self._wakeup.acquire()
            self._runs.end()
            self._num_idle += 1
        self._supervisor.note_test(is_passed=error is None, now=time.monotonic())
        self._loop.call_soon_threadsafe(self._tell_health)
        if error is None:
            self._wakeup.notify_all()
        else:
            log.error("the engine does not do what it did when it was loaded: %s", error)
            self._wakeup.wait(TEST_SECONDS)

    def _watch(self) -> None:
        """Look for runs that do not end, and for an engine that does not come back."""
        now = time.monotonic()
        with self._wakeup:
            self._runs.watch(self._supervisor, now)
            is_dead = self._supervisor.is_dead(now)
        self._tell_health()
        if is_dead:
            self._die(None)
        else:
            self._watching = self._loop.call_later(WATCH_SECONDS, self._watch)

    def _tell_health(self) -> None:
        with self._wakeup:
            is_healthy = self._supervisor.is_healthy
            waiting = [] if is_healthy else self._scheduler.clear()
        _fail(waiting, UnavailableError, "the engine does not work")
        if is_healthy != self.is_healthy:
            log.warning("the engine works again" if is_healthy else "the engine does not work, or a run does not end")
            self.is_healthy = is_healthy
            self._metrics.engine_healthy.set(is_healthy)
            self._on_health()

    def _settle(self, ended: Iterable[Ended]) -> None:
        for end in ended:
            if isinstance(end.result, Encoding):
                end.entry.request.complete(end.entry.place, end.result, end.started, end.finished)
            else:
                end.entry.request.fail(end.result)

    def _die(self, taken: Taken | None) -> None:
        """`taken`: what the thread that died was at."""
        self._watching.cancel()
        with self._wakeup:
            self.is_alive = False
            waiting = self._scheduler.clear()
            lost = [run.taken for run in self._runs]
        for one in lost if taken is None else (taken, *lost):
            _fail((entry.request for entry in one.batch), EngineError, "the engine has died")
        _fail(waiting, UnavailableError, "the engine has died")
        self._metrics.engine_healthy.set(0)
        self._on_death()


def _expire(requests: Iterable[Request]) -> None:
    _fail(requests, DeadlineError, "the deadline passed, or could not be met any more, in the queue")


def _fail(requests: Iterable[Request], kind: type[RequestError], text: str) -> None:
    """To each its own error: each is raised, and keeps where."""
    for request in requests:
        request.fail(kind(text))
