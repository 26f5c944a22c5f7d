"""What every mixer accepts: checked, brought to one layout and cleared at padding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.arrays import (
    GATE_DTYPES,
    INPUT_DTYPES,
    Array,
    Dtype,
    check_array,
    check_sizes,
    compute_dtype,
    fail,
    is_concrete,
)
from jaxmix.mixers.segments import Segments, check_segment_ids, find_segments, where_valid


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one call: batch, tokens, query heads, shared heads G, key size, value size."""

    batch: int
    length: int
    heads: int
    groups: int
    key_size: int
    value_size: int
    dtype: Dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs in the layout that the recurrences use, in the compute dtype.

    q [B, T, G, R, D], k [B, T, G, D], v [B, T, G, E], log_decay [B, T, G] or None. Where every query head has a state
    of its own, keys and values are repeated so that G = H and R = 1. Mixers of values only have q and k None; the delta
    rule has a pair for k, the keys and their write strengths [B, T, G, 1]. `fresh`: nothing came before the first
    token, so that the state before it is zeros.
    """

    q: Any
    k: Any
    v: Array
    log_decay: Array | None
    segments: Segments | None
    fresh: bool = dataclasses.field(metadata={"static": True})


def check_inputs(q: Any, k: Any, v: Any, log_decay: Any, segment_ids: Any) -> Sizes:
    """Check the arrays of one call against each other.

    Returns:
        The sizes; groups is the number of heads that keep a state of their own, H where decays are per query head.

    Raises:
        ValueError: for a wrong rank, size, dtype or head count, an empty sequence, or a log decay above zero (where
            its values are known).
    """
    check_array("q", q, "[B, T, H, D]", (None,) * 4, INPUT_DTYPES)
    check_sizes("q", q, "BTHD")
    batch, length, heads, key_size = q.shape
    check_array("k", k, "[B, T, G, D]", (batch, length, None, key_size), INPUT_DTYPES)
    groups = k.shape[2]
    if groups == 0 or heads % groups:
        fail("k", f"a head count that divides the {heads} heads of q", f"{groups} heads, shape {list(k.shape)}")
    check_array("v", v, "[B, T, G, E]", (batch, length, groups, None), INPUT_DTYPES)
    if v.shape[3] == 0:
        fail("v", "at least one element along E, axis 3", f"shape {list(v.shape)}")
    if segment_ids is not None:
        check_segment_ids(segment_ids, batch, length)
    if log_decay is not None:
        groups = _check_log_decay(log_decay, batch, length, heads, groups)
    dtype = compute_dtype(q, k, v, log_decay)
    return Sizes(batch, length, heads, groups, key_size, v.shape[3], dtype)


def check_spread_inputs(q: Any, k: Any, v: Any, gates: dict[str, Any], segment_ids: Any) -> Sizes:
    """Check the arrays of a mixer whose heads are as many as those of q, k or v, whichever has most.

    Args:
        q: queries [B, T, Hq, D].
        k: keys [B, T, Hk, D].
        v: values [B, T, Hv, E]; the head counts divide the largest of them, H.
        gates: by name, [B, T, H] or None; "log_decay" may be [H].
        segment_ids: int32 [B, T] or None.

    Raises:
        ValueError: for a wrong rank, size, dtype or head count, or an empty sequence.
    """
    for name, x, axes in (("q", q, "BTHD"), ("k", k, "BTHD"), ("v", v, "BTHE")):
        check_array(name, x, f"[{', '.join(axes)}]", (None,) * 4, INPUT_DTYPES)
        check_sizes(name, x, axes)
    batch, length, _, key_size = q.shape
    check_array("k", k, "[B, T, H, D]", (batch, length, None, key_size), INPUT_DTYPES)
    check_array("v", v, "[B, T, H, E]", (batch, length, None, None), INPUT_DTYPES)
    counts = {name: x.shape[2] for name, x in (("q", q), ("k", k), ("v", v))}
    most = max(counts, key=lambda name: counts[name])
    heads = counts[most]
    for name, count in counts.items():
        if heads % count:
            fail(name, f"a head count that divides the {heads} heads of {most}", f"{count} heads")
    if segment_ids is not None:
        check_segment_ids(segment_ids, batch, length)
    for name, gate in gates.items():
        if gate is not None:
            per_head = name == "log_decay" and getattr(gate, "ndim", None) == 1
            shape = (heads,) if per_head else (batch, length, heads)
            check_array(name, gate, "[H]" if per_head else "[B, T, H]", shape, GATE_DTYPES)
    return Sizes(batch, length, heads, heads, key_size, v.shape[3], compute_dtype(q, k, v, *gates.values()))


def _check_log_decay(log_decay: Any, batch: int, length: int, heads: int, groups: int) -> int:
    """Returns the number of heads that keep a state of their own: G, or H when decays are per query head."""
    per_head = getattr(log_decay, "ndim", None) == 1
    sizes = (None,) if per_head else (batch, length, None)
    check_array("log_decay", log_decay, "[B, T, H] or [H]", sizes, GATE_DTYPES)
    if log_decay.shape[-1] not in (heads, groups):
        expected = f"{heads} heads (those of q)" + (f" or {groups} (those of k and v)" if groups != heads else "")
        fail("log_decay", expected, f"{log_decay.shape[-1]}, shape {list(log_decay.shape)}")
    return log_decay.shape[-1]


def check_decay_sign(log_decay: Any, segment_ids: Any) -> None:
    """Raise ValueError if a known log decay is above zero or infinite anywhere but at padding."""
    if log_decay is None or not is_concrete(log_decay) or not is_concrete(segment_ids):
        return
    # In numpy: jax.numpy would trace these known values when the call is inside a jit.
    values = np.asarray(log_decay)
    wrong = (values > 0) | np.isneginf(values)
    if segment_ids is not None and values.ndim == 3:
        wrong &= (np.asarray(segment_ids) != 0)[..., None]
    if wrong.any():
        fail("log_decay", "finite values <= 0 (the log of a decay in (0, 1])", f"{values[wrong].flat[0]}")


def prepare_inputs(
    sizes: Sizes,
    q: Array | None,
    k: Array | None,
    v: Array,
    log_decay: Array | None,
    segment_ids: Array | None,
    axis: str | None,
    *,
    fresh: bool,
    for_kernel: bool = False,
) -> Inputs:
    """Cast to the compute dtype, clear padding and split heads.

    For a kernel, queries, keys and values keep their dtype, and keys and values their heads.
    """
    segments = None if segment_ids is None else find_segments(segment_ids, axis)
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay, (sizes.batch, sizes.length, sizes.groups)).astype(sizes.dtype)
        log_decay = where_valid(segments, log_decay)
    q, k, v = jax.tree.map(lambda x: where_valid(segments, jnp.asarray(x)), (q, k, v))
    if not for_kernel:
        k, v = jax.tree.map(lambda x: _spread(x.astype(sizes.dtype), sizes.groups), (k, v))
        q = None if q is None else q.astype(sizes.dtype)
    if q is not None:
        q = _spread(q, sizes.groups) if q.shape[2] < sizes.groups else q
        q = q.reshape(sizes.batch, sizes.length, sizes.groups, -1, sizes.key_size)
    return Inputs(q, k, v, log_decay, segments, fresh)


def _spread(x: Array, heads: int) -> Array:
    """x [B, T, H', ...] with every head repeated so that there are `heads`."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)
