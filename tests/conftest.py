"""Settings that every test shares: a CPU seen as eight fake devices, and assertion rewriting for the shared suite."""

import gc
import os

import pytest

# Most of the suite's time is compilation of tiny programs; without LLVM's optimisations it takes a third. Every worker
# has one core, so that threads within one compilation and a schedule for many cores cost without paying.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
)

# Both are read when JAX makes its backend, which happens after this file is loaded, in every pytest-xdist worker too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [given, *(flag for flag in XLA_FLAGS if flag.partition("=")[0] not in given)]
).strip()

# Tracing makes and drops many small objects, and looking for cycles after every 700 of them takes time.
gc.set_threshold(100_000, 20, 100)

pytest.register_assert_rewrite("tests.contract", "tests.tolerances")


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Frees what a file compiled: with thousands of programs a process runs out of memory mappings and crashes."""
    yield
    import jax

    jax.clear_caches()
