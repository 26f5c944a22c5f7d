"""Interdomain attention: keys and values of all tokens summarised by the modes of one diagonal recurrence."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import (
    GATE_DTYPES,
    Array,
    check_array,
    check_flag,
    check_positive,
    compute_dtype,
    einsum,
    fail,
    from_numpy,
)
from jaxmix.mixers import pairs
from jaxmix.mixers.chunking import apart, beside
from jaxmix.mixers.diagonal import DiagonalChunks, DiagonalSummary
from jaxmix.mixers.dispatch import Implementation, choose
from jaxmix.mixers.inputs import Inputs, Sizes, check_inputs
from jaxmix.mixers.interdomain.attention_state import InterdomainAttentionState
from jaxmix.mixers.modes import Discretization, check_modes, discretize
from jaxmix.mixers.recurrence import Output, Recurrence, run_checked
from jaxmix.mixers.s4d import begin_summary, summarize_tokens


@dataclasses.dataclass(frozen=True)
class _InterdomainAttention(Recurrence):
    """r_t = q_t . Xk per mode, w_t = (C^T C) r_t, o_t = Re(w_t . Xv): U and Gamma are never formed."""

    name = "interdomain_attention"
    state = InterdomainAttentionState
    summary = DiagonalSummary
    time_invariant = True
    modes: int
    conjugate: bool
    discretization: Discretization
    normalize: bool
    system: Any = None
    """The `Modes`."""
    mix: Any = None
    """What makes conj(w) of r: real [G, 2M, 2M] for a full C, pairs [G, 2, M] for a diagonal one."""

    def bind(self, parameters: Any) -> "_InterdomainAttention":
        A, delta, C = parameters
        return dataclasses.replace(
            self, system=discretize(A, delta, self.discretization), mix=_gram(C, conjugate=self.conjugate)
        )

    def zero_state(self, sizes: Sizes) -> InterdomainAttentionState:
        return InterdomainAttentionState.init(
            sizes.batch,
            sizes.heads,
            sizes.key_size,
            sizes.value_size,
            modes=self.modes,
            shared_heads=sizes.groups,
            dtype=sizes.dtype,
        )

    def step(self, state: Any, q: Array, k: Array, v: Array, a: Array) -> tuple[Any, Output]:
        lam, gain = self.system.powers(jnp.asarray(1)), self.system.gain
        xk = pairs.scale_rows(lam, state.Xk) + gain[..., None] * k[:, :, None, None]
        xv = pairs.scale_rows(lam, state.Xv) + gain[..., None] * v[:, :, None, None]
        x1 = pairs.multiply(lam, state.X1) + gain
        return InterdomainAttentionState(xk, xv, x1), self._read(xk, beside(xv, x1), q)

    def _read(self, xk: Array, xv: Array, q: Array) -> Output:
        """What q [..., G, R, D] reads from xk [..., G, 2, M, D] and xv [..., G, 2, M, E + 1]."""
        w = self._weigh(pairs.flatten(einsum("...rd,...pmd->...rpm", q, xk)), "...grj,gkj->...grk", 1)
        out = einsum("...rpm,...pme->...re", pairs.unflatten(w), xv)
        return out[..., :-1], out[..., -1]

    def _weigh(self, r: Array, spec: str, between: int) -> Array:
        """conj(w) for r [..., G, (`between` axes), 2M], so that Re(w . x) is a sum of products of real numbers."""
        if self.mix.shape[-1] == self.modes:
            r = pairs.unflatten(r)
            mix = self.mix.reshape(self.mix.shape[0], *(1,) * between, *self.mix.shape[1:])
            return pairs.flatten(pairs.multiply(mix, r if self.conjugate else pairs.conjugate(r)))
        return einsum(spec, r, self.mix)

    def cut(self, inputs: Inputs, size: int, sequence_axis: str | None) -> DiagonalChunks:
        return DiagonalChunks.cut(self.system, inputs.segments, inputs.v.shape[1], size, sequence_axis)

    def chunked(self, chunks: DiagonalChunks, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        """Two linear attentions around one M x M product, the first giving r and the second weighing with w."""
        q, k, v = chunks.pack(q), chunks.pack(k), chunks.pack(v)
        before_k, xk = chunks.carry(chunks.outer(k), state.Xk)
        weights, reached = self._weights(chunks, q, k, pairs.flatten_rows(before_k))
        # The states of values wait until those of keys are no longer needed.
        reached, v = jax.lax.optimization_barrier((reached, v))
        if self.normalize:
            before_v, moments = chunks.carry(chunks.outer(v), beside(state.Xv, state.X1))
            xv, x1 = apart(moments)
        else:
            v, ones = v[..., :-1], v[..., -1:]
            before_v, xv = chunks.carry(chunks.outer(v), state.Xv)
            x1 = chunks.carry(chunks.outer(ones), state.X1[..., None])[1][..., 0]
        carried = chunks.from_start(einsum("bngrtm,bngme->bngrte", reached, pairs.flatten_rows(before_v)))
        out = einsum("bngrtj,bngje->bngrte", weights, v) + carried
        out = chunks.unpack(out if self.normalize else beside(out, jnp.zeros_like(out[..., 0])))
        return out, InterdomainAttentionState(xk, xv, x1)

    def _weights(self, chunks: DiagonalChunks, q: Array, k: Array, before_k: Array) -> tuple[Array, Array]:
        """What a query weighs the values of its chunk with [B, N, G, R, C, C] and the chunk's start state [..., C, 2M].

        Products with the powers, which are the same in all chunks, have the places inside a chunk in front.
        """
        table = chunks.toeplitz(pairs.flatten(chunks.responses))
        reach = chunks.reach[:, :, None, None, None]
        scores = chunks.by_place(chunks.causal(einsum("bngrtd,bngjd->bngrtj", q, k)))
        # What goes into several products is computed once, and so is its cotangent: hence the barriers.
        carried = jax.lax.optimization_barrier(einsum("bngrtd,bngmd->bngrtm", q, before_k))
        carried = pairs.unflatten(chunks.by_place(chunks.from_start(carried)))
        r = einsum("gtbnrj,gtjm->gtbnrm", scores, table) + pairs.flatten(pairs.multiply(reach, carried))
        w = jax.lax.optimization_barrier(self._weigh(r, "gtbnrj,gkj->gtbnrk", 4))
        weights = chunks.causal(chunks.by_chunk(einsum("gtbnrm,gtjm->gtbnrj", w, table)))
        reached = pairs.multiply(pairs.conjugate(reach), pairs.unflatten(w))
        return weights, chunks.by_chunk(pairs.flatten(reached))

    def summarize(self, inputs: Inputs) -> DiagonalSummary:
        ones = jnp.ones_like(inputs.v[..., 0])
        return summarize_tokens(self.system, jnp.concatenate([inputs.k, beside(inputs.v, ones)], axis=-1), inputs)

    def begin(self, state: Any, inputs: Inputs) -> DiagonalSummary:
        return begin_summary(jnp.concatenate([state.Xk, beside(state.Xv, state.X1)], axis=-1)[:, :, None])

    def end(self, total: DiagonalSummary, inputs: Inputs) -> InterdomainAttentionState:
        x, size = total.X[:, 0, :, 0], inputs.k.shape[-1]
        return InterdomainAttentionState(x[..., :size], *apart(x[..., size:]))

    def read(self, state: DiagonalSummary, q: Array) -> Output:
        size = q.shape[-1]
        x = state.X[:, :, :, 0]
        return self._read(x[..., :size], x[..., size:], q)


def _gram(C: Array, *, conjugate: bool) -> Array:
    """The map from r to conj(C^T C r), or with `conjugate` to conj(C^T conj(C r)); see `_InterdomainAttention.mix`."""
    other = C * jnp.asarray([1, -1] if conjugate else [1, 1], C.dtype).reshape(2, *(1,) * (C.ndim - 2))
    if C.ndim == 3:
        return pairs.conjugate(pairs.multiply(C, other))

    def product(a: Array, b: Array) -> Array:
        return einsum("gpm,gpn->gmn", a, b)

    re = product(C[:, 0], other[:, 0]) - product(C[:, 1], other[:, 1])
    im = product(C[:, 0], other[:, 1]) + product(C[:, 1], other[:, 0])
    signs = jnp.repeat(jnp.asarray([1, -1], C.dtype), C.shape[-1])
    matrix = signs[:, None] * pairs.real_matrix(jnp.stack([re, im], axis=1))
    return matrix * signs if conjugate else matrix


def interdomain_attention(
    q: Array,
    k: Array,
    v: Array,
    A: Array,
    delta: Array,
    C: Array,
    *,
    conjugate: bool = False,
    normalize: bool = False,
    eps: float = 1e-6,
    discretization: Discretization = "zoh",
    segment_ids: Array | None = None,
    initial_state: InterdomainAttentionState | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, InterdomainAttentionState]:
    """Interdomain attention with diagonal modes: o_t = Re sum_m (q_t . U_t[m]) Gamma_t[m].

    [U_t; Gamma_t] = C X_t with X_t = Lam X_{t-1} + Bbar [k_t; v_t]^T, M complex modes per head. With w_t = (C^T C) r_t
    and r_t[n] = q_t . X^k_t[n] it equals two linear attentions around one M x M product, which is what the scan
    computes; it needs no array of T M (D + E) elements. q, k and v are features: neither normalised nor scaled here.

    Args:
        q: features of queries xi(q), [B, T, H, D], bfloat16, float32 or float64.
        k: features of keys, [B, T, G, D]; G divides H and query head h reads head h // (H / G).
        v: values, [B, T, G, E].
        A: continuous poles, [Hs, 2, M], real parts (below 0) and imaginary parts in radians per unit of time, float32;
            Hs is H, or G where the query heads of a key/value head share modes and state.
        delta: step size of a token in units of time, above 0, float32, [Hs].
        C: mixing of the modes, float32, [Hs, 2, M, M] (real parts, imaginary parts), or [Hs, 2, M] for a diagonal.
        conjugate: read conj(q . U) instead of q . U.
        normalize: divide by Re sum_m (q_t . U_t[m]) eta_t[m] + `eps`, eta the projection of the constant 1. The
            denominator can change sign; it is neither clamped nor made positive.
        eps: added to the denominator, > 0.
        discretization: "zoh" (inputs constant on a step) or "bilinear".
        segment_ids: int32 [B, T]; 0 is padding (output 0, no effect, and no time passes), a new id resets the state.
        initial_state: state of the tokens before the first; belongs to the first segment. None: nothing seen.
        implementation: "serial", "scan", "pallas", or None for the fastest available.
        chunk_size: tokens per chunk of the scan form; 1 is the associative scan over single tokens.
        sequence_axis: shard_map axis over which T is split ("scan" only).

    Returns:
        out [B, T, H, E] in v's dtype, and the final state. The state does not depend on C or the options.

    Raises:
        ValueError: for wrong shapes, dtypes, head counts, states or options.
        NotImplementedError: when `implementation` cannot serve the call.

    Source: Kiyohara et al., "Interdomain Attention: Beyond Token-Level Key-Value Memory", arXiv 2605.24330.
    """
    q, k, v, A, delta, C, segment_ids = map(from_numpy, (q, k, v, A, delta, C, segment_ids))
    form = choose("interdomain_attention", implementation, chunk_size, sequence_axis).form
    check_flag("conjugate", conjugate)
    check_flag("normalize", normalize)
    check_positive("eps", eps)
    sizes = check_inputs(q, k, v, None, segment_ids)
    heads, modes = check_modes(A, delta, discretization)
    if heads not in (sizes.heads, sizes.groups):
        fail("A", f"{sizes.heads} heads (those of q) or {sizes.groups} (those of k)", f"shape {list(A.shape)}")
    matrix = getattr(C, "ndim", None) != 3
    shape = "[Hs, 2, M, M] or [Hs, 2, M]"
    check_array("C", C, shape, (heads, 2, modes, modes) if matrix else (heads, 2, modes), GATE_DTYPES)
    sizes = dataclasses.replace(sizes, groups=heads, dtype=compute_dtype(q, k, v, A, delta, C))
    mixer = _InterdomainAttention(modes, conjugate, discretization, normalize)
    parameters = tuple(p.astype(sizes.dtype) for p in (A, delta, C))
    arrays = (q, k, v, None, segment_ids, initial_state, parameters)
    return run_checked(mixer, sizes, form, arrays, eps if normalize else None, chunk_size, sequence_axis)
