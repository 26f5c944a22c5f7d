"""Decayed linear attention with its gradients.

The forward pass of a call that is differentiated keeps the states before all chunks, and one kernel gives all gradients
from them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmix_kernels.decays import CHUNK, BackwardArguments, BackwardResult, ChunkDecays, Result
from jaxmix_kernels.linear_attention.pieces import (
    choose_pieces,
    join_chunks,
    join_pieces,
    last_piece,
    pad_chunks,
    pad_sizes,
    split_decays,
    split_tokens,
)
from jaxmix_kernels.linear_attention.primitive import (
    attend,
    gradients,
    piece_ends,
    piece_starts,
    repeat_heads,
    state_heads,
)
from jaxmix_kernels.target import Target

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is fixed when a call is traced: the target, number of pieces in time, whether outputs are wanted."""

    target: Target
    pieces: int
    outputs: bool


class _Arrays(NamedTuple):
    """Whole pieces of chunks, of sizes that the kernels have; `steps` are those that `decays` comes from.

    v is None where values are the keys, in a backward pass only.
    """

    q: Array | None
    k: Array
    v: Array | None
    decays: ChunkDecays | None
    steps: Array | None
    initial: Array | None


def linear_attention(
    q: Array, k: Array, v: Array, decays: ChunkDecays | None, initial: Array | None, *, target: Target
) -> tuple[Array, Array]:
    """Causal linear attention with decay, differentiable in q, k, v, `initial` and `decays.steps`.

    Other arrays of `decays` are constants: what depends on the log decays of the tokens gets its gradient through
    `steps`.

    Args:
        q: queries [B, T, H, D], bfloat16 or float32; all of one dtype.
        k: keys [B, T, Hk, D]. Head h reads head h // (H / Hk), and so on for all head counts, which divide one another.
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
        ValueError: head counts do not divide one another.
    """
    out, final = _call(q, k, v, decays, initial, target)
    assert out is not None
    return out, final


def final_state(k: Array, v: Array, decays: ChunkDecays | None, initial: Array | None, *, target: Target) -> Array:
    """The final state of `linear_attention` alone."""
    return _call(None, k, v, decays, initial, target)[1]


class Gradients(NamedTuple):
    """Gradients of a linear attention: of its arrays and of `decays.steps`."""

    q: Array
    k: Array
    v: Array | None
    steps: Array | None
    initial: Array | None


def known_gradients(
    q: Array,
    k: Array,
    v: Array | None,
    decays: ChunkDecays | None,
    initial: Array | None,
    states: Array,
    d_out: Array,
    d_final: Array,
    *,
    more_dq: Array | None = None,
    more_dk: Array | None = None,
    target: Target,
) -> Gradients:
    """Gradients of `linear_attention` without running it, in the pieces in time that its states are of.

    Args:
        q: as of `linear_attention`, like k, decays and initial.
        k: keys.
        v: values; None where they are the keys, the gradient of which is then that of both.
        decays: decays.
        initial: the state before the first token; None for zeros, which get no gradient.
        states: the states that its kernel kept, [B P, H', N / P, D', E'], H' a divisor of H, before each chunk or tile
            of two, of sizes that the kernels have; sequences were cut into P pieces of as many chunks each.
        d_out: gradient of the outputs.
        d_final: gradient of the final state.
        more_dq: is added to the gradient of q.
        more_dk: is added to that of k.
        target: what the kernels are made for.
    """
    pieces = states.shape[0] // q.shape[0]
    plan, arrays = _prepare(q, k, v, decays, initial, target, pieces)
    d_out, more_dq, more_dk = jax.tree.map(lambda x: pad_sizes(x, (3,), pieces * CHUNK), (d_out, more_dq, more_dk))
    result = _gradients(plan, arrays, states, d_out, pad_sizes(d_final, (2, 3)), more_dq, more_dk)
    assert result.q is not None
    value_size = k.shape[3] if v is None else v.shape[3]
    return Gradients(
        result.q[:, : q.shape[1], :, : q.shape[3]],
        result.k[:, : k.shape[1], :, : k.shape[3]],
        None if v is None or result.v is None else result.v[:, : v.shape[1], :, :value_size],
        None if decays is None or result.steps is None else result.steps[:, :, : decays.high.shape[2]],
        None if result.initial is None else result.initial[:, :, : k.shape[3], :value_size],
    )


def _call(
    q: Array | None, k: Array, v: Array, decays: ChunkDecays | None, initial: Array | None, target: Target
) -> tuple[Array | None, Array]:
    length, key_size, value_size = k.shape[1], k.shape[3], v.shape[3]
    out, final = _attend(*_prepare(q, k, v, decays, initial, target))
    return None if out is None else out[:, :length, :, :value_size], final[:, :, :key_size, :value_size]


def _prepare(
    q: Array | None,
    k: Array,
    v: Array | None,
    decays: ChunkDecays | None,
    initial: Array | None,
    target: Target,
    pieces: int | None = None,
) -> tuple[_Plan, _Arrays]:
    """Chooses pieces where their number is not given, and fills up sizes and tokens; without v, values are the keys."""
    values = k if v is None else v
    length, key_size, value_size = k.shape[1], k.shape[3], values.shape[3]
    refusal = target.refusal(values.dtype, key_size, value_size)
    if refusal is not None:
        raise NotImplementedError(f"linear_attention: {refusal}")
    if pieces is None:
        heads = state_heads(k.shape[2], values.shape[2], decays, initial) if q is None else q.shape[2]
        programs = k.shape[0] * heads * target.blocks(value_size)
        pieces = choose_pieces(programs, length, target.programs)
    q, k, v = jax.tree.map(lambda x: pad_sizes(x, (3,), pieces * CHUNK), (q, k, v))
    steps = None
    if decays is not None:
        decays = pad_chunks(decays, pieces)
        steps, decays = decays.steps, jax.lax.stop_gradient(dataclasses.replace(decays, steps=None))
    start = None if initial is None else pad_sizes(initial, (2, 3))
    return _Plan(target, pieces, q is not None), _Arrays(q, k, v, decays, steps, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, arrays: _Arrays) -> tuple[Array | None, Array]:
    walk = _walk(plan, arrays)
    return walk.out, walk.final


def _attend_forward(plan: _Plan, arrays: _Arrays) -> tuple[Any, Any]:
    walk = _walk(plan, arrays, states=True)
    return (walk.out, walk.final), (arrays, walk.states)


def _attend_backward(plan: _Plan, residuals: Any, cotangents: Any) -> tuple[_Arrays]:
    return (_gradients(plan, *residuals, *cotangents),)


_attend.defvjp(_attend_forward, _attend_backward)


def _walk(plan: _Plan, arrays: _Arrays, *, states: bool = False) -> Result:
    """The forward pass; without queries, only states of the heads that have one of their own.

    `states` are those of B P pieces.
    """
    q, k, v, decays, _, initial = arrays
    assert v is not None
    groups = state_heads(k.shape[2], v.shape[2], decays, initial)
    heads = groups if q is None else q.shape[2]
    qs, ks, vs = jax.tree.map(lambda x: split_tokens(x, plan.pieces), (q, k, v))
    starts = piece_starts(plan.target, ks, vs, decays, initial, heads, plan.pieces)
    if q is None:
        ks = repeat_heads(ks, heads)
    cut = split_decays(decays, plan.pieces)
    result = attend(plan.target, qs, ks, vs, cut, starts, outputs=q is not None, states=states)
    group = heads // groups
    return Result(
        None if result.out is None else join_pieces(result.out, plan.pieces),
        last_piece(result.final, plan.pieces)[:, ::group],
        None if result.states is None else result.states[:, ::group],
    )


def _gradients(
    plan: _Plan,
    arrays: _Arrays,
    states: Array,
    d_out: Array | None,
    d_final: Array,
    more_dq: Array | None = None,
    more_dk: Array | None = None,
) -> _Arrays:
    """Gradients of all arrays, from what a forward pass left, and what is to be added to them."""
    q, k, v, decays, steps, initial = arrays
    values = k if v is None else v
    if q is None:
        shape = (*k.shape[:2], d_final.shape[1])
        q, d_out = jnp.zeros((*shape, k.shape[3]), k.dtype), jnp.zeros((*shape, values.shape[3]), values.dtype)
    assert d_out is not None
    # Heads that share a final state share its gradient, so that their sum is whole.
    d_final = d_final.astype(_state_dtype(values)) / (q.shape[2] // d_final.shape[1])
    inside = more_dk if k.shape[2] == q.shape[2] else None
    d_out = d_out.astype(values.dtype)
    by_head = _by_head(plan, BackwardArguments(q, k, v, d_out, decays, states, d_final, more_dq, inside))
    d_steps = None
    if steps is not None:
        assert by_head.d_steps is not None
        d_steps = _sum_heads(by_head.d_steps, 1, steps.shape[1]).astype(steps.dtype)
        # It is a product with the decay of the step. Where that is below rounding, the sums hold nothing else.
        d_steps = jnp.where(steps < jnp.log(jnp.finfo(steps.dtype).eps), 0, d_steps)
    return _Arrays(
        by_head.dq if plan.outputs else None,
        _sum_heads(by_head.dk, 2, k.shape[2], more_dk if inside is None else None),
        None if by_head.dv is None else _sum_heads(by_head.dv, 2, values.shape[2]),
        None,
        d_steps,
        None if initial is None else _sum_heads(by_head.d_initial, 1, initial.shape[1]),
    )


def _by_head(plan: _Plan, arguments: BackwardArguments) -> BackwardResult:
    """Gradients for each of H heads, in the pieces of the forward pass."""
    pieces, decays = plan.pieces, arguments.decays
    tokens = {name: getattr(arguments, name) for name in ("q", "k", "v", "d_out", "more_dq", "more_dk")}
    cut = {name: split_tokens(x, pieces) for name, x in tokens.items() if x is not None}
    assert arguments.d_final is not None
    ends = piece_ends(plan.target, cut["q"], cut["d_out"], decays, arguments.d_final, pieces)
    result = gradients(plan.target, arguments._replace(**cut, decays=split_decays(decays, pieces), d_final=ends))
    return BackwardResult(
        join_pieces(result.dq, pieces),
        join_pieces(result.dk, pieces),
        None if result.dv is None else join_pieces(result.dv, pieces),
        last_piece(result.d_initial, pieces, reverse=True),
        None if result.d_steps is None else join_chunks(result.d_steps, pieces),
    )


def _state_dtype(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _sum_heads(x: Array, axis: int, heads: int, more: Array | None = None) -> Array:
    """Sums over the heads of each group and with `more`, in float32 at least: `heads` are left."""
    if x.shape[axis] == heads and more is None:
        return x
    grouped = x.reshape(*x.shape[:axis], heads, -1, *x.shape[axis + 1 :])
    total = jnp.sum(grouped.astype(_state_dtype(x)), axis=axis + 1)
    return (total if more is None else total + more.astype(total.dtype)).astype(x.dtype)
