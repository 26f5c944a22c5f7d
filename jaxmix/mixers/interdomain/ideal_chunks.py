"""The chunked form of `interdomain_ideal`: all chunks at once, with no coefficients kept per token.

Let F_t = [Phi_t, W_t] be what the first t tokens of a chunk do: Phi_t [M, M] moves the coefficients that the chunk
starts with, and column j of W_t [M, C] holds those of a unit impulse at token j. With y_t = U_start q_t and scores
s_tj = q_t . k_j, the queries weigh the modes by r_t = Phi_t y_t + W_t s_t, and the output is
Gamma_start^T Phi_t^T r_t + V^T W_t^T r_t. So F_t^T F_t, symmetric and independent of the data, is all that token t
needs, and F_t follows from F_{t-1}.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, einsum
from jaxmix.mixers.chunking import Chunks, join_chunks, split_chunks
from jaxmix.mixers.inputs import Inputs
from jaxmix.mixers.interdomain.hippo import Hippo
from jaxmix.mixers.interdomain.ideal_summary import (
    InterdomainState,
    TransitionSummary,
    join_signals,
    multiply,
    place_of,
)
from jaxmix.mixers.positions import count_resets, find_places
from jaxmix.mixers.prefix import prefix_scan


def scan_chunks(
    hippo: Hippo, inputs: Inputs, state: InterdomainState, size: int, sequence_axis: str | None
) -> tuple[tuple[Array, Array], InterdomainState]:
    """Numerator [B, T, G, R, E], denominator [B, T, G, R] and the final state, by chunks of `size` tokens."""
    length, key_size, modes = inputs.q.shape[1], inputs.q.shape[-1], hippo.modes
    places, valid, count = _clock(hippo, inputs, state.count, sequence_axis)
    places, valid = _cut(places, size), _cut(valid, size)
    q, k, v = (split_chunks(x, size) for x in (inputs.q, inputs.k, inputs.v))
    signals = join_signals(k, v)
    chunks = Chunks.cut(None, inputs.segments, size, sequence_axis)

    moved, _ = _walk(hippo, places, valid, None)
    start, final = _states(chunks, moved[:, :, None], signals, state, modes)
    keys, values = jnp.swapaxes(start[..., :key_size], -1, -2), start[..., key_size:]

    read = jnp.concatenate([chunks.read(q, keys), chunks.scores(q, k)], axis=-1)
    weights = _gram(hippo, places, valid, read)
    inside = weights[..., modes:]
    if chunks.run is not None:
        same = chunks.run[..., :, None] == chunks.run[..., None, :]
        inside = jnp.where(same[:, :, None, None], inside, 0)
    out = chunks.read(weights[..., :modes], values)
    out = out + einsum("bngrts,bngse->bngrte", inside, signals[..., key_size:])
    out = join_chunks(out, length)
    return (out[..., :-1], out[..., -1]), InterdomainState.unpack(final, key_size, count)


def _clock(hippo: Hippo, inputs: Inputs, count: Array, sequence_axis: str | None) -> tuple[Array, Array, Array]:
    """The place of each token in its segment and where time moves on, [B, T], and the final count [B, G].

    The batch axis has size 1 where all rows have the same transitions.
    """
    batch, length, groups = inputs.k.shape[:3]
    if inputs.segments is None:
        valid, started, resets = jnp.ones((batch, length), jnp.bool_), None, None
        here = jnp.broadcast_to(jnp.arange(1, length + 1), (batch, length))
    else:
        valid, started = inputs.segments.valid, count_resets(inputs.segments) > 0
        resets = started[:, -1:]
        here = find_places(inputs.segments, jnp.zeros((batch,), jnp.int32)) + 1
    last = jnp.broadcast_to(here[:, -1:, None], (batch, 1, groups)).astype(count.dtype)
    before, _, total = prefix_scan(operator.add, last, resets, count[:, None], sequence_axis)
    earlier = place_of(before[:, :, 0])
    places = here + (earlier if started is None else jnp.where(started, 0, earlier))
    if not hippo.varies and inputs.segments is None:
        places, valid = places[:1], valid[:1]
    return places, valid, total[:, 0]


def _cut(x: Array, size: int) -> Array:
    """[B, T] cut into [B, N, C]; zeros, where time stands still, fill up the last chunk."""
    return split_chunks(x[..., None, None], size)[:, :, 0, :, 0]


def _states(chunks: Chunks, moved: Array, signals: Array, state: InterdomainState, modes: int) -> tuple[Array, Array]:
    """Coefficients at the start of every chunk [B, N, G, M, P] and after the last; `moved` is F after each chunk."""
    impulses = jnp.swapaxes(moved[..., modes:], -1, -2)
    impulses = jnp.broadcast_to(impulses, (*signals.shape[:-1], modes))
    summaries = TransitionSummary(moved[..., :modes], chunks.outer(impulses, signals))
    eye = jnp.broadcast_to(jnp.eye(modes, dtype=signals.dtype), (moved.shape[0], 1, 1, modes, modes))
    resets = None if chunks.run is None else chunks.run[..., -1] > 0
    initial = TransitionSummary(eye, state.pack()[:, None])
    before, after, total = prefix_scan(TransitionSummary.combine, summaries, resets, initial, chunks.sequence_axis)
    return jnp.concatenate([before.X, after.X[:, :-1]], axis=1), total.X[:, 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gram(hippo: Hippo, places: Array, valid: Array, x: Array) -> Array:
    """F_t^T F_t x_t for every token, x [B, N, G, R, C, M + C]. Symmetric, so that it is its own transpose."""
    weights = _walk(hippo, places, valid, x)[1]
    assert weights is not None
    return weights


def _gram_forward(hippo: Hippo, places: Array, valid: Array, x: Array) -> tuple[Array, Any]:
    return _gram(hippo, places, valid, x), (places, valid)


def _gram_backward(hippo: Hippo, residuals: Any, cotangent: Array) -> tuple[None, None, Array]:
    # Automatic differentiation would keep F_t for every token; walking through the chunk again keeps none.
    return None, None, _gram(hippo, *residuals, cotangent)


_gram.defvjp(_gram_forward, _gram_backward)


def _walk(hippo: Hippo, places: Array, valid: Array, x: Array | None) -> tuple[Array, Array | None]:
    """F [B, N, M, M + C] at the end of each chunk, and F_t^T F_t x_t on the way if x is given."""
    modes, size = hippo.modes, places.shape[-1]
    columns = jnp.arange(modes + size)

    def step(f: Array, token: Any) -> tuple[Array, Array | None]:
        column, place, valid, x = token
        phi, b = hippo.transition(place)
        moved = multiply(phi, f)
        moved = jnp.where(columns == column, b[..., None], moved)
        f = jnp.where(valid[..., None, None], moved, f)
        if x is None:
            return f, None
        modes_read = einsum("...mj,...rj->...rm", f[:, :, None], x)
        return f, einsum("...mj,...rm->...rj", f[:, :, None], modes_read)

    start = jnp.eye(modes, modes + size, dtype=places.dtype) * jnp.ones_like(places[..., :1, None])
    tokens = (
        columns[modes:],
        jnp.moveaxis(places, -1, 0),
        jnp.moveaxis(valid, -1, 0),
        None if x is None else jnp.moveaxis(x, -2, 0),
    )
    f, outputs = jax.lax.scan(step, start, tokens)
    return f, None if outputs is None else jnp.moveaxis(outputs, 0, -2)
