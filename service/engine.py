"""The only file that knows ONNX Runtime: opens the packed graph on a device and runs packed batches on it.

A session has its threads, and one session serves as many runs at once as there are callers, with one set of weights.
Where a run that has the machine to itself is best made with other threads than runs side by side, `run(alone=True)`
goes to a second session: `layouts.py` finds out.

A session that was asked for CUDA can fall back to the CPU without a word, while `get_available_providers()` still
lists CUDA. What counts is `session.get_providers()`, and that is what is compared.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from service.cancellation import Cancellation
from service.errors import EngineError, OutOfMemoryError, StartupError, StoppedError
from service.packing import PackedBatch
from service.request import Float32Array

RealDevice = Literal["cpu", "cuda"]

POOLED, TOKENS = "sentence_embedding", "token_embeddings"

_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_OFF_ON_CPU = [
    # Slower than the Add and LayerNormalization that it replaces: whole runs take 8 to 14% longer with it (MiniLM-L6,
    # 20 to 500 tokens, one thread, ONNX Runtime 1.32, side by side).
    "SkipLayerNormFusion",
    # With an fp16 graph it ends the process (DeBERTa, ONNX Runtime 1.32); the exporter judges fp16 on a CPU.
    "MatmulTransposeFusion",
]
_CUDA_OPTIONS = {
    # With ragged shapes the default doubles the arena at each new high-water mark.
    "arena_extend_strategy": "kSameAsRequested",
    # On by default: fp32 products with 10 bits of mantissa, which the golden outputs would not pass.
    "use_tf32": "0",
}
# What ONNX Runtime's allocators say; it has no error class of its own for it.
_OUT_OF_MEMORY_TEXTS = (
    "failed to allocate memory",
    "out of memory",
    "bad_alloc",
    "bfcarena::allocaterawinternal",
)

log = logging.getLogger(__name__)
ort.disable_telemetry_events()


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """sentence_embedding (B, output_size) and, where asked for, token_embeddings (T, E)."""

    sentence_embedding: Float32Array
    token_embeddings: Float32Array | None


class Engine:
    """One loaded graph. `run` may be called from `num_runners` threads at once.

    `is_on_caller` where all work of a run is done by the thread that calls.
    """

    def __init__(
        self,
        graph: Path,
        *,
        device: RealDevice = "cpu",
        num_runners: int = 1,
        num_threads: int = 1,
        has_token_types: bool = True,
    ) -> None:
        """Open the graph. Raises `StartupError` when it cannot be loaded, or when `cuda` cannot really run on CUDA."""
        self._has_token_types = has_token_types
        self._session = self._wide_session = _open(graph, device, num_threads)
        self.provider: str = self._session.get_providers()[0]
        self.is_on_caller = self.provider == _CPU and num_threads == 1
        self.num_runners = num_runners
        self.num_threads = self.num_threads_alone = num_threads

    def run_alone_on(self, other: "Engine") -> None:
        """Take another engine's session, of the same graph, for the runs that have the machine to themselves."""
        self._wide_session = other._session
        self.num_threads_alone = other.num_threads

    def run(
        self,
        batch: PackedBatch,
        *,
        wants_tokens: bool = False,
        alone: bool = False,
        cancellation: Cancellation | None = None,
    ) -> Outputs:
        """Run one batch. Raises `OutOfMemoryError` or `EngineError`; the cause is chained, for the log.

        Raises `StoppedError` where `cancellation` was set; a run ends between two operators of the graph.
        """
        session = self._wide_session if alone else self._session
        options = ort.RunOptions()
        if cancellation is not None:
            cancellation.attach(lambda: setattr(options, "terminate", True))
        try:
            found = session.run([POOLED, TOKENS] if wants_tokens else [POOLED], self._feeds(batch), options)
        except Exception as error:  # ONNX Runtime raises RuntimeError and several classes of its own
            if cancellation is not None and cancellation.is_set:
                raise StoppedError("the run was stopped") from error
            is_memory = any(text in str(error).lower() for text in _OUT_OF_MEMORY_TEXTS)
            raise (OutOfMemoryError if is_memory else EngineError)("the engine failed on this request") from error
        return Outputs(found[0], found[1] if wants_tokens else None)

    def _feeds(self, batch: PackedBatch) -> dict[str, Any]:
        feeds = {
            **({"token_ids": batch.token_ids} if batch.embeddings is None else {"embeddings": batch.embeddings}),
            "position_ids": batch.position_ids,
            "pad_index": batch.pad_index,
            "unpad_index": batch.unpad_index,
            "lengths": batch.lengths,
        }
        return feeds | {"token_type_ids": batch.token_type_ids} if self._has_token_types else feeds


def has_cuda() -> bool:
    """Whether this onnxruntime was built with CUDA; if it really runs on this machine, only opening a graph shows."""
    return _CUDA in ort.get_available_providers()


def write_optimized(graph: Path, destination: Path) -> None:
    """Write the graph that the CPU's session makes of `graph` and runs; what is counted in it is what is served."""
    _open(graph, "cpu", num_threads=1, optimized=destination)


def differences(
    engine: Engine, batch: PackedBatch, pooled: Float32Array, tokens: Float32Array, *, alone: bool = False
) -> tuple[float, float]:
    """The largest absolute differences between the engine's outputs and the expected ones: (pooled, tokens).

    Infinite if there is a number that is not finite, or another shape: numpy would broadcast it, and it could pass.
    """
    outputs = engine.run(batch, wants_tokens=True, alone=alone)
    assert outputs.token_embeddings is not None
    return _difference(outputs.sentence_embedding, pooled), _difference(outputs.token_embeddings, tokens)


def _difference(found: Float32Array, expected: Float32Array) -> float:
    if found.shape != expected.shape:
        return float("inf")
    difference = float(np.abs(found - expected).max())
    return difference if np.isfinite(difference) else float("inf")


def _open(graph: Path, device: RealDevice, num_threads: int, optimized: Path | None = None) -> ort.InferenceSession:
    providers: list[Any] = [_CPU]
    if device == "cuda":
        _require_cuda_wheel()
        providers = [(_CUDA, _CUDA_OPTIONS), _CPU]
    try:
        session = ort.InferenceSession(
            str(graph),
            _session_options(num_threads, optimized),
            providers=providers,
            disabled_optimizers=[] if device == "cuda" else _OFF_ON_CPU,
        )
    except Exception as error:
        raise StartupError(f"{graph}: ONNX Runtime {ort.__version__} cannot load it: {first_line(error)}") from error
    if device == "cuda" and session.get_providers()[0] != _CUDA:
        raise StartupError(
            "device cuda: ONNX Runtime fell back to the CPU; the driver or the CUDA, cuBLAS or cuDNN libraries are "
            "missing. Install mhsa-serve[gpu], check nvidia-smi, or give --device cpu"
        )
    return session


def _require_cuda_wheel() -> None:
    if not has_cuda():
        raise StartupError(
            f"device cuda: this onnxruntime {ort.__version__} has no CUDA in it; "
            "install mhsa-serve[gpu] without [cpu], or give --device cpu"
        )
    ort.preload_dlls()


def _session_options(num_threads: int, optimized: Path | None) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    # Memory patterns are per shape; ragged batches never repeat one.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        # Beside it: inside it, weights of 2 GiB and more would not fit.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
    return options


def first_line(error: BaseException | None) -> str:
    """An error's text, or its class, for a message of one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
