"""The offline limit of this machine: batches straight into ONNX Runtime, with nobody to ask and nobody to answer.

As many threads as there are CPUs, each packing and running one batch after the other on the engine that the server
uses. What a server reaches of this is what its wire, queue and scheduler leave of the machine.

All of it runs in a process of its own, so that the CPU time of that process is all its own.
"""

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import Any, Literal

import numpy as np

from benchmarks.measurement import Batches, Slice
from benchmarks.traces import Batch
from service.bundle import Manifest
from service.cpu import available_cpus
from service.engine import Engine
from service.packing import PackedBatch, pack

Graph = Literal["packed", "padded"]

_engines: dict[str, Engine] = {}


class PaddedEngine(Engine):
    """The padded graph of `benchmarks.padded`: every slot of (B, S) is computed, real or not."""

    def _feeds(self, batch: PackedBatch) -> dict[str, Any]:
        feeds = {
            "token_ids": batch.token_ids[batch.pad_index],
            "position_ids": np.broadcast_to(np.arange(batch.longest), batch.pad_index.shape),
            "lengths": batch.lengths,
        }
        return feeds | {"token_type_ids": batch.token_type_ids[batch.pad_index]} if self._has_token_types else feeds


def open_engines(packed: Path, padded: Path, manifest: Manifest) -> None:
    """Prepare this process: it is stopped by its parent, not by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name, path, kind in (("packed", packed, Engine), ("padded", padded, PaddedEngine)):
        _engines[name] = kind(path, num_runners=available_cpus(), has_token_types=manifest.type_vocab_size > 0)


def padded_difference(sequences: Batch) -> float:
    """How far the two graphs are apart on a batch: the same weights must give the same vectors."""
    batch = pack(sequences)
    packed = _engines["packed"].run(batch).sentence_embedding
    padded = _engines["padded"].run(batch).sentence_embedding
    return float(np.abs(packed - padded).max())


def measure(graph: Graph, batches: Sequence[Batch]) -> Slice:
    """Run all batches on one of this process's engines."""
    return run_batches(_engines[graph], batches)


def run_batches(engine: Engine, batches: Sequence[Batch]) -> Slice:
    """Run all batches, in order, on every CPU."""
    waiting: SimpleQueue[Batch] = SimpleQueue()
    for batch in batches:
        waiting.put(batch)
    threads = [threading.Thread(target=_run_all, args=(engine, waiting)) for _ in range(engine.num_runners)]
    cpu, started = time.process_time(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return Slice(
        num_sequences=sum(map(len, batches)),
        num_tokens=sum(map(num_tokens, batches)),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        load_cpu_seconds=0.0,
        batches=describe(batches),
    )


def describe(batches: Sequence[Batch]) -> Batches:
    """Means over batches that are about to run."""
    return Batches(fmean(map(fill, batches)), fmean(map(len, batches)), fmean(map(num_tokens, batches)))


def num_tokens(batch: Batch) -> int:
    """Real tokens in a batch."""
    return sum(sequence.num_tokens for sequence in batch)


def fill(batch: Batch) -> float:
    """Real tokens over the slots that padding computes."""
    return num_tokens(batch) / (len(batch) * max(sequence.num_tokens for sequence in batch))


def _run_all(engine: Engine, waiting: "SimpleQueue[Batch]") -> None:
    while True:
        try:
            batch = waiting.get_nowait()
        except Empty:
            return
        engine.run(pack(batch))
