"""Interdomain attention in its theory form: kernel regression on HiPPO coefficients of keys and values."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, check_positive, expand_to, from_numpy
from jaxmix.mixers.dispatch import Implementation, choose
from jaxmix.mixers.inputs import Inputs, Sizes, check_inputs, prepare_inputs
from jaxmix.mixers.interdomain.hippo import Hippo
from jaxmix.mixers.interdomain.ideal_chunks import scan_chunks
from jaxmix.mixers.interdomain.ideal_summary import InterdomainState, join_signals, multiply, place_of, read_modes
from jaxmix.mixers.linear_attention import outer
from jaxmix.mixers.state import check_state


def interdomain_ideal(
    q: Array,
    k: Array,
    v: Array,
    *,
    modes: int = 64,
    basis: Literal["legs", "legt"] = "legs",
    window: float | None = None,
    discretization: Literal["bilinear", "zoh"] = "bilinear",
    eps: float = 1e-6,
    segment_ids: Array | None = None,
    initial_state: InterdomainState | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, InterdomainState]:
    """o_t = sum_m (q_t . u_m) gamma_m / (sum_m (q_t . u_m) eta_m + eps), the past projected on M basis functions.

    u_m, gamma_m and eta_m are the HiPPO coefficients of the keys, the values and the constant 1: u = A u + b k_t^T and
    likewise with v_t and 1, (A, b) independent of the data. As a sum over tokens, o_t is

        sum_{i,j<=t} kappa_t(i, j) (q_t . k_i) v_j / (sum_{i,j<=t} kappa_t(i, j) (q_t . k_i) + eps),

    kappa_t a positive semidefinite matrix of rank at most M. The basis is orthonormal with one token as the unit of
    time, so that a complete basis has kappa_t(i, j) = 1 for i = j (inside the window) and else 0, and the result is
    kernel regression: that of `linear_attention` with `normalize=True`. With fewer modes kappa_t smooths over time. Its
    entries can be negative, and so can the denominator, which is used as it stands, neither clamped nor made positive.

    "bilinear" comes within 1e-6 of kernel regression on T tokens with about 1.7 T modes for "legs", and 3.5 T modes and
    a window of 2 T for "legt", and soon after within rounding; but with more modes than the window has tokens, "legt"
    does not forget what is older. The error of "zoh" falls only like 1 / M; its window is sharp, and with "legs" its
    denominator is that of kernel regression for any M.

    Args:
        q: features xi(query), [B, T, H, R], bfloat16, float32 or float64. The function applies no feature map.
        k: features xi(key), [B, T, G, R]; G divides H and query head h reads head h // (H / G).
        v: values, [B, T, G, E].
        modes: number M of basis functions.
        basis: "legs", Legendre polynomials on all of the segment so far, or "legt", on its newest `window` tokens.
        window: length of the "legt" window in tokens, > 0; None with "legs".
        discretization: "bilinear", or "zoh", which is exact for the projection of a signal constant on each token.
        eps: added to the denominator, > 0.
        segment_ids: int32 [B, T]; 0 is padding (output 0, no effect, time stands still), a new id resets the state.
        initial_state: state of the tokens before the first; belongs to the first segment. None: nothing seen.
        implementation: "serial", "scan", "pallas", or None for the fastest available.
        chunk_size: tokens per chunk of the scan form; 1 is the associative scan over single tokens.
        sequence_axis: shard_map axis over which T is split ("scan" only).

    Returns:
        out [B, T, H, E] in v's dtype, and the final state.

    Raises:
        ValueError: for wrong shapes, dtypes, head counts, states or options.
        NotImplementedError: when `implementation` cannot serve the call.

    Source: Kiyohara et al., "Interdomain Attention: Beyond Token-Level Key-Value Memory", arXiv 2605.24330.
    """
    q, k, v, segment_ids = map(from_numpy, (q, k, v, segment_ids))
    form = choose("interdomain_ideal", implementation, chunk_size, sequence_axis).form
    hippo = Hippo(basis, modes, window, discretization)
    check_positive("eps", eps)
    sizes = check_inputs(q, k, v, None, segment_ids)
    if initial_state is not None:
        check_state(initial_state, jax.eval_shape(functools.partial(_zero_state, sizes, hippo)), sizes.dtype)
    if sizes.length == 1 and sequence_axis is None:
        form = "step"
    return _run(sizes, hippo, form, eps, chunk_size, sequence_axis, q, k, v, segment_ids, initial_state)


def _zero_state(sizes: Sizes, hippo: Hippo) -> InterdomainState:
    return InterdomainState.init(
        sizes.batch, sizes.groups, hippo.modes, sizes.key_size, sizes.value_size, dtype=sizes.dtype
    )


@functools.partial(jax.jit, static_argnums=range(6))
def _run(
    sizes: Sizes,
    hippo: Hippo,
    form: str,
    eps: float,
    chunk_size: int,
    sequence_axis: str | None,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    initial_state: InterdomainState | None,
) -> tuple[Array, InterdomainState]:
    state = _zero_state(sizes, hippo) if initial_state is None else initial_state
    inputs = prepare_inputs(sizes, q, k, v, None, segment_ids, sequence_axis, fresh=initial_state is None)
    with jax.named_scope(f"interdomain_ideal_{form}"):
        if form == "scan":
            (num, den), state = scan_chunks(hippo, inputs, state, min(chunk_size, sizes.length), sequence_axis)
        else:
            (num, den), state = _serial(hippo, inputs, state)
    out = (num / (den[..., None] + eps)).reshape(sizes.batch, sizes.length, sizes.heads, sizes.value_size)
    return out.astype(v.dtype), state


def _serial(hippo: Hippo, inputs: Inputs, state: InterdomainState) -> tuple[tuple[Array, Array], InterdomainState]:
    segments = inputs.segments
    borders = None if segments is None else (segments.valid, segments.reset)
    tokens = (inputs.q, join_signals(inputs.k, inputs.v), borders)

    def body(carry: Any, token: Any) -> tuple[Any, tuple[Array, Array]]:
        q, signals, borders = token
        if borders is None:
            carry = _step(hippo, carry, signals)
        else:
            valid, reset = borders
            carry = jax.tree.map(lambda x: jnp.where(expand_to(reset, x.ndim), 0, x), carry)
            moved = _step(hippo, carry, signals)
            carry = jax.tree.map(lambda new, old: jnp.where(expand_to(valid, new.ndim), new, old), moved, carry)
        return carry, read_modes(q, carry[0][:, :, None])

    carry = (state.pack(), state.count)
    if inputs.q.shape[1] == 1:
        carry, outputs = body(carry, jax.tree.map(lambda x: x[:, 0], tokens))
        num, den = jax.tree.map(lambda x: x[:, None], outputs)
    else:
        carry, outputs = jax.lax.scan(body, carry, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
        num, den = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
    return (num, den), InterdomainState.unpack(carry[0], inputs.q.shape[-1], carry[1])


def _step(hippo: Hippo, carry: tuple[Array, Array], signals: Array) -> tuple[Array, Array]:
    """Coefficients [B, G, M, P] and count [B, G] after one more token with signals [B, G, P]."""
    x, count = carry
    count = count + 1
    phi, b = hippo.transition(place_of(count[:, :1]))
    return multiply(phi, x) + outer(b, signals), count
