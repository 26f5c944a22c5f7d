"""Decayed linear attention with its gradients, by one primitive that walks over chunks in either direction.

With c(s, t) the decay from token s to t of one segment and X_0 the initial state,

    o_t = sum_{s<=t} c(s, t) (q_t . k_s) v_s + c(0, t) X_0^T q_t,      X_T = c(0, T) X_0 + sum_s c(s, T) k_s v_s^T

and each gradient is another decayed attention, forward or reversed in time, of do and dX (that of X_T):

    dq = attention(do, v, k; X_0^T),   dk = reversed(v, do, q; dX^T),   dv = reversed(k, q, do; dX), which ends in dX_0

The log decay g_r is in every pair s < r <= t, so within a segment

    dg_r = sum_{t>=r} (q_t . dq_t - k_t . dk_t) + <dX, X_T>

where pairs on the same side of r cancel, and the last term belongs to the last segment.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix_kernels.decays import CHUNK, ChunkDecays, Result
from jaxmix_kernels.linear_attention.partition import spread
from jaxmix_kernels.linear_attention.pieces import (
    choose_pieces,
    join_pieces,
    last_piece,
    pad_chunks,
    pad_sizes,
    split_decays,
    split_tokens,
    starts_of_pieces,
)
from jaxmix_kernels.linear_attention.steps import steps_gradient
from jaxmix_kernels.target import Target

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is fixed when a call is traced: the target, numbers of pieces in time, whether outputs are wanted."""

    target: Target
    pieces: int
    backward_pieces: int
    outputs: bool


def linear_attention(
    q: Array, k: Array, v: Array, decays: ChunkDecays | None, initial: Array | None, *, target: Target
) -> tuple[Array, Array]:
    """Causal linear attention with decay, differentiable in q, k, v, `initial` and `decays.steps`.

    Other arrays of `decays` are constants: what depends on the log decays of the tokens gets its gradient through
    `steps`.

    Args:
        q: queries [B, T, H, D], bfloat16 or float32; all of one dtype.
        k: keys [B, T, Hk, D]. Head h reads head h // (H / Hk), and so on for all head counts, which divide H.
        v: values [B, T, Hv, E].
        decays: decays of ceil(T / 64) chunks of 64 tokens; tokens behind T decay nothing. None for no decay and no
            segments.
        initial: the state before the first token [B, Hs, D, E], float32; None for zeros.
        target: what the kernels are made for.

    Returns:
        out [B, T, H, E] in the dtype of v, and the final state [B, Hf, D, E], float32, Hf the largest of Hk, Hv, Hs and
        the head count of the decays.

    Raises:
        NotImplementedError: for a dtype or for sizes that the kernels of the target do not take.
    """
    out, final = _call(q, k, v, decays, initial, target)
    assert out is not None
    return out, final


def final_state(k: Array, v: Array, decays: ChunkDecays | None, initial: Array | None, *, target: Target) -> Array:
    """The final state of `linear_attention` alone."""
    return _call(None, k, v, decays, initial, target)[1]


def recalled(
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    initial: Array | None,
    final: Array,
    *,
    target: Target,
) -> tuple[Array, Array]:
    """What `linear_attention` gives, for its gradients alone: outputs are zeros, `final` is known; no kernel runs."""
    out, final = _call(q, k, v, decays, initial, target, final)
    assert out is not None
    return out, final


def _call(
    q: Array | None,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    initial: Array | None,
    target: Target,
    known: Array | None = None,
) -> tuple[Array | None, Array]:
    length, key_size, value_size = k.shape[1], k.shape[3], v.shape[3]
    refusal = target.refusal(v.dtype, key_size, value_size)
    if refusal is not None:
        raise NotImplementedError(f"linear_attention: {refusal}")
    if initial is None:
        initial = jnp.zeros((k.shape[0], 1, key_size, value_size), _state_dtype(v))
    heads = _state_heads(k, v, decays, initial) if q is None else q.shape[2]
    sums = decays is not None and decays.steps is not None
    pieces = choose_pieces(k.shape[0] * heads, length, target.programs, sums=sums)
    q, k, v = jax.tree.map(lambda x: pad_sizes(x, (3,), max(pieces) * CHUNK), (q, k, v))
    steps = None
    if decays is not None:
        decays = pad_chunks(decays, max(pieces))
        steps, decays = decays.steps, jax.lax.stop_gradient(dataclasses.replace(decays, steps=None))
    plan = _Plan(target, *pieces, q is not None)
    arrays = q, k, v, decays, steps, pad_sizes(initial, (2, 3))
    out, final = _attend(plan, *arrays) if known is None else _recall(plan, *arrays, pad_sizes(known, (2, 3)))
    return None if out is None else out[:, :length, :, :value_size], final[:, :, :key_size, :value_size]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: _Plan, q: Array | None, k: Array, v: Array, decays: ChunkDecays | None, steps: Array | None, initial: Array
) -> tuple[Array | None, Array]:
    """On whole pieces of chunks and sizes that the kernels have; `steps` are those that `decays` comes from."""
    return _forward(plan, q, k, v, decays, steps, initial)[0]


def _forward(
    plan: _Plan, q: Array | None, k: Array, v: Array, decays: ChunkDecays | None, steps: Array | None, initial: Array
) -> tuple[Any, Any]:
    heads = _state_heads(k, v, decays, initial) if q is None else q.shape[2]
    qs, ks, vs = jax.tree.map(lambda x: split_tokens(x, plan.pieces), (q, k, v))
    cut = split_decays(decays, plan.pieces)
    if q is None:
        ks = _repeat(ks, heads)
    starts = _starts(plan.target, ks, vs, decays, initial, heads, plan.pieces)
    result = _run(plan.target, qs, ks, vs, cut, starts, outputs=plan.outputs)
    final = last_piece(result.final, plan.pieces)[:, :: heads // _state_heads(k, v, decays, initial)]
    out = None if result.out is None else join_pieces(result.out, plan.pieces)
    return (out, final), (q, k, v, decays, steps, initial, starts, final)


def _backward(plan: _Plan, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, decays, steps, initial, starts, final = residuals
    d_out, d_final = cotangents
    if q is None:
        shape = (*k.shape[:2], final.shape[1])
        q, d_out = jnp.zeros((*shape, k.shape[3]), k.dtype), jnp.zeros((*shape, v.shape[3]), v.dtype)
    heads = q.shape[2]
    pieces = plan.backward_pieces
    qs, ks, vs, ds = (split_tokens(x, pieces) for x in (q, k, v, d_out.astype(v.dtype)))
    cut = split_decays(decays, pieces)
    if pieces != plan.pieces:
        starts = _starts(plan.target, ks, vs, decays, initial, heads, pieces)
    # Heads that share a final state share its gradient, so that their sum is whole.
    ends = d_final.astype(final.dtype) / (heads // final.shape[1])
    if pieces > 1:
        added = _run(plan.target, None, qs, ds, cut, None, reverse=True, outputs=False).final
        ends = starts_of_pieces(decays, added, ends, pieces, reverse=True)
    q_weights, k_weights = (None, None) if steps is None else (qs, ks)
    by_query = _run(plan.target, ds, vs, ks, cut, starts.mT, weights=q_weights)
    by_key = _run(plan.target, vs, ds, qs, cut, ends.mT, weights=k_weights, reverse=True)
    by_value = _run(plan.target, ks, qs, ds, cut, ends, reverse=True)
    assert by_query.out is not None
    assert by_key.out is not None
    assert by_value.out is not None
    d_steps = None
    if steps is not None:
        assert decays is not None
        assert by_query.dots is not None
        assert by_key.dots is not None
        d_steps = steps_gradient(decays, steps, pieces, by_query.dots, by_key.dots, starts, ends, final)
    return (
        join_pieces(by_query.out, pieces) if plan.outputs else None,
        _sum_heads(join_pieces(by_key.out, pieces), 2, k.shape[2]),
        _sum_heads(join_pieces(by_value.out, pieces), 2, v.shape[2]),
        None,
        d_steps,
        _sum_heads(last_piece(by_value.final, pieces, reverse=True), 1, initial.shape[1]),
    )


_attend.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recall(
    plan: _Plan,
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    steps: Array | None,
    initial: Array,
    final: Array,
) -> tuple[Array, Array]:
    """Zeros and `final`, with the gradients of `_attend`."""
    return _recall_forward(plan, q, k, v, decays, steps, initial, final)[0]


def _recall_forward(
    plan: _Plan,
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    steps: Array | None,
    initial: Array,
    final: Array,
) -> tuple[Any, Any]:
    ks, vs = split_tokens(k, plan.pieces), split_tokens(v, plan.pieces)
    starts = _starts(plan.target, ks, vs, decays, initial, q.shape[2], plan.pieces)
    out = jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype)
    return (out, final), (q, k, v, decays, steps, initial, starts, final)


def _recall_backward(plan: _Plan, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    return *_backward(plan, residuals, cotangents), None


_recall.defvjp(_recall_forward, _recall_backward)


def _run(
    target: Target,
    a: Array | None,
    b: Array,
    c: Array,
    decays: ChunkDecays | None,
    initial: Array | None,
    *,
    weights: Array | None = None,
    reverse: bool = False,
    outputs: bool = True,
) -> Result:
    """The primitive."""

    def primitive(*arrays: Any) -> Result:
        *arguments, weights = arrays
        return target.decayed_attention(*arguments, weights=weights, reverse=reverse, outputs=outputs)

    return spread(
        primitive, (a, b, c, decays, initial, weights), (2, 2, 2, 1, 1, 2), (2, 1, 1, 1), splits=target.splits
    )


def _starts(
    target: Target, k: Array, v: Array, decays: ChunkDecays | None, initial: Array, heads: int, pieces: int
) -> Array:
    """The state at the start of every piece of k and v, which are split already."""
    if pieces == 1:
        return initial
    cut = split_decays(decays, pieces)
    added = _run(target, None, _repeat(k, heads), v, cut, None, outputs=False).final
    return starts_of_pieces(decays, added, initial, pieces)


def _state_heads(k: Array, v: Array, decays: ChunkDecays | None, initial: Array) -> int:
    return max(k.shape[2], v.shape[2], initial.shape[1], 1 if decays is None else decays.enter.shape[1])


def _state_dtype(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _repeat(x: Array, heads: int) -> Array:
    """x [B, T, H', D] with every head repeated so that there are `heads`."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def _sum_heads(x: Array, axis: int, heads: int) -> Array:
    """Sums over the heads of each group, in float32 at least: `heads` are left."""
    if x.shape[axis] == heads:
        return x
    grouped = x.reshape(*x.shape[:axis], heads, -1, *x.shape[axis + 1 :])
    return jnp.sum(grouped.astype(_state_dtype(x)), axis=axis + 1).astype(x.dtype)
