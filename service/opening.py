"""Which device a bundle runs on, in which of its precisions, and in how many runs at once; opened.

A precision is only taken on the device that it is made for. ONNX Runtime runs the others too, slower than fp32: it has
no fp16 products on a CPU and puts casts around each, and on CUDA int8's quantizers go to the host and back.
"""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from service.bundle import Bundle, Precision
from service.config import Device, PrecisionChoice, Settings
from service.cpu import available_cpus
from service.engine import Engine, RealDevice, has_cuda
from service.errors import StartupError
from service.layouts import Cost, Layout, Measured, candidates, choose
from service.memory import available_bytes, resident_bytes
from service.shapes import Shape
from service.side_by_side import time_shape

# The fastest first.
_MADE_FOR: dict[RealDevice, tuple[Precision, ...]] = {"cpu": ("int8", "fp32"), "cuda": ("fp16", "fp32")}
_NOT_MADE_FOR = {
    "cpu": "ONNX Runtime has no fp16 products for a CPU, and casts around each would make it slower than fp32",
    "cuda": "ONNX Runtime's int8 is for CPUs",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """An engine, what it runs, and the layouts that it was chosen from; none where there was no choice."""

    engine: Engine
    precision: Precision
    layouts: list[Measured]


def open_engine(bundle: Bundle, settings: Settings, stop_at: float) -> Opened:
    """Open the graph that fits device and settings; of several layouts the best, measured until `stop_at`.

    Raises `StartupError` where none does or none can be loaded, and `EngineError` where it cannot be run.
    """
    *others, last = _candidates(settings.device)
    for device in others:
        try:
            return _open(bundle, settings, device, stop_at)
        except StartupError as error:
            log.warning("device auto: %s cannot be used, taking %s: %s", device, last, error)
    opened = _open(bundle, settings, last, stop_at)
    if settings.device == "auto":
        log.warning("device auto: took %s", opened.engine.provider)
    return opened


def wanted_device(device: Device) -> RealDevice:
    """What the operator's choice comes to with the ONNX Runtime that is installed, whether or not it can be had."""
    return _candidates(device)[0]


def choose_precision(offered: Collection[Precision], wanted: PrecisionChoice, device: RealDevice) -> Precision:
    """What a bundle offers against what the operator wants. Raises `StartupError`."""
    usable = [precision for precision in _MADE_FOR[device] if precision in offered]
    listed = ", ".join(sorted(offered))
    if wanted == "auto":
        if not usable:
            raise StartupError(
                f"the bundle has {listed}, and none is for {device}: {_NOT_MADE_FOR[device]}; "
                "export it with --precision fp32"
            )
        return usable[0]
    if wanted not in offered:
        raise StartupError(f"--precision {wanted}: the bundle has {listed}; export it with --precision {wanted}")
    if wanted not in usable:
        raise StartupError(f"--precision {wanted}: not on device {device}: {_NOT_MADE_FOR[device]}")
    return wanted


def _candidates(device: Device) -> list[RealDevice]:
    if device != "auto":
        return [device]
    return ["cuda", "cpu"] if has_cuda() else ["cpu"]


def _open(bundle: Bundle, settings: Settings, device: RealDevice, stop_at: float) -> Opened:
    manifest = bundle.manifest
    try:
        precision = choose_precision(manifest.graphs.keys(), settings.precision, device)
    except StartupError as error:
        raise StartupError(f"{bundle.path}: {error}") from None
    machine = _Machine(bundle.graph_path(precision), device, manifest.type_vocab_size > 0, manifest.input_size)
    if device == "cuda":
        return Opened(machine.open(Layout(1, 1)), precision, [])
    for_busy, for_lone = candidates(settings.threads or available_cpus(), settings.runners)
    choice = choose(machine, for_busy, for_lone, stop_at, manifest.max_sequence_tokens)
    choice.busy.run_alone_on(choice.alone)
    return Opened(choice.busy, precision, choice.measured)


@dataclass(frozen=True, slots=True)
class _Machine:
    """This one, with one graph to be run on it."""

    graph: Path
    device: RealDevice
    has_token_types: bool
    input_size: int

    def open(self, layout: Layout) -> Engine:
        return Engine(
            self.graph,
            device=self.device,
            num_runners=layout.num_runners,
            num_threads=layout.num_threads,
            has_token_types=self.has_token_types,
        )

    def run(self, engine: Engine, shape: Shape, num_runners: int) -> Cost:
        before = time.process_time()
        timed = time_shape(engine.run, shape, num_runners, clock=time.perf_counter, input_size=self.input_size)
        return Cost(timed.seconds, (time.process_time() - before) / timed.num_runs)

    def clock(self) -> float:
        return time.monotonic()

    def resident_bytes(self) -> float:
        return resident_bytes()

    def available_bytes(self) -> float:
        return available_bytes()
