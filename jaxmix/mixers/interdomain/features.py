"""Feature maps xi with xi(x) . xi(y) equal to a kernel K(x, y), or to it on average over random frequencies.

Random features take their frequencies as an argument, so that queries, keys and calls share them:

    frequencies = gaussian_frequencies(jax.random.key(0), 256, head_size)
    q, k = (positive_softmax_features(x, frequencies, scale=head_size**-0.5) for x in (q, k))
"""

import jax
import jax.numpy as jnp

from jaxmix.arrays import (
    INPUT_DTYPES,
    Array,
    Dtype,
    check_count,
    check_flag,
    check_positive,
    compute_dtype,
    einsum,
    fail,
)


def gaussian_frequencies(
    key: Array, count: int, size: int, *, orthogonal: bool = False, dtype: Dtype = jnp.float32
) -> Array:
    """Frequencies w_f ~ N(0, I) for the random feature maps, [F, D].

    Args:
        key: a `jax.random.key`.
        count: number F of frequencies.
        size: number D of components of the vectors that will be mapped.
        orthogonal: make the frequencies of each block of D orthogonal. Each alone stays Gaussian, so that averages
            are the same, and their variance is smaller.
        dtype: float32 or float64.

    Raises:
        ValueError: when count or size is not a positive int, or orthogonal no bool.

    Source: Yu et al., "Orthogonal Random Features", arXiv 1610.09072.
    """
    check_count("count", count)
    check_count("size", size)
    check_flag("orthogonal", orthogonal)
    if not orthogonal:
        return jax.random.normal(key, (count, size), dtype)
    direction_key, length_key = jax.random.split(key)
    blocks = jax.random.normal(direction_key, (-(-count // size), size, size), dtype)
    q, r = jnp.linalg.qr(blocks)
    # The signs make the orthogonal matrices uniform, whatever signs the factorisation prefers.
    directions = (q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[:, None, :]).swapaxes(-1, -2)
    lengths = jnp.linalg.norm(jax.random.normal(length_key, (count, size), dtype), axis=-1, keepdims=True)
    return directions.reshape(-1, size)[:count] * lengths


def random_fourier_features(x: Array, frequencies: Array, *, length_scale: float = 1.0) -> Array:
    """[cos(w_f . x / s), sin(w_f . x / s)] / sqrt(F): on average the RBF kernel exp(-|x - y|^2 / (2 s^2)).

    The features of every vector have length one. The error of a kernel value falls like 1 / sqrt(F).

    Args:
        x: vectors [..., D], bfloat16, float32 or float64.
        frequencies: [F, D], as from `gaussian_frequencies`.
        length_scale: s > 0, in the units of x.

    Returns:
        features [..., 2 F] in x's dtype.

    Raises:
        ValueError: for a wrong dtype or size, or a length scale that is not positive.

    Source: Rahimi, Recht, "Random Features for Large-Scale Kernel Machines", NIPS 2007.
    """
    check_positive("length_scale", length_scale)
    return _waves(_prepare(x, frequencies, 1 / length_scale)[1]).astype(x.dtype)


def trigonometric_softmax_features(x: Array, frequencies: Array, *, scale: float = 1.0) -> Array:
    """exp(c |x|^2 / 2) times the Fourier features of sqrt(c) x: on average the softmax kernel exp(c x . y), c = scale.

    Estimates of small kernel values can be negative; `positive_softmax_features` are not, but vary more for large ones.

    Args:
        x: vectors [..., D], bfloat16, float32 or float64.
        frequencies: [F, D], as from `gaussian_frequencies`.
        scale: c > 0, such as D^(-1/2).

    Returns:
        features [..., 2 F] in x's dtype. They overflow where exp(c |x|^2 / 2) does.

    Raises:
        ValueError: for a wrong dtype or size, or a scale that is not positive.

    Source: Choromanski et al., "Rethinking Attention with Performers", arXiv 2009.14794, section 2.3.
    """
    check_positive("scale", scale)
    x_scaled, projected = _prepare(x, frequencies, scale**0.5)
    return (jnp.exp(_half_square(x_scaled)) * _waves(projected)).astype(x.dtype)


def positive_softmax_features(x: Array, frequencies: Array, *, scale: float = 1.0) -> Array:
    """exp(w_f . sqrt(c) x - c |x|^2 / 2) / sqrt(F): on average the softmax kernel exp(c x . y), c = scale.

    All features are positive, and so is every estimate.

    Args:
        x: vectors [..., D], bfloat16, float32 or float64.
        frequencies: [F, D], as from `gaussian_frequencies`.
        scale: c > 0, such as D^(-1/2).

    Returns:
        features [..., F] in x's dtype. The exponent is at most |w_f|^2 / 2.

    Raises:
        ValueError: for a wrong dtype or size, or a scale that is not positive.

    Source: Choromanski et al., "Rethinking Attention with Performers", arXiv 2009.14794, section 2.3.
    """
    check_positive("scale", scale)
    x_scaled, projected = _prepare(x, frequencies, scale**0.5)
    return (jnp.exp(projected - _half_square(x_scaled)) / len(frequencies) ** 0.5).astype(x.dtype)


def silu_features(x: Array, *, eps: float = 1e-6) -> Array:
    """SiLU(x) / max(|SiLU(x)|, eps) over the last axis, with the L2 norm; zero, with finite gradients, at x = 0.

    Args:
        x: vectors [..., D], bfloat16, float32 or float64.
        eps: smallest norm that is divided by, > 0.

    Returns:
        features [..., D] in x's dtype, of length one where |SiLU(x)| >= eps.

    Raises:
        ValueError: for a wrong dtype or an eps that is not positive.

    Source: Kiyohara et al., "Interdomain Attention", arXiv 2605.24330; the place of eps is our choice.
    """
    check_positive("eps", eps)
    _check_vectors(x)
    y = jax.nn.silu(x.astype(compute_dtype(x)))
    # The maximum is taken of squares: the square root has no finite gradient at zero.
    square = jnp.maximum(jnp.sum(y * y, axis=-1, keepdims=True), eps**2)
    return (y * jax.lax.rsqrt(square)).astype(x.dtype)


def _prepare(x: Array, frequencies: Array, factor: float) -> tuple[Array, Array]:
    """factor x [..., D] in the compute dtype and its products with the frequencies [..., F]."""
    _check_vectors(x)
    if frequencies.ndim != 2 or frequencies.shape[1] != x.shape[-1]:
        fail("frequencies", f"shape [F, D] = [*, {x.shape[-1]}]", f"shape {list(frequencies.shape)}")
    dtype = compute_dtype(x, frequencies)
    scaled = factor * x.astype(dtype)
    return scaled, einsum("...d,fd->...f", scaled, frequencies.astype(dtype))


def _check_vectors(x: Array) -> None:
    if x.ndim == 0 or str(x.dtype) not in INPUT_DTYPES:
        fail("x", f"vectors [..., D] of dtype {' or '.join(INPUT_DTYPES)}", f"{x.dtype} {list(x.shape)}")


def _waves(projected: Array) -> Array:
    return jnp.concatenate([jnp.cos(projected), jnp.sin(projected)], axis=-1) / projected.shape[-1] ** 0.5


def _half_square(x: Array) -> Array:
    return 0.5 * jnp.sum(x * x, axis=-1, keepdims=True)
