"""Rotary embedding, norms, decays and SwiGLU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmix.nn import DataDecay, HeadDecay, RMSNorm, SwiGLU, l2_normalize, rotate
from tests.tolerances import FORMS, assert_close

F32, F64 = (FORMS[np.dtype(dtype)] for dtype in (np.float32, np.float64))
RNG = np.random.default_rng(0)


def test_rotation_multiplies_complex_pairs_by_a_phase():
    x = RNG.normal(size=(2, 5, 3, 8))
    positions = RNG.integers(0, 100, size=(2, 5)).astype(np.int32)
    pairs = x[..., :4] + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * positions[:, :, None, None] * 500.0 ** (-np.arange(4) / 4))
    with jax.enable_x64(True):
        y = rotate(jnp.asarray(x), positions, 500.0)
    assert_close(y, np.concatenate([turned.real, turned.imag], axis=-1), F64)


def test_rotated_products_depend_on_the_difference_of_positions():
    with jax.enable_x64(True):
        q, k = jnp.asarray(RNG.normal(size=(2, 1, 5, 2, 8)))
        positions = jnp.arange(5, dtype=jnp.int32)[None]
        products = [
            jnp.einsum("bthd,bshd->bhts", rotate(q, positions + shift), rotate(k, positions + shift))
            for shift in (0, 1000)
        ]
    assert_close(products[1], products[0], F64)


def test_an_odd_head_cannot_be_rotated():
    with pytest.raises(ValueError, match="x: expected an even head size D for the rotary embedding, got D = 7"):
        rotate(jnp.zeros((1, 2, 1, 7)), jnp.zeros((1, 2), jnp.int32))


def test_rms_norm_is_its_formula_with_float32_statistics():
    x = jnp.asarray(300 * RNG.normal(size=(4, 512)), jnp.bfloat16)
    norm = RMSNorm(512, dtype=jnp.bfloat16)
    norm.scale[...] = jnp.asarray(RNG.normal(size=512), jnp.float32)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * np.asarray(norm.scale[...], np.float64)
    exact = RMSNorm(512)
    exact.scale[...] = norm.scale[...]
    assert_close(exact(x), expected, F32)
    assert norm(x).dtype == jnp.bfloat16
    assert_close(norm(x), exact(x).astype(jnp.bfloat16), F32)


def test_l2_normalisation_makes_unit_vectors_and_is_finite_at_zero():
    x = jnp.asarray(RNG.normal(size=(3, 7)), jnp.float32)
    assert_close(jnp.linalg.norm(l2_normalize(x), axis=-1), np.ones(3), F32)
    gradient = jax.grad(lambda x: jnp.sum(l2_normalize(x)))(jnp.zeros((2, 7)))
    assert np.all(np.isfinite(gradient))


def test_initial_time_scales_are_spread_evenly_in_the_logarithm():
    scales = -1 / HeadDecay(4, (2.0, 512.0))(jnp.zeros(()))
    assert_close(scales, 2.0 ** np.array([2, 4, 6, 8]), F32)
    assert_close(-1 / HeadDecay(1, (2.0, 512.0))(jnp.zeros(())), np.array([32.0]), F32)


def test_a_data_dependent_decay_starts_as_a_decay_per_head():
    x = jnp.asarray(RNG.normal(size=(2, 5, 16)), jnp.bfloat16)
    per_head = HeadDecay(4, (2.0, 512.0))(x)
    start = DataDecay(16, 4, (2.0, 512.0), rngs=nnx.Rngs(0), init_std=1e-6)(x)
    assert (start.shape, start.dtype) == ((2, 5, 4), jnp.float32)
    assert_close(start, np.broadcast_to(per_head, start.shape), F32)


def test_a_data_dependent_decay_never_amplifies_and_has_gradients():
    decay = DataDecay(16, 4, (2.0, 512.0), rngs=nnx.Rngs(0), init_std=10.0)
    x = jnp.asarray(RNG.normal(size=(2, 5, 16)), jnp.float32)
    assert np.all(decay(x) <= 0)
    gradients = jax.tree.leaves(nnx.grad(lambda decay: jnp.sum(decay(x)))(decay))
    assert len(gradients) == 3
    assert all(np.all(np.isfinite(x)) and np.any(x) for x in gradients)


def test_swiglu_is_its_formula():
    mlp = SwiGLU(6, 10, rngs=nnx.Rngs(0), init_std=1.0, out_init_std=0.5)
    x = RNG.normal(size=(3, 6))
    gate, up, down = (np.asarray(layer.kernel[...], np.float64) for layer in (mlp.gate, mlp.up, mlp.down))
    hidden = x @ gate
    assert_close(mlp(jnp.asarray(x, jnp.float32)), (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down, F32)


def test_initial_kernels_have_the_standard_deviations_asked_for():
    mlp = SwiGLU(64, 512, rngs=nnx.Rngs(0), init_std=0.02, out_init_std=0.004)
    assert np.std(mlp.gate.kernel[...]) == pytest.approx(0.02, rel=0.02)
    assert np.std(mlp.down.kernel[...]) == pytest.approx(0.004, rel=0.02)
