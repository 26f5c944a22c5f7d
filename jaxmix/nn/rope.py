"""Rotary position embedding."""

import jax.numpy as jnp

from jaxmix.arrays import Array, fail


def rotate(x: Array, positions: Array, base: float = 10000.0) -> Array:
    r"""Rotary position embedding, half-split form.

    With D = 2h, coordinates i and i + h are rotated by the angle theta = position * base^(-i/h):

        y_i = x_i cos theta - x_{i+h} sin theta ,  y_{i+h} = x_{i+h} cos theta + x_i sin theta

    so that q_t.k_s depends on the positions only through their difference.

    Args:
        x: queries or keys [B, T, H, D], D even. Angles are float32 (float64 for float64 x).
        positions: int32 [B, T].
        base: largest wavelength over 2 pi.

    Returns:
        [B, T, H, D] in the dtype of x.

    Raises:
        ValueError: when D is odd.

    Source: Su et al., "RoFormer", arXiv 2104.09864, section 3.4.
    """
    half, odd = divmod(x.shape[-1], 2)
    if odd:
        fail("x", "an even head size D for the rotary embedding", f"D = {x.shape[-1]}")
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequency = base ** (-jnp.arange(half, dtype=dtype) / half)
    angle = positions[:, :, None, None].astype(dtype) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
