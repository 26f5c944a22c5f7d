"""Feature maps: their kernels on average and in the limit, their gradients, their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.interdomain import (
    gaussian_frequencies,
    positive_softmax_features,
    random_fourier_features,
    silu_features,
    trigonometric_softmax_features,
)
from tests.contract.spec import precision

SIZE, POINTS = 6, 8
SCALE, LENGTH = 0.4, 1.3


def softmax_kernel(x, y):
    return np.exp(SCALE * x @ y.T)


def rbf_kernel(x, y):
    return np.exp(-((x[:, None] - y[None]) ** 2).sum(axis=-1) / (2 * LENGTH**2))


MAPS = {
    "fourier": (lambda x, w: random_fourier_features(x, w, length_scale=LENGTH), rbf_kernel),
    "trigonometric": (lambda x, w: trigonometric_softmax_features(x, w, scale=SCALE), softmax_kernel),
    "positive": (lambda x, w: positive_softmax_features(x, w, scale=SCALE), softmax_kernel),
}
EVERY_MAP = pytest.mark.parametrize(("features", "kernel"), MAPS.values(), ids=MAPS)


def points():
    """Vectors of length near one: positive features vary like exp(scale |x + y|^2)."""
    x, y = 0.5 * np.random.default_rng(0).normal(size=(2, POINTS, SIZE))
    return x, y


def estimates(features, count, repeats, *, orthogonal=False, seed=0):
    """Independent estimates of the kernel matrix of `points` in float64, [repeats, POINTS, POINTS]."""
    with precision():
        x, y = map(jnp.asarray, points())

        def estimate(key):
            frequencies = gaussian_frequencies(key, count, SIZE, orthogonal=orthogonal, dtype=jnp.float64)
            return features(x, frequencies) @ features(y, frequencies).T

        return np.asarray(jax.jit(jax.vmap(estimate))(jax.random.split(jax.random.key(seed), repeats)))


@EVERY_MAP
@pytest.mark.parametrize("orthogonal", [False, True], ids=["independent", "orthogonal"])
def test_estimates_are_unbiased(features, kernel, orthogonal):
    found = estimates(features, 16, 4000, orthogonal=orthogonal)
    error = found.mean(axis=0) - kernel(*points())
    deviation = found.std(axis=0) / np.sqrt(len(found))
    assert np.abs(error / deviation).max() < 4.5
    assert np.sqrt(np.mean((error / deviation) ** 2)) < 1.5


@EVERY_MAP
def test_the_error_falls_like_one_over_the_root_of_the_frequencies(features, kernel):
    few, many = (np.sqrt(np.mean((estimates(features, count, 200) - kernel(*points())) ** 2)) for count in (64, 1024))
    assert 3 < few / many < 5.5


@EVERY_MAP
def test_orthogonal_frequencies_vary_less(features, kernel):
    independent, orthogonal = (
        np.mean((estimates(features, SIZE, 4000, orthogonal=choice) - kernel(*points())) ** 2)
        for choice in (False, True)
    )
    assert orthogonal < 0.95 * independent


def test_orthogonal_frequencies_are_orthogonal_in_blocks_and_have_gaussian_lengths():
    w = gaussian_frequencies(jax.random.key(1), 2 * SIZE + 1, SIZE, orthogonal=True)
    assert w.shape == (2 * SIZE + 1, SIZE)
    for block in (w[:SIZE], w[SIZE : 2 * SIZE]):
        gram = np.asarray(block @ block.T)
        assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-4
    many = gaussian_frequencies(jax.random.key(2), 6000, SIZE, orthogonal=True)
    assert abs(np.mean(np.sum(np.square(many), axis=1)) / SIZE - 1) < 0.03
    assert np.abs(np.cov(many.T) - np.eye(SIZE)).max() < 0.06


def test_fourier_features_have_length_one():
    w = gaussian_frequencies(jax.random.key(0), 32, SIZE)
    x = jnp.asarray(points()[0], jnp.float32)
    assert np.allclose(jnp.linalg.norm(random_fourier_features(x, w), axis=-1), 1, atol=1e-6)


def test_positive_features_are_positive():
    w = gaussian_frequencies(jax.random.key(0), 32, SIZE)
    assert np.all(positive_softmax_features(jnp.asarray(points()[0], jnp.float32), w) > 0)


@EVERY_MAP
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_features_have_the_dtype_of_their_input_and_its_accuracy(features, kernel, dtype):
    del kernel
    with precision():
        w = gaussian_frequencies(jax.random.key(0), 32, SIZE, dtype=jnp.float32)
        x = jnp.asarray(points()[0], dtype)
        found, expected = features(x, w), np.asarray(features(x.astype(jnp.float64), w))
        assert found.dtype == x.dtype
        assert found.shape[:-1] == x.shape[:-1]
        error = np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max()
    assert error <= {"bfloat16": 4e-3, "float32": 3e-6, "float64": 0}[dtype]


def test_silu_features_have_length_one_in_any_dtype():
    x = np.random.default_rng(0).normal(size=(3, 5, 7))
    expected = x / (1 + np.exp(-x))
    expected = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
    for dtype, tolerance in (("bfloat16", 1e-2), ("float32", 1e-6), ("float64", 1e-14)):
        with precision():
            found = silu_features(jnp.asarray(x, dtype))
            assert found.dtype == dtype
            assert np.abs(np.asarray(found, np.float64) - expected).max() <= tolerance


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8, 1e-3, 30.0, 1e4])
def test_silu_features_and_their_gradients_are_finite_for_vectors_of_any_size(size):
    x = jnp.asarray(size * points()[0], jnp.float32)
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(silu_features(x))))(x)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))
    assert np.all(silu_features(jnp.zeros(4)) == 0)


def test_silu_gradients_are_finite_differences():
    with precision():
        x, direction = map(jnp.asarray, points())
        read = jnp.asarray(np.random.default_rng(3).normal(size=(POINTS, SIZE)))

        def loss(x):
            return jnp.sum(read * silu_features(x))

        numeric = (loss(x + 1e-6 * direction) - loss(x - 1e-6 * direction)) / 2e-6
        assert abs(numeric - jnp.sum(jax.grad(loss)(x) * direction)) <= 1e-8 * abs(numeric)


X = jnp.ones((2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random_fourier_features(X, jnp.ones((5, 4))), r"frequencies: expected shape \[F, D\] = \[\*, 3\]"),
        (lambda: positive_softmax_features(X, jnp.ones(3)), r"frequencies: expected shape .* got shape \[3\]"),
        (lambda: trigonometric_softmax_features(X, jnp.ones((5, 3)), scale=0), "scale: expected a positive number"),
        (lambda: positive_softmax_features(X, jnp.ones((5, 3)), scale=-1), "scale: expected a positive number, got -1"),
        (lambda: random_fourier_features(X, jnp.ones((5, 3)), length_scale=0), "length_scale: expected a positive"),
        (lambda: silu_features(X, eps=0), "eps: expected a positive number, got 0"),
        (lambda: silu_features(X.astype(jnp.int32)), r"x: expected vectors .* got int32 \[2, 3\]"),
        (lambda: gaussian_frequencies(jax.random.key(0), 0, 3), "count: expected an int of at least 1, got 0"),
        (lambda: gaussian_frequencies(jax.random.key(0), 3, 2.5), "size: expected an int of at least 1, got 2.5"),
        (lambda: gaussian_frequencies(jax.random.key(0), 3, 3, orthogonal=1), "orthogonal: expected True or False"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
