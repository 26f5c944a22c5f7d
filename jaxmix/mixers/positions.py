"""Places of tokens in their own segments."""

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array
from jaxmix.mixers.segments import Segments


def count_resets(segments: Segments) -> Array:
    """The number of segment starts up to each token, int32 [B, T]; 0 in the segment that continues an earlier call."""
    return jnp.cumsum(segments.reset, axis=1, dtype=jnp.int32)


def find_places(segments: Segments, start: Array) -> Array:
    """The place of each real token in its segment, from 0, int32 [B, T]; what it is at padding has no meaning.

    Args:
        segments: real tokens and segment starts.
        start: tokens that the first segment had before this call, int32 [B].
    """
    count = jnp.cumsum(segments.valid, axis=1, dtype=jnp.int32) - 1
    first = jax.lax.cummax(jnp.where(segments.reset, count, 0), axis=1)
    return jnp.where(count_resets(segments) == 0, count + start[:, None], count - first)
