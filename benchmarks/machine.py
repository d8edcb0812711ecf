"""What a figure means nothing without: the machine, and how much of it others took meanwhile."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil

from service.cpu import available_cpus

_PACKAGES = ("onnxruntime", "grpcio", "numpy")


def describe() -> str:
    """Processor, CPUs, load and versions, in one line."""
    packages = ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
    load = f"load average {os.getloadavg()[0]:.2f}"
    return f"{_processor()}, {available_cpus()} CPUs, {load}; Python {platform.python_version()}, {packages}"


def foreign_cpu_seconds() -> float:
    """CPU seconds so far of all but this process and its children; what a hypervisor took is in it."""
    times = psutil.cpu_times()
    own = psutil.Process()
    families = (process.cpu_times() for process in (own, *own.children(recursive=True)))
    return float(sum(times) - times.idle - times.iowait - sum(family.user + family.system for family in families))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
