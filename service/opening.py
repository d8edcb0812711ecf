"""Which device a bundle runs on, and in which of its precisions; opened.

A precision is only taken on the device that it is made for. ONNX Runtime runs the others too, slower than fp32: it has
no fp16 products on a CPU and puts casts around each, and on CUDA int8's quantizers go to the host and back.
"""

import logging
from collections.abc import Collection

from service.bundle import Bundle, Precision
from service.config import Device, PrecisionChoice, Settings
from service.cpu import available_cpus
from service.engine import Engine, RealDevice, has_cuda
from service.errors import StartupError

# The fastest first.
_MADE_FOR: dict[RealDevice, tuple[Precision, ...]] = {"cpu": ("int8", "fp32"), "cuda": ("fp16", "fp32")}
_NOT_MADE_FOR = {
    "cpu": "ONNX Runtime has no fp16 products for a CPU, and casts around each would make it slower than fp32",
    "cuda": "ONNX Runtime's int8 is for CPUs",
}

log = logging.getLogger(__name__)


def open_engine(bundle: Bundle, settings: Settings) -> tuple[Engine, Precision]:
    """Open the graph that fits device and settings. Raises `StartupError` where none does or none can be loaded."""
    *others, last = _candidates(settings.device)
    for device in others:
        try:
            return _open(bundle, settings, device)
        except StartupError as error:
            log.warning("device auto: %s cannot be used, taking %s: %s", device, last, error)
    engine, precision = _open(bundle, settings, last)
    if settings.device == "auto":
        log.warning("device auto: took %s", engine.provider)
    return engine, precision


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


def _open(bundle: Bundle, settings: Settings, device: RealDevice) -> tuple[Engine, Precision]:
    manifest = bundle.manifest
    try:
        precision = choose_precision(manifest.graphs.keys(), settings.precision, device)
    except StartupError as error:
        raise StartupError(f"{bundle.path}: {error}") from None
    engine = Engine(
        bundle.graph_path(precision),
        device=device,
        num_cpus=settings.threads or available_cpus(),
        has_token_types=manifest.type_vocab_size > 0,
    )
    return engine, precision
