"""Collectives inside `jax.shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import fail


def axis_size(sequence_axis: str) -> int:
    """Number of devices along a mapped axis.

    Raises:
        ValueError: when no axis of this name is in scope.
    """
    try:
        return jax.lax.axis_size(sequence_axis)
    except NameError:
        fail("sequence_axis", "the name of a jax.shard_map axis in scope", repr(sequence_axis))


def gather_axis(tree: Any, axis_name: str) -> Any:
    """Every device's `tree`, stacked on a new first axis in device order and equal on all devices.

    It is written as a sum of one-hot slots, so that shard_map knows the result to be replicated; use it for
    summaries whose size does not depend on T.
    """
    count, here = axis_size(axis_name), jax.lax.axis_index(axis_name)

    def gather(x):
        mine = (jnp.arange(count) == here).reshape((count,) + (1,) * x.ndim)
        if x.dtype == jnp.bool_:
            return jax.lax.psum(jnp.where(mine, x, False).astype(jnp.int32), axis_name) > 0
        return jax.lax.psum(jnp.where(mine, x, jnp.zeros((), x.dtype)), axis_name)

    return jax.tree.map(gather, tree)


def is_checked(x: Any) -> bool:
    """Whether `x` is inside a `jax.shard_map` that keeps account of what differs over devices (check_vma=True)."""
    kind = jax.typeof(x)
    kind = getattr(kind, "manual_axis_type", kind)
    return bool(getattr(kind, "varying", None) or getattr(kind, "vma", None))


def vary_like(tree: Any, x: Any) -> Any:
    """The arrays of `tree`, taken to differ over the shard_map axes that `x` differs over.

    Their gradients are then summed over devices as they are, and not as the larger arrays that are made of them.
    """
    # The supported releases share no name for those axes; adding a zero made of `x` does it, and NaN in x is no matter.
    zero = 0 * jnp.isnan(jnp.ravel(x)[0])
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), tree)
