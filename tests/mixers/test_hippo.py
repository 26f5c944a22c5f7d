"""HiPPO matrices and their discretisations against the integrals that define them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.interdomain.hippo import (
    BASES,
    DISCRETIZATIONS,
    Hippo,
    hippo_matrices,
    legendre,
    legt_transition,
    matrix_exponential,
)
from tests.contract.spec import precision
from tests.mixers import hippo_by_definition as definition
from tests.tolerances import rms_ratio

KINDS = [("legs", None), ("legt", 12.5)]
EVERY_KIND = pytest.mark.parametrize(("basis", "window"), KINDS, ids=BASES)
EVERY_DISCRETIZATION = pytest.mark.parametrize("discretization", DISCRETIZATIONS)


def transitions(hippo, counts, dtype=np.float64):
    """A [T, M, M] and b [T, M] of the given counts, in numpy."""
    with precision(dtype):
        return jax.device_get(jax.jit(jax.vmap(hippo.transition))(jnp.asarray(counts, dtype)))


def coefficients(hippo, signal):
    """Coefficients [T, M] after every sample of a signal [T]."""
    a, b = transitions(hippo, np.arange(1, len(signal) + 1))
    x, found = np.zeros(hippo.modes), []
    for t, f in enumerate(signal):
        x = a[t] @ x + b[t] * f
        found.append(x)
    return np.array(found)


def middles(tokens, unit):
    """The middle of every token's interval, for `unit` tokens in a unit of time."""
    return (np.arange(tokens) + 0.5) / unit


def smooth(s):
    return np.sin(3 * s) + np.exp(-s) * np.cos(7 * s)


def test_the_basis_is_orthonormal():
    y, weights = definition.NODES, definition.WEIGHTS
    phi = legendre(40, y)
    assert rms_ratio((phi * weights) @ phi.T, np.eye(40)) <= 1e-12
    assert rms_ratio(phi[7], definition.polynomial(7)(y)) <= 1e-12


@pytest.mark.parametrize("basis", BASES)
def test_matrices_are_the_integrals_that_define_them(basis):
    a, b = definition.generator(basis, 12)
    assert rms_ratio(hippo_matrices(basis, 12)[0], a) <= 1e-12
    assert rms_ratio(hippo_matrices(basis, 12)[1], b) <= 1e-12


def test_the_flows_lose_only_what_the_basis_cannot_hold():
    """The symmetric parts: a complete basis is an isometry."""
    a, b = hippo_matrices("legs", 9)
    assert rms_ratio(a + a.T - np.eye(9), np.outer(b, b)) <= 1e-14
    a, b = hippo_matrices("legt", 9)
    oldest = b * (-1.0) ** np.arange(9)
    assert rms_ratio(a + a.T, np.outer(b, b) + np.outer(oldest, oldest)) <= 1e-14


@EVERY_KIND
@EVERY_DISCRETIZATION
@pytest.mark.parametrize("modes", [1, 2, 7])
def test_impulses_leave_the_coefficients_of_the_definition(basis, window, discretization, modes):
    tokens = 15
    a, b = transitions(Hippo(basis, modes, window, discretization), np.arange(1, tokens + 1))
    w = np.zeros((modes, 0))
    for t, expected in enumerate(definition.impulses(tokens, modes, basis, window, discretization)):
        w = np.concatenate([a[t] @ w, b[t][:, None]], axis=1)
        assert rms_ratio(w, expected) <= 1e-12


@EVERY_KIND
@EVERY_DISCRETIZATION
def test_many_modes_and_tokens_in_float32(basis, window, discretization):
    hippo = Hippo(basis, 64, window, discretization)
    counts = [1, 2, 3, 17, 1000, 100_000]
    for actual, expected in zip(transitions(hippo, counts, np.float32), transitions(hippo, counts), strict=True):
        assert np.abs(actual - expected).max() <= 5e-6


@EVERY_DISCRETIZATION
def test_coefficients_of_a_history_are_those_of_the_function(discretization):
    """LegS: sqrt(T) times int_0^1 f(y) phi_m(y) dy; the error of T samples falls like 1 / T^2."""
    exact = legendre(6, definition.NODES) @ (definition.WEIGHTS * smooth(definition.NODES))
    errors = []
    for tokens in (100, 400):
        samples = smooth(middles(tokens, tokens))
        found = coefficients(Hippo("legs", 6, None, discretization), samples)[-1] / np.sqrt(tokens)
        errors.append(rms_ratio(found, exact))
    assert errors[1] <= 5e-5
    assert errors[1] <= errors[0] / 10


@EVERY_DISCRETIZATION
def test_coefficients_of_a_window_are_those_of_the_function_on_it(discretization):
    window, tokens = 400, 1000
    samples = smooth(middles(tokens, window))
    found = coefficients(Hippo("legt", 10, window, discretization), samples)[-1] / np.sqrt(window)
    newest = smooth(tokens / window - 1 + definition.NODES)
    assert rms_ratio(found, legendre(10, definition.NODES) @ (definition.WEIGHTS * newest)) <= 1e-4


@EVERY_DISCRETIZATION
@pytest.mark.parametrize("basis", BASES)
def test_the_reconstruction_of_a_smooth_function_converges_with_the_modes(basis, discretization):
    """Errors fall faster than any power of M, down to that of the samples."""
    window = 600
    tokens = window if basis == "legs" else 2 * window
    samples, y = smooth(middles(tokens, window)), middles(window, window)
    errors = []
    for modes in (2, 4, 6, 8, 12):
        hippo = Hippo(basis, modes, None if basis == "legs" else window, discretization)
        found = coefficients(hippo, samples)[-1] @ legendre(modes, y) / np.sqrt(window)
        errors.append(rms_ratio(found, samples[-window:]))
    assert np.all(np.diff(errors) < 0)
    assert errors[3] <= 2e-3
    assert errors[4] <= 1e-4


@pytest.mark.parametrize("size", [1e-8, 1.0, 300.0])
def test_the_matrix_exponential(size):
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    values = -size * rng.uniform(size=8)
    expected = vectors @ np.diag(np.exp(values)) @ vectors.T
    assert np.abs(matrix_exponential(vectors @ np.diag(values) @ vectors.T) - expected).max() <= 1e-13


def test_constants_are_cached_and_cannot_be_written():
    a, _ = legt_transition(4, 10.0, "bilinear")
    assert a is legt_transition(4, 10.0, "bilinear")[0]
    with pytest.raises(ValueError, match="read-only"):
        a[0, 0] = 1
