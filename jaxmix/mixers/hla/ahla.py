"""Asymmetric second-order linear attention (AHLA), ((W W) o L) V with W = L o (Q K^T)."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, einsum
from jaxmix.mixers.chunking import Chunks
from jaxmix.mixers.dispatch import Implementation
from jaxmix.mixers.linear_attention import outer, read_rows, token_decay
from jaxmix.mixers.recurrence import Output, Recurrence, run
from jaxmix.mixers.state import KeyValueState
from jaxmix_kernels.links import AHLA


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AHLAState(KeyValueState):
    """P = sum c k v^T [B, Hs, D, E], m = sum c k [B, Hs, D], E = sum c k (q^T P) [B, H, D, E], n [B, H, D]."""

    shared = ("P", "m")
    axes = ("DE", "D", "DE", "D")
    P: Array
    m: Array
    E: Array
    n: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AHLASummary:
    """What a segment does to an AHLA state; R = sum k q^T is flat, it never decays.

    R [..., D, D], P [..., D, E], m [..., D], E [..., D, E], n [..., D], decay product rho [...]. A then B:
    R = R_A + R_B, P = rho_B P_A + P_B, E = rho_B E_A + E_B + rho_B R_B P_A; m and n likewise with v = 1.
    """

    R: Array
    P: Array
    m: Array
    E: Array
    n: Array
    rho: Array

    @classmethod
    def token_summary(cls, q: Array, k: Array, v: Array, log_decay: Array | None = None) -> Self:
        """The summary of single tokens: q, k [..., D], v [..., E], log_decay [...]."""
        qk = einsum("...d,...d->...", q, k)[..., None]
        return cls(outer(k, q), outer(k, v), k, outer(k, qk * v), qk * k, token_decay(k, log_decay))

    @classmethod
    def identity(cls, shape: tuple[int, ...], key_size: int, value_size: int, dtype: Dtype = jnp.float32) -> Self:
        """The summary of an empty segment with leading axes `shape`."""
        square = jnp.zeros((*shape, key_size, key_size), dtype)
        matrix = jnp.zeros((*shape, key_size, value_size), dtype)
        vector = jnp.zeros((*shape, key_size), dtype)
        return cls(square, matrix, vector, matrix, vector, jnp.ones(shape, dtype))

    @staticmethod
    def combine(a: "AHLASummary", b: "AHLASummary") -> "AHLASummary":
        """The summary of a's segment followed by b's."""
        rho = b.rho[..., None]
        rho2 = rho[..., None]
        return AHLASummary(
            R=a.R + b.R,
            P=rho2 * a.P + b.P,
            m=rho * a.m + b.m,
            E=rho2 * (a.E + einsum("...df,...fe->...de", b.R, a.P)) + b.E,
            n=rho * (a.n + einsum("...df,...f->...d", b.R, a.m)) + b.n,
            rho=a.rho * b.rho,
        )

    def read(self, q: Array) -> Output:
        """q^T E [..., E] and the denominator q . n [...]."""
        return read_rows(q, self.E, self.n)


@dataclasses.dataclass(frozen=True)
class _AHLA(Recurrence):
    name = "ahla"
    state = AHLAState
    summary = AHLASummary

    def step(self, state: Any, q: Array, k: Array, v: Array, a: Array) -> tuple[Any, Output]:
        p = a[..., None, None] * state.P + outer(k, v)
        m = a[..., None] * state.m + k
        qp, qm = read_rows(q, p[:, :, None], m[:, :, None])
        k = k[:, :, None]
        e = a[..., None, None, None] * state.E + outer(k, qp)
        n = a[..., None, None] * state.n + k * qm[..., None]
        return AHLAState(p, m, e, n), read_rows(q, e, n)

    def chunked(self, chunks: Chunks, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        """LA(q, k, LA(q, k, v; a); a): the carried matrices are P and E."""
        initials = chunks.beside(state.P, state.m), chunks.beside(state.E, state.n)
        out, (inner, second) = chunks.chain(AHLA, q, k, v, initials)
        return out, AHLAState(*chunks.apart(inner), *chunks.apart(second))

    def read(self, state: Any, q: Array) -> Output:
        return state.read(q)


def ahla(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
    segment_ids: Array | None = None,
    initial_state: AHLAState | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, AHLAState]:
    """Asymmetric second-order linear attention, strictly causal.

    o_t = sum_{j<=i<=t} c(j, t) (q_t . k_i) (q_i . k_j) v_j with c(s, t) = a_{s+1} ... a_t; without decay
    ((W W) o L) V, W = L o (Q K^T), L lower triangular with its diagonal. It equals linear attention applied twice,
    LA(q, k, LA(q, k, v; a); a). Neither q nor k is normalised or scaled.

    Args:
        q: queries, [B, T, H, D], bfloat16, float32 or float64.
        k: keys, [B, T, G, D]; G divides H and query head h reads head h // (H / G).
        v: values, [B, T, G, E].
        log_decay: g_t = log a_t <= 0, natural log per token, float32, [B, T, H] or [B, T, G]; [H] or [G] for a
            constant per head; None for no decay.
        normalize: divide by the same sum over v = 1 plus `eps`. The denominator can change sign; it is neither
            clamped nor made positive.
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

    Source: Zhang et al., "Higher-order Linear Attention", arXiv 2510.27258, section 6; its decayed operator is
    corrected as the errata page explains.
    """
    return run(
        _AHLA(),
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
