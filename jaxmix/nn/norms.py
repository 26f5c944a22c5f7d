"""Normalisation over the last axis, with statistics in float32 or better."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Array, Dtype
from jaxmix.nn.parameters import partitioned


def l2_normalize(x: Array, eps: float = 1e-6) -> Array:
    """Unit vectors over the last axis, x / sqrt(sum(x^2) + eps), in the dtype of x.

    Args:
        x: [..., D].
        eps: added to the sum of squares; keeps zeros and their gradient finite.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def rms_normalize(x: Array, eps: float = 1e-6) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32 or better."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """y = scale * x / sqrt(mean(x^2) + eps) over the last axis, with a learned scale that starts at one.

    Args:
        size: size of the last axis.
        eps: added to the mean square.
        dtype: dtype of the output.
        param_dtype: dtype of the scale.
        axis: logical axis name of the scale, for sharding.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-6,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        axis: str | None = None,
    ):
        self.scale = nnx.Param(jnp.ones((size,), param_dtype), **partitioned(axis))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Array) -> Array:
        """Normalises x, [..., size]."""
        wide = rms_normalize(x.astype(jnp.promote_types(self.dtype, jnp.float32)), self.eps)
        return (wide * self.scale[...].astype(wide.dtype)).astype(self.dtype)
