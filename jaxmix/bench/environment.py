"""What a measurement must name: device, cores, versions and date."""

import datetime
import importlib.metadata
import os
import platform
from collections import Counter
from pathlib import Path

import jax

import jaxmix

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint", "grain", "tokenizers")


def environment() -> dict[str, str]:
    """The machine and the software of this process."""
    return {
        "devices": ", ".join(devices()),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        **versions(),
        "date": datetime.date.today().isoformat(),
    }


def versions() -> dict[str, str]:
    """Versions of what a result depends on; packages that are not installed are left out."""
    return {"python": platform.python_version(), "jaxmix": jaxmix.__version__, **installed(*PACKAGES)}


def installed(*packages: str) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def devices() -> list[str]:
    """Kind and number of the devices that jax uses."""
    return [f"{count} x {kind}" for kind, count in Counter(device.device_kind for device in jax.devices()).items()]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
