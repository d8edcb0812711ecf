"""The rival: this server without batching. One sequence, one run, on as many one-thread workers as there are CPUs.

On a CPU it beats every batching server that pads, and it is what most people would write. Only the scheduling is
replaced: wire, checks, metrics, engine and graph are ours, to the line. Its queue is a plain FIFO; it knows no
deadlines and no cancelled callers, which makes it a little cheaper still. Started as `python -m benchmarks.unbatched`,
with the server's own flags.
"""

import asyncio
from queue import SimpleQueue
from unittest.mock import patch

from service.__main__ import main
from service.batcher import Batcher
from service.cancellation import Cancellation
from service.cost_model import Sample
from service.errors import EngineError
from service.lane import Entry
from service.request import Request


class Unbatched(Batcher):
    """Runner threads that take one sequence at a time."""

    def start(self) -> None:
        self._waiting: SimpleQueue[Entry | None] = SimpleQueue()
        super().start()

    async def stop(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)
        await super().stop()

    async def submit(self, request: Request) -> None:
        settled: asyncio.Future[None] = self._loop.create_future()
        request.on_settled = lambda: None if settled.done() else settled.set_result(None)
        for place in range(len(request.sequences)):
            self._waiting.put(Entry(0.0, 0, request, place))
        await settled
        if request.error is not None:
            raise request.error

    def _serve(self) -> None:
        while (entry := self._waiting.get()) is not None:
            ended = self._executor.run([entry], alone=False, cancellation=Cancellation())
            self._loop.call_soon_threadsafe(self._settle, ended)

    def _note_run(self, _sample: Sample, _error: EngineError | None) -> None:
        """Nobody predicts anything here."""


if __name__ == "__main__":
    with patch("service.loading.Batcher", Unbatched):
        main()
