"""One table of tolerances, with reasons. Errors are RMS ratios: ||actual - expected|| / ||expected|| per array."""

import jax
import jax.numpy as jnp
import numpy as np

BRUTE_FORCE = 1e-12
"""float64 serial recurrence against explicit sums: a few hundred additions of rounding 1e-16, in another order."""

FINITE_DIFFERENCE = 1e-6
"""float64 central differences with step 1e-5: truncation and rounding are near 1e-10, values far above gradients."""

FORMS: dict[np.dtype, float] = {
    # Same sums in another order; decay factors come from sums of up to 64 logarithms of size 80.
    np.dtype(np.float64): 1e-10,
    # 64-bit reference. Rounding 6e-8, a few hundred additions, sixth-degree products.
    np.dtype(np.float32): 2e-5,
    # 64-bit reference at the same rounded inputs, so only the output (and gradient) is rounded, at 4e-3 relative.
    np.dtype(jnp.bfloat16): 2e-2,
}
"""Any form against the float64 serial recurrence, by the dtype of the inputs."""

HALVES = 1e-5
"""float32 operands as sums of two bfloat16 numbers, against float64: every one is off by 2.4e-6 (RMS), and a linear
attention rounds four or five times so. Gradients of log decays are differences, and get `FORMS`."""

MODAL_FLOAT32 = 3e-5
"""float32 recurrences of complex modes against float64: slow modes keep the rounding of some thousand rotations."""

STORED_MODELS = 1e-5
"""float32 layers and small models against float64 runs of other code: a float32 run of that code differs by 2e-6."""

STORED_FLOAT32 = 1e-7
"""float64 against values that were stored in float32: a rounding of 6e-8 at most, half of that in RMS."""

STRONG_DECAY_FLOOR = 1e-2
"""Smallest RMS that errors under strong decay are relative to. What decays to nothing (G = S C - F, the gradient of
log_decay) is then the difference of numbers of size one and keeps their rounding: 2e-7 in float32, 1e-12 in float64."""

ROUTER_GRADIENT = 1e-9
"""float64 gradient of a router's choice against autodiff of the soft mask: sums over all later tokens."""


def rms_ratio(actual, expected, floor: float = 0.0) -> float:
    """Returns ||actual - expected|| / ||expected||; 0 when both are zero, infinite when only `expected` is.

    A `floor` is the smallest RMS of `expected` that the error is compared with.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if expected.size and np.sqrt(np.mean(expected**2)) < floor:
        return float(np.sqrt(np.mean((actual - expected) ** 2)) / floor)
    size = np.max(np.abs(expected), initial=0.0)
    if size == 0:
        return np.inf if np.any(actual) else 0.0
    # Dividing first keeps the squares inside the range of float64.
    return float(np.linalg.norm((actual - expected) / size) / np.linalg.norm(expected / size))


def assert_close(actual, expected, tolerance: float, label: str = "", *, floor: float = 0.0) -> None:
    """Asserts, leaf by leaf of two equal pytrees, that every value is finite and the RMS ratio within tolerance."""
    leaves, structure = jax.tree.flatten_with_path(actual)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure, f"{label}: {structure}, expected {expected_structure}"
    for (path, leaf), wanted in zip(leaves, expected_leaves, strict=True):
        name = f"{label}{jax.tree_util.keystr(path)}"
        assert np.all(np.isfinite(np.asarray(leaf, np.float64))), f"{name} is not finite"
        error = rms_ratio(leaf, wanted, floor)
        assert error <= tolerance, f"{name}: RMS ratio {error:.2e}, tolerance {tolerance:.0e}"


def assert_same_bits(actual, expected, label: str = "") -> None:
    """Asserts, leaf by leaf of two equal pytrees, that every number is the same."""
    leaves, structure = jax.tree.flatten_with_path(actual)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure, f"{label}: {structure}, expected {expected_structure}"
    for (path, leaf), wanted in zip(leaves, expected_leaves, strict=True):
        leaf, wanted = np.asarray(leaf), np.asarray(wanted)
        name = f"{label}{jax.tree_util.keystr(path)}"
        assert leaf.dtype == wanted.dtype, f"{name}: dtype {leaf.dtype}, expected {wanted.dtype}"
        assert np.array_equal(leaf, wanted), f"{name} moved by {np.max(np.abs(leaf - wanted))}"
