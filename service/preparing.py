"""From a bundle on disk to an engine that has been proved and measured: read, open, verify, calibrate."""

import time
from dataclasses import dataclass
from pathlib import Path

from service.bundle import Bundle, Precision, read_bundle
from service.calibration import Calibration, calibrate
from service.config import Settings
from service.cpu import available_cpus
from service.engine import Engine, differences, first_line
from service.errors import EngineError, StartupError
from service.layouts import Measured
from service.opening import open_engine
from service.packing import pack
from service.shapes import Shape
from service.side_by_side import time_shape

# For opening and measuring the layouts, and for the grid.
_LAYOUT_SECONDS = 2.0
_GRID_SECONDS = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What can be served: how far off its vectors are, what layouts there were to choose from, what its runs cost."""

    bundle: Bundle
    engine: Engine
    precision: Precision
    difference: float
    layouts: list[Measured]
    calibration: Calibration
    calibration_seconds: float


def prepare(path: Path, settings: Settings) -> Prepared:
    """Read, open, verify against the golden outputs and calibrate (which warms). Raises `StartupError`."""
    bundle = read_bundle(path)
    started = time.monotonic()
    try:
        opened = open_engine(bundle, settings, started + _LAYOUT_SECONDS)
        spent = time.monotonic() - started
        difference = verify(bundle, opened.engine, opened.precision)
        started = time.monotonic()
        # A slow opening leaves less for the grid, but not nothing.
        limit = _GRID_SECONDS - min(_GRID_SECONDS / 2, max(0.0, spent - _LAYOUT_SECONDS))
        calibration = _calibrate(bundle, opened.engine, started + limit)
    except EngineError as error:
        reason = first_line(error.__cause__)
        raise StartupError(f"{path}: the engine cannot run it ({reason}); export it again") from error
    spent += time.monotonic() - started
    return Prepared(bundle, opened.engine, opened.precision, difference, opened.layouts, calibration, spent)


def verify(bundle: Bundle, engine: Engine, precision: Precision) -> float:
    """Replay the golden inputs both ways that the engine runs; the largest difference from PyTorch's vectors."""
    golden, facts = bundle.golden, bundle.manifest.graphs[precision]
    batch = pack(golden.sequences)
    expected = golden.sentence_embedding, golden.token_embeddings
    narrow, wide = (differences(engine, batch, *expected, alone=alone) for alone in (False, True))
    pooled, tokens = max(narrow[0], wide[0]), max(narrow[1], wide[1])
    for what, difference, limit in (
        ("vectors", pooled, facts.pooled_tolerance),
        ("token vectors", tokens, facts.token_tolerance),
    ):
        if difference > limit:
            raise StartupError(
                f"{bundle.path}: on this machine its {precision} {what} differ from PyTorch's by {difference:.1e}, the "
                f"limit is {limit:.1e}; it is not served. Export it again here, or use another onnxruntime"
            )
    return pooled


def _calibrate(bundle: Bundle, engine: Engine, stop_at: float) -> Calibration:
    """In CPU time where each run is one thread's with a CPU: no machine is busier than while everything on it starts.

    What a run takes when its thread has to wait for a core is for the cost tracker to follow. A model that is too slow
    would have nothing to be corrected by: requests would be refused that could have shown it.
    """
    manifest = bundle.manifest
    has_cpus = engine.is_on_caller and engine.num_runners <= available_cpus()
    clock = time.thread_time if has_cpus else time.perf_counter

    def time_run(shape: Shape) -> float:
        return time_shape(engine.run, shape, engine.num_runners, clock=clock, input_size=manifest.input_size).seconds

    return calibrate(time_run, time.monotonic, manifest.max_sequence_tokens, stop_at)
