"""Decayed linear attention with its gradients, which have two ways; the target decides.

Where it `keeps_states` (a Hopper GPU), the forward pass of a call that is differentiated keeps the states before all
chunks, and one kernel gives all gradients from them. Elsewhere (a TPU) it keeps none, and `composition` has the
gradients.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmix_kernels.decays import CHUNK, BackwardResult, ChunkDecays
from jaxmix_kernels.linear_attention.composition import composed_gradients
from jaxmix_kernels.linear_attention.pieces import (
    choose_pieces,
    join_chunks,
    join_pieces,
    last_piece,
    pad_chunks,
    pad_sizes,
    shorten_sums,
    split_decays,
    split_tokens,
)
from jaxmix_kernels.linear_attention.primitive import attend, gradients, piece_ends, piece_starts, repeat_heads
from jaxmix_kernels.target import Target

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is fixed when a call is traced: the target, numbers of pieces in time, whether outputs are wanted."""

    target: Target
    pieces: int
    backward_pieces: int
    outputs: bool


class _Arrays(NamedTuple):
    """Whole pieces of chunks, of sizes that the kernels have; `steps` are those that `decays` comes from."""

    q: Array | None
    k: Array
    v: Array
    decays: ChunkDecays | None
    steps: Array | None
    initial: Array


class _Walk(NamedTuple):
    """What a forward pass gives: `starts` of all pieces, `states` before all chunks of B P pieces."""

    out: Array | None
    final: Array
    starts: Array
    states: Array | None


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


class Known(NamedTuple):
    """What another kernel has computed of a linear attention.

    Attributes:
        out: outputs [B, T, H, E]; None for zeros in their place.
        final: the final state, as `linear_attention` gives it.
        states: where the target `keeps_states`, the state before every chunk, [B, H', N, D', E'], H' a divisor of H, of
            whole chunks and of sizes that the kernels have.
    """

    out: Array | None
    final: Array
    states: Array | None


def recalled(
    q: Array, k: Array, v: Array, decays: ChunkDecays | None, initial: Array | None, known: Known, *, target: Target
) -> tuple[Array, Array]:
    """What `linear_attention` gives and is `known`, for its gradients: no kernel runs forward, and no time is cut."""
    out, final = _call(q, k, v, decays, initial, target, known)
    assert out is not None
    return out, final


def _call(
    q: Array | None,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    initial: Array | None,
    target: Target,
    known: Known | None = None,
) -> tuple[Array | None, Array]:
    length, key_size, value_size = k.shape[1], k.shape[3], v.shape[3]
    refusal = target.refusal(v.dtype, key_size, value_size)
    if refusal is not None:
        raise NotImplementedError(f"linear_attention: {refusal}")
    if initial is None:
        initial = jnp.zeros((k.shape[0], 1, key_size, value_size), _state_dtype(v))
    heads = _state_heads(k, v, decays, initial) if q is None else q.shape[2]
    programs = k.shape[0] * heads * target.blocks(value_size)
    pieces = backward_pieces = choose_pieces(programs, length, target.programs)
    if decays is not None and decays.steps is not None and not target.keeps_states:
        backward_pieces = shorten_sums(pieces, length)
    q, k, v = jax.tree.map(lambda x: pad_sizes(x, (3,), backward_pieces * CHUNK), (q, k, v))
    steps = None
    if decays is not None:
        decays = pad_chunks(decays, backward_pieces)
        steps, decays = decays.steps, jax.lax.stop_gradient(dataclasses.replace(decays, steps=None))
    plan = _Plan(target, pieces, backward_pieces, q is not None)
    arrays = _Arrays(q, k, v, decays, steps, pad_sizes(initial, (2, 3)))
    if known is None:
        out, final = _attend(plan, arrays)
    else:
        out = None if known.out is None else pad_sizes(known.out, (3,), backward_pieces * CHUNK)
        out, final = _recall(plan, arrays, known._replace(out=out, final=pad_sizes(known.final, (2, 3))))
    return None if out is None else out[:, :length, :, :value_size], final[:, :, :key_size, :value_size]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, arrays: _Arrays) -> tuple[Array | None, Array]:
    walk = _walk(plan, arrays)
    return walk.out, walk.final


def _attend_forward(plan: _Plan, arrays: _Arrays) -> tuple[Any, Any]:
    walk = _walk(plan, arrays, states=plan.target.keeps_states)
    starts = walk.starts if walk.states is None else None
    return (walk.out, walk.final), (arrays, starts, walk.states, walk.final)


def _attend_backward(plan: _Plan, residuals: Any, cotangents: Any) -> tuple[_Arrays]:
    return (_gradients(plan, *residuals, *cotangents),)


_attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recall(plan: _Plan, arrays: _Arrays, known: Known) -> tuple[Array, Array]:
    """What is known, with the gradients of `_attend`."""
    assert arrays.q is not None
    if known.out is None:
        return jnp.zeros((*arrays.q.shape[:3], arrays.v.shape[3]), arrays.v.dtype), known.final
    return known.out, known.final


def _recall_forward(plan: _Plan, arrays: _Arrays, known: Known) -> tuple[Any, Any]:
    assert plan.pieces == 1
    starts = arrays.initial if known.states is None else None
    return _recall(plan, arrays, known), (arrays, starts, known.states, known.final)


def _recall_backward(plan: _Plan, residuals: Any, cotangents: Any) -> tuple[_Arrays, None]:
    return _gradients(plan, *residuals, *cotangents), None


_recall.defvjp(_recall_forward, _recall_backward)


def _walk(plan: _Plan, arrays: _Arrays, *, states: bool = False) -> _Walk:
    """The forward pass; without queries, only states of the heads that have one of their own."""
    q, k, v, decays, _, initial = arrays
    state_heads = _state_heads(k, v, decays, initial)
    heads = state_heads if q is None else q.shape[2]
    qs, ks, vs = jax.tree.map(lambda x: split_tokens(x, plan.pieces), (q, k, v))
    starts = piece_starts(plan.target, ks, vs, decays, initial, heads, plan.pieces)
    if q is None:
        ks = repeat_heads(ks, heads)
    cut = split_decays(decays, plan.pieces)
    result = attend(plan.target, qs, ks, vs, cut, starts, outputs=q is not None, states=states)
    group = heads // state_heads
    return _Walk(
        None if result.out is None else join_pieces(result.out, plan.pieces),
        last_piece(result.final, plan.pieces)[:, ::group],
        starts,
        None if result.states is None else result.states[:, ::group],
    )


def _gradients(
    plan: _Plan,
    arrays: _Arrays,
    starts: Array | None,
    states: Array | None,
    final: Array,
    d_out: Array | None,
    d_final: Array,
) -> _Arrays:
    """Gradients of all arrays, from what a forward pass left."""
    q, k, v, decays, steps, initial = arrays
    if q is None:
        shape = (*k.shape[:2], final.shape[1])
        q, d_out = jnp.zeros((*shape, k.shape[3]), k.dtype), jnp.zeros((*shape, v.shape[3]), v.dtype)
    assert d_out is not None
    # Heads that share a final state share its gradient, so that their sum is whole.
    d_final = d_final.astype(final.dtype) / (q.shape[2] // final.shape[1])
    given = plan.target, q, k, v, d_out.astype(v.dtype), decays
    if states is not None:
        by_head = _by_one_kernel(*given, states, d_final, plan.pieces)
    else:
        by_head = composed_gradients(
            *given,
            initial,
            final,
            d_final,
            pieces=plan.backward_pieces,
            starts=starts if plan.pieces == plan.backward_pieces else None,
            sums=steps is not None,
        )
    d_steps = None
    if steps is not None:
        assert by_head.d_steps is not None
        d_steps = _sum_heads(by_head.d_steps, 1, steps.shape[1]).astype(steps.dtype)
        # It is a product with the decay of the step. Where that is below rounding, the sums hold nothing else.
        d_steps = jnp.where(steps < jnp.log(jnp.finfo(steps.dtype).eps), 0, d_steps)
    return _Arrays(
        by_head.dq if plan.outputs else None,
        _sum_heads(by_head.dk, 2, k.shape[2]),
        _sum_heads(by_head.dv, 2, v.shape[2]),
        None,
        d_steps,
        _sum_heads(by_head.d_initial, 1, initial.shape[1]),
    )


def _by_one_kernel(
    target: Target,
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    decays: ChunkDecays | None,
    states: Array,
    d_final: Array,
    pieces: int,
) -> BackwardResult:
    """Gradients for each of H heads, in the pieces of the forward pass."""
    qs, ks, vs, ds = (split_tokens(x, pieces) for x in (q, k, v, d_out))
    ends = piece_ends(target, qs, ds, decays, d_final, pieces)
    result = gradients(target, qs, ks, vs, ds, split_decays(decays, pieces), states, ends)
    return BackwardResult(
        join_pieces(result.dq, pieces),
        join_pieces(result.dk, pieces),
        join_pieces(result.dv, pieces),
        last_piece(result.d_initial, pieces, reverse=True),
        None if result.d_steps is None else join_chunks(result.d_steps, pieces),
    )


def _state_heads(k: Array, v: Array, decays: ChunkDecays | None, initial: Array) -> int:
    return max(k.shape[2], v.shape[2], initial.shape[1], 1 if decays is None else decays.enter.shape[1])


def _state_dtype(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _sum_heads(x: Array, axis: int, heads: int) -> Array:
    """Sums over the heads of each group, in float32 at least: `heads` are left."""
    if x.shape[axis] == heads:
        return x
    grouped = x.reshape(*x.shape[:axis], heads, -1, *x.shape[axis + 1 :])
    return jnp.sum(grouped.astype(_state_dtype(x)), axis=axis + 1).astype(x.dtype)
