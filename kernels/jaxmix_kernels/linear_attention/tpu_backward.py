"""All gradients of a decayed linear attention on a TPU in one kernel that walks over the tiles from last to first.

With X the state before a tile, as the forward kernel saved it, dX' the gradient of the state after it, rows t and
columns s of M, and A = q k^T, dP = M * (do v^T):

    dq  = dP k + enter (do X^T)                  dv  = (M * A)^T do + leave (k dX')
    dk  = dP^T q + leave (v dX'^T)               dX  = kept dX' + q^T (enter do)

The log decay of token r is in every pair it lies between: of tokens s < r <= t, of the state before and t >= r, of
s < r and the state after, of both states. With row sums over features these are

    dg_r = sum_{t>=r} (sum_{s<r} A_ts dP_ts + q_t . enter_t (do X^T)_t) + sum_{s<r} k_s . leave_s (v dX'^T)_s
           + kept <X, dX'>

within the tile, in float32 from float32 products: no rounding gathers along the sequence, and nothing cancels.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jaxmix_kernels import tpu_tiles
from jaxmix_kernels.decays import CHUNK, Array, BackwardArguments, BackwardResult
from jaxmix_kernels.tpu_tiles import TILE, Decays, Walk, product

_PARTS = {"bfloat16": 2, "float32": 3}
"""Numbers of eight bits that sums over pairs are taken from, by the dtype of the operands."""


def decayed_attention_backward(arguments: BackwardArguments, *, interpret: Any = False) -> BackwardResult:
    """Gradients of a decayed attention for each head.

    Args:
        arguments: see `BackwardArguments`.
        interpret: as of `pl.pallas_call`.

    Returns:
        dq, dk, dv, d_initial and d_steps of all H heads: where heads share an array, the caller sums.

    Raises:
        NotImplementedError: for dtypes, head sizes or lengths without a kernel.
        ValueError: there is not one of the states before every tile.
    """
    q, _, v, d_out, decays, states, d_final, *_ = arguments
    named = {name: getattr(arguments, name) for name in ("q", "k", "v", "d_out", "more_dq", "more_dk")}
    arrays = [x for x in named.values() if x is not None]
    tpu_tiles.check_arrays("decayed_attention_backward", *arrays)
    if states.dtype != q.dtype:
        raise NotImplementedError(f"states: expected the dtype of q, {q.dtype}, got {states.dtype}")
    batch, length, _, key_size = q.shape
    value_size, dtype = d_out.shape[3], q.dtype
    heads = [x.shape[2] for x in arrays] + [states.shape[1]]
    heads += [] if decays is None else [decays.enter.shape[1]]
    heads += [] if d_final is None else [d_final.shape[1]]
    walk = Walk(batch, max(heads), length // CHUNK, dtype, True, segments=tpu_tiles.segmented(decays))
    if states.shape[2] != walk.tiles:
        raise ValueError(f"states: expected {walk.tiles}, one before every tile, got {states.shape[2]}")
    inputs = {name: walk.tokens(x) for name, x in named.items()}
    inputs |= {"rows": walk.rows(decays), "states": walk.states(states), "d_final": walk.state(d_final)}
    result = walk.call(
        functools.partial(_kernel, walk),
        inputs,
        {
            "dq": walk.token_output(key_size, dtype),
            "dk": walk.token_output(key_size, dtype),
            "dv": None if v is None else walk.token_output(value_size, dtype),
            "d_steps": None if decays is None else walk.number_output(),
            "d_initial": walk.state_output(key_size, value_size),
        },
        [pltpu.VMEM((key_size, value_size), jnp.float32)],
        products=TILE * (TILE * (3 * key_size + 2 * value_size) + 4 * key_size * value_size)
        + (0 if decays is None else _PARTS[str(dtype)] * TILE * TILE * TILE),
        interpret=interpret,
        name="decayed_attention_backward",
    )
    d_steps = walk.join(result["d_steps"])
    if d_steps is not None:
        d_steps = d_steps.reshape(*d_steps.shape[:2], -1, CHUNK)
    dq, dk, dv = (walk.join(result[name]) for name in ("dq", "dk", "dv"))
    return BackwardResult(dq, dk, dv, result["d_initial"], d_steps)


class _Inside(NamedTuple):
    """What a tile needs no gradient of a state for.

    Attributes:
        dq: dq [2 C, D].
        dk: of dk, pairs of tokens [2 C, D].
        dv: of dv, pairs of tokens [2 C, E].
        d_state: q^T (enter do), [D, E].
        spans: for column r and row t >= r what dg_r has of token t, [2 C (t), 2 C (r)]; None without decays.
    """

    dq: Array
    dk: Array
    dv: Array
    d_state: Array
    spans: Array | None


def _kernel(walk: Walk, inputs: dict[str, Any], outputs: dict[str, Any], carried: Any) -> None:
    tpu_tiles.start(carried, inputs["d_final"])
    tiles = {name: tpu_tiles.tokens(walk, inputs[name]) for name in ("q", "k", "d_out")}
    q, k, d_out = tiles.values()
    v = k if inputs["v"] is None else tpu_tiles.tokens(walk, inputs["v"])
    decays = Decays.unpack(walk, inputs["rows"])
    states = [inputs["states"][tile] for tile in walk.order]
    # All that needs no gradient of a state first: it fills the time in which the chain of them waits for itself.
    inside = [_inside(*tile) for tile in zip(q, k, v, d_out, states, decays, strict=True)]
    dks, dvs, d_steps, d_state = [], [], [], carried[...]
    for keys, values, x, d, found in zip(k, v, states, decays, inside, strict=True):
        operand = d_state.astype(keys.dtype)
        dk, dv = product(values, operand, (1, 1)), product(keys, operand, (1, 0))
        if d.leave_column is not None:
            assert found.spans is not None
            dk, dv = d.times(d.leave_column, dk), d.times(d.leave_column, dv)
            d_state = d.times(d.kept, d_state)
            both = jnp.sum(jnp.sum(d_state * x.astype(jnp.float32), axis=1, keepdims=True), axis=0, keepdims=True)
            leaves = jnp.sum(dk * keys.astype(jnp.float32), axis=1, keepdims=True)
            by_pair = jnp.where(_is_before(bool), leaves, found.spans)
            d_steps.append(jnp.sum(by_pair, axis=0, keepdims=True) + d.stopped(d.kept, both))
        dks.append(found.dk + dk)
        dvs.append(found.dv + dv)
        d_state = found.d_state + d_state
    results = {"dq": [x.dq for x in inside], "dk": dks}
    if outputs["dv"] is None:
        results["dk"] = _add(dks, dvs)
    else:
        results["dv"] = dvs
    for name in ("dq", "dk"):
        if inputs[f"more_{name}"] is not None:
            results[name] = _add(results[name], tpu_tiles.tokens(walk, inputs[f"more_{name}"]))
    for name, found in results.items():
        tpu_tiles.write(walk, outputs[name], found)
    if d_steps:
        tpu_tiles.write_each(walk, outputs["d_steps"], d_steps)
    carried[...] = d_state
    tpu_tiles.finish(carried, outputs["d_initial"])


def _add(x: list[Array], y: list[Array]) -> list[Array]:
    return [a + b.astype(jnp.float32) for a, b in zip(x, y, strict=True)]


def _inside(q: Array, k: Array, v: Array, d_out: Array, state: Array, decays: Decays) -> _Inside:
    dtype = q.dtype
    scores, d_weights = product(q, k, (1, 1)), decays.mask * product(d_out, v, (1, 1))
    weights = (decays.mask * scores).astype(dtype)
    rounded = d_weights.astype(dtype)
    dq, entering, spans = product(d_out, state, (1, 1)), d_out, None
    if decays.enter is not None:
        dq = decays.times(decays.enter, dq)
        entering = decays.times(decays.enter, d_out.astype(jnp.float32)).astype(dtype)
        # Sixteen bits are enough where what the pairs are made of has eight.
        before = _before(d_weights * scores, parts=_PARTS[str(dtype)])
        spans = before + jnp.sum(dq * q.astype(jnp.float32), axis=1, keepdims=True)
    return _Inside(
        dq + product(rounded, k, (1, 0)),
        product(rounded.T, q, (1, 0)),
        product(weights.T, d_out, (1, 0)),
        product(q.T, entering, (1, 0)),
        spans,
    )


def _before(pairs: Array, parts: int) -> Array:
    """The sum over s < r of pairs [2 C (t), 2 C (s)], for every r.

    Pairs are cut in parts of eight bits, so that their products are of bfloat16; one of float32 takes six of those.
    """
    is_before, total = _is_before(jnp.bfloat16), jnp.zeros_like(pairs)
    for _ in range(parts):
        part = pairs.astype(jnp.bfloat16)
        pairs = pairs - part.astype(jnp.float32)
        total += product(part, is_before, (1, 0))
    return total


def _is_before(dtype: Any) -> Array:
    """Whether the row's token is before the column's, [2 C, 2 C]."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), axis) for axis in (0, 1))
    return (row < column).astype(dtype)
