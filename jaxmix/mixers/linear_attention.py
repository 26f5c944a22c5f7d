"""Causal linear attention with decay: o_t = q_t^T P_t, P_t = a_t P_{t-1} + k_t v_t^T."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, einsum
from jaxmix.mixers.chunking import Chunks
from jaxmix.mixers.dispatch import Implementation
from jaxmix.mixers.prefix import decayed_sum
from jaxmix.mixers.recurrence import Output, Recurrence, run
from jaxmix.mixers.state import KeyValueState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearAttentionState(KeyValueState):
    """P = sum c k v^T [B, Hs, D, E] and m = sum c k [B, Hs, D]; Hs as in `linear_attention`."""

    shared = ("P", "m")
    axes = ("DE", "D")
    P: Array
    m: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearSummary:
    """What a segment does to a linear attention state: P [..., D, E], m [..., D], decay product rho [...].

    A then B: P = rho_B P_A + P_B, m = rho_B m_A + m_B, rho = rho_A rho_B.
    """

    P: Array
    m: Array
    rho: Array

    @classmethod
    def token_summary(cls, q: Array, k: Array, v: Array, log_decay: Array | None = None) -> Self:
        """The summary of single tokens, k [..., D], v [..., E], log_decay [...]; q is not needed."""
        return cls(outer(k, v), k, token_decay(k, log_decay))

    @classmethod
    def identity(cls, shape: tuple[int, ...], key_size: int, value_size: int, dtype: Dtype = jnp.float32) -> Self:
        """The summary of an empty segment with leading axes `shape`."""
        zeros = (jnp.zeros((*shape, key_size, value_size), dtype), jnp.zeros((*shape, key_size), dtype))
        return cls(*zeros, jnp.ones(shape, dtype))

    @staticmethod
    def combine(a: "LinearSummary", b: "LinearSummary") -> "LinearSummary":
        """The summary of a's segment followed by b's."""
        rho, (p, m) = decayed_sum((a.rho, (a.P, a.m)), (b.rho, (b.P, b.m)))
        return LinearSummary(p, m, rho)

    def read(self, q: Array) -> Output:
        """q^T P [..., E] and the denominator q . m [...]."""
        return read_rows(q, self.P, self.m)


def outer(a: Array, b: Array) -> Array:
    """a b^T over the last axes: [..., D] and [..., E] to [..., D, E]."""
    return a[..., :, None] * b[..., None, :]


def token_decay(like: Array, log_decay: Array | None) -> Array:
    """exp(log_decay), or ones over the leading axes of `like`."""
    return jnp.ones(like.shape[:-1], like.dtype) if log_decay is None else jnp.exp(log_decay).astype(like.dtype)


def read_rows(q: Array, matrix: Array, vector: Array) -> Output:
    """q^T X [..., E] and q . x [...], leading axes broadcast."""
    return einsum("...d,...de->...e", q, matrix), einsum("...d,...d->...", q, vector)


@dataclasses.dataclass(frozen=True)
class _LinearAttention(Recurrence):
    name = "linear_attention"
    state = LinearAttentionState
    summary = LinearSummary

    def step(self, state: Any, q: Array, k: Array, v: Array, a: Array) -> tuple[Any, Output]:
        state = LinearAttentionState(a[..., None, None] * state.P + outer(k, v), a[..., None] * state.m + k)
        return state, read_rows(q, state.P[:, :, None], state.m[:, :, None])

    def chunked(self, chunks: Chunks, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        out, moments = chunks.linear(q, k, v, chunks.beside(state.P, state.m))
        return out, LinearAttentionState(*chunks.apart(moments))

    def read(self, state: Any, q: Array) -> Output:
        return state.read(q)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
    segment_ids: Array | None = None,
    initial_state: LinearAttentionState | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, LinearAttentionState]:
    """Causal linear attention, o_t = sum_{j<=t} c(j, t) (q_t . k_j) v_j with c(j, t) = a_{j+1} ... a_t.

    Neither q nor k is normalised or scaled.

    Args:
        q: queries, [B, T, H, D], bfloat16, float32 or float64.
        k: keys, [B, T, G, D]; G divides H and query head h reads head h // (H / G).
        v: values, [B, T, G, E].
        log_decay: g_t = log a_t <= 0, natural log per token, float32, [B, T, H] or [B, T, G]; [H] or [G] for a
            constant per head; None for no decay.
        normalize: divide by the same sum over v = 1 plus `eps`. The denominator has the sign of the q . k and is
            neither clamped nor made positive.
        eps: added to the denominator, > 0.
        segment_ids: int32 [B, T]; 0 is padding (output 0, no effect), a new id resets the state.
        initial_state: state of the tokens before the first; belongs to the first segment. None: nothing seen.
        implementation: "serial", "scan", "pallas", or None for the fastest available.
        chunk_size: tokens per chunk of the scan form; 1 is the associative scan over single tokens.
        sequence_axis: shard_map axis over which T is split ("scan" only).

    Returns:
        out [B, T, H, E] in v's dtype, and the final state, with Hs = H if log_decay has H heads, else G.

    Raises:
        ValueError: for wrong shapes, dtypes, head counts, states or options.
        NotImplementedError: when `implementation` cannot serve the call.

    Source: Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236; with decay as in arXiv 2510.27258.
    """
    return run(
        _LinearAttention(),
        q,
        k,
        v,
        log_decay,
        normalize=normalize,
        eps=eps,
        segment_ids=segment_ids,
        initial_state=initial_state,
        implementation=implementation,
        chunk_size=chunk_size,
        sequence_axis=sequence_axis,
    )
