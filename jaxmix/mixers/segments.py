"""Packed documents: which tokens are real, and where a new document starts.

Id 0 is padding and is skipped: it changes no state, and an id that resumes after padding continues its segment.
An id that differs from the last non-padding id starts a new segment, also when the id was used before.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, check_array, expand_to
from jaxmix.parallel.collectives import gather_axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Where tokens are real and where the recurrence starts anew, both bool [B, T]."""

    valid: Array
    reset: Array


def find_segments(segment_ids: Array, sequence_axis: str | None = None) -> Segments:
    """Real tokens and starts of new segments of `segment_ids` (int32 [B, T]).

    With `sequence_axis`, [B, T] is this device's piece of the sequence and the last ids of earlier devices count.
    """
    valid = segment_ids != 0
    newest = jax.lax.cummax(jnp.where(valid, jnp.arange(segment_ids.shape[1]), 0), axis=1)
    last = jnp.take_along_axis(segment_ids, newest, axis=1)
    incoming = jnp.zeros_like(segment_ids[:, :1])
    if sequence_axis is not None:
        ids = gather_axis(last[:, -1], sequence_axis)
        devices = jnp.arange(ids.shape[0])[:, None]
        known = (ids != 0) & (devices < jax.lax.axis_index(sequence_axis))
        nearest = jnp.max(jnp.where(known, devices, 0), axis=0)
        incoming = jnp.where(known, ids, 0)[nearest, jnp.arange(ids.shape[1])][:, None]
    earlier = jnp.concatenate([incoming, last[:, :-1]], axis=1)
    previous = jnp.where(earlier != 0, earlier, incoming)
    return Segments(valid, valid & (previous != 0) & (previous != segment_ids))


def check_segment_ids(segment_ids: Array, batch: int, length: int) -> None:
    """Raise ValueError unless `segment_ids` is int32 [B, T]."""
    check_array("segment_ids", segment_ids, "[B, T]", (batch, length), ("int32",))


def where_valid(segments: Segments | None, x: Array) -> Array:
    """`x` ([B, T, ...]) with zeros at padding, so that nothing there, NaN included, reaches a state or gradient."""
    if segments is None:
        return x
    return jnp.where(expand_to(segments.valid, x.ndim), x, jnp.zeros((), x.dtype))
