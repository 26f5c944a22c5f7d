"""Settings that every test shares: a CPU seen as eight fake devices, and assertion rewriting for the shared suite."""

import os

import pytest

FAKE_DEVICES = "--xla_force_host_platform_device_count=8"

# Both are read when JAX makes its backend, which happens after this file is loaded, in every pytest-xdist worker too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAKE_DEVICES}".strip()

pytest.register_assert_rewrite("tests.contract", "tests.tolerances")
