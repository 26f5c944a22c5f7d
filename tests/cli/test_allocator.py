import platform
import subprocess
import sys

import pytest

from jaxmix.cli.allocator import keep_freed_memory

RESIDENT_AFTER_FREEING = """
import numpy as np
from jaxmix.cli.allocator import keep_freed_memory

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

print(keep_freed_memory())
array = np.ones(25_000_000)
held = resident()
del array
print(resident() / held)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc and /proc are of Linux")
def test_freed_memory_stays_with_the_process(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    run = subprocess.run([sys.executable, "-c", RESIDENT_AFTER_FREEING], capture_output=True, text=True, check=True)
    done, kept = run.stdout.split()
    assert done == str(platform.libc_ver()[0] == "glibc")
    assert done == "False" or float(kept) > 0.9


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX"])
def test_settings_of_the_user_stay(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert keep_freed_memory() is False
