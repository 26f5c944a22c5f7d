"""What a measurement must name: device, cores, versions and date."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import jax


def environment() -> dict[str, str]:
    """The machine and the software of this process."""
    device = jax.devices()[0]
    return {
        "device": f"{device.device_kind} x {jax.device_count()}",
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "jaxmix": importlib.metadata.version("jaxmix"),
        "date": datetime.date.today().isoformat(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
