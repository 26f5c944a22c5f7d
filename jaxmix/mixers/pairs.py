"""Complex numbers as pairs of real arrays: accelerators' kernels and checkpoints have no complex type.

A pair array has an axis of size two in front of its last axis, [..., 2, M]: real parts, then imaginary parts. States
[..., 2, M, E] have it in front of their last two.
"""

import jax.numpy as jnp

from jaxmix.arrays import Array


def multiply(a: Array, b: Array, *, axis: int = -2) -> Array:
    """a b, both with their pair axis at `axis`.

    It is Re(a) b + i (Im(a) b): joining the two parts of a product would cost a CPU a branch for every element.
    Derivatives keep the halves of a and the whole of b, so that a should be the smaller one.
    """
    re, im = jnp.split(a, 2, axis=axis)
    signs = jnp.asarray([-1, 1], b.dtype).reshape(2, *(1,) * (-1 - axis))
    return re * b + signs * jnp.flip(im * b, axis)


def conjugate(a: Array) -> Array:
    """The complex conjugate of a [..., 2, M]."""
    return a * jnp.asarray([[1], [-1]], a.dtype)


def scale_rows(a: Array, x: Array) -> Array:
    """diag(a) x: a [..., 2, M] times the rows of x [..., 2, M, E]."""
    return multiply(a[..., None], x, axis=-3)


def real_matrix(c: Array) -> Array:
    """The real matrix [..., 2M, 2M] that multiplies flattened pairs as the complex matrix c [..., 2, M, M] does."""
    re, im = c[..., 0, :, :], c[..., 1, :, :]
    return jnp.concatenate([jnp.concatenate([re, -im], axis=-1), jnp.concatenate([im, re], axis=-1)], axis=-2)


def flatten(a: Array) -> Array:
    """[..., 2, M] to [..., 2M]."""
    return a.reshape(*a.shape[:-2], -1)


def flatten_rows(x: Array) -> Array:
    """[..., 2, M, E] to [..., 2M, E]."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def unflatten(a: Array) -> Array:
    """[..., 2M] to [..., 2, M]."""
    return a.reshape(*a.shape[:-1], 2, -1)
