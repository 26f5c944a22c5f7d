"""Third-order linear attention (HLA3), (((W W^T) o L) W) V with W = L o (Q K^T), and the paper's printed variant."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from jaxmix.arrays import Array, einsum, fail
from jaxmix.mixers.chunking import Chunks, apart, beside
from jaxmix.mixers.dispatch import Implementation
from jaxmix.mixers.hla.hla3_summary import HLA3PrintedSummary, HLA3State, HLA3Summary
from jaxmix.mixers.linear_attention import outer, read_rows
from jaxmix.mixers.recurrence import Output, Recurrence, run
from jaxmix_kernels.links import HLA3


@dataclasses.dataclass(frozen=True)
class _HLA3(Recurrence):
    """The exact mask."""

    name = "hla3"
    state = HLA3State
    summary = HLA3Summary

    def step(self, state: Any, q: Array, k: Array, v: Array, a: Array) -> tuple[Any, Output]:
        moments = _add_token(state, q, k, v, a)
        sq = einsum("bgdf,bgrf->bgrd", moments["S"], q)
        qp, qm = read_rows(q, moments["P"][:, :, None], moments["m"][:, :, None])
        cube = (a * a * a)[:, :, None]
        f = cube[..., None, None] * state.F + outer(sq, qp)
        f1 = cube[..., None] * state.f + sq * qm[..., None]
        return HLA3State(**moments, F=f, f=f1), read_rows(q, f, f1)

    def chunked(self, chunks: Chunks, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        """LA(q, kt, vt; a^3) with kt = LA(q, k, k; a) and vt = LA(q, k, v; a)."""
        initials = state.S.mT, chunks.beside(state.P, state.m), chunks.beside(state.F, state.f)
        out, (s, p, f) = chunks.chain(HLA3, q, k, v, initials)
        return out, HLA3State(s.mT, chunks.final(q, q, state.Q), *chunks.apart(p), *chunks.apart(f))

    def read(self, state: Any, q: Array) -> Output:
        return state.read(q)


@dataclasses.dataclass(frozen=True)
class _HLA3Printed(Recurrence):
    """The triples that the paper's Algorithm 3 sums; without decay."""

    name = "hla3_printed"
    state = HLA3State
    summary = HLA3PrintedSummary

    def step(self, state: Any, q: Array, k: Array, v: Array, a: Array) -> tuple[Any, Output]:
        moments = _add_token(state, q, k, v, a)
        own, value = k[:, :, None], v[:, :, None]
        qk = einsum("bgrd,bgd->bgr", q, k)[..., None]
        sq = qk * einsum("bgdf,bgrf->bgrd", state.S, q)
        kqk = einsum("bgd,bgrdf,bgf->bgr", k, state.Q, k)[..., None] + qk * qk
        qp, qm = read_rows(q, state.P[:, :, None], state.m[:, :, None])
        f = state.F + outer(sq, value) + outer(own, kqk * value + qk * qp)
        f1 = state.f + sq + own * (kqk + qk * qm[..., None])
        return HLA3State(**moments, F=f, f=f1), read_rows(q, f, f1)

    def chunked(self, chunks: Chunks, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        """LA(q, LAx(q, k, k), (q.k) v) + LA(q, k, (k.LAx(k, q, q) + (q.k)^2) v + (q.k) LAx(q, k, v)).

        LAx leaves the current token out. Both sums share the carried matrix F, which starts in the second.
        """
        qk = einsum("bngrcd,bngcd->bngrc", q, k)[..., None]
        before = chunks.scores(q, k, strict=True)
        upto = chunks.scores(q, k)
        kt, s = chunks.linear(q, k, k, state.S.mT, strict=True, scores=before)
        kq, q2 = chunks.linear(k, q, q, state.Q, strict=True)
        kqk = einsum("bngrcd,bngcd->bngrc", kq, k)[..., None] + qk * qk
        scores = chunks.scores(q, kt)

        vt, p = chunks.linear(q, k, v, beside(state.P, state.m), strict=True, scores=before)
        value = v[:, :, :, None]
        f = beside(state.F, state.f)
        first, f_first = chunks.linear(q, kt, qk * value, jnp.zeros_like(f), scores=scores)
        rest, f = chunks.linear(q, k, kqk * value + qk * vt, f, scores=upto)
        return first + rest, HLA3State(s.mT, q2, *apart(p), *apart(f_first + f))

    def read(self, state: Any, q: Array) -> Output:
        return state.read(q)


def _add_token(state: Any, q: Array, k: Array, v: Array, a: Array) -> dict[str, Array]:
    return {
        "S": a[..., None, None] * state.S + outer(k, k),
        "Q": a[..., None, None, None] * state.Q + outer(q, q),
        "P": a[..., None, None] * state.P + outer(k, v),
        "m": a[..., None] * state.m + k,
    }


def hla3(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    *,
    mask: Literal["exact", "printed"] = "exact",
    normalize: bool = False,
    eps: float = 1e-6,
    segment_ids: Array | None = None,
    initial_state: HLA3State | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, HLA3State]:
    """Third-order linear attention, strictly causal.

    o_t = sum_{u<=t} sum_{i<=u} sum_{j<=u} c(i, t) c(u, t) c(j, t) (q_t . k_i) (q_u . k_i) (q_u . k_j) v_j with
    c(s, t) = a_{s+1} ... a_t; without decay (((W W^T) o L) W) V, W = L o (Q K^T), L lower triangular with its
    diagonal. It equals LA(q, kt, vt; a^3) with kt = LA(q, k, k; a) and vt = LA(q, k, v; a). Neither q nor k is
    normalised or scaled.

    Args:
        q: queries, [B, T, H, D], bfloat16, float32 or float64.
        k: keys, [B, T, G, D]; G divides H and query head h reads head h // (H / G).
        v: values, [B, T, G, E].
        log_decay: g_t = log a_t <= 0, natural log per token, float32, [B, T, H] or [B, T, G]; [H] or [G] for a
            constant per head; None for no decay.
        mask: "exact" is the masked product above. "printed" is what the paper's Algorithm 3 computes: the triples
            (i, u, j) whose maximum is reached at least twice; without decay only. Its token scan (chunk_size=1)
            carries the paper's segment maps and needs O(T D^3 E) memory.
        normalize: divide by the same sum over v = 1 plus `eps`. The denominator can change sign; it is neither
            clamped nor made positive.
        eps: added to the denominator, > 0.
        segment_ids: int32 [B, T]; 0 is padding (output 0, no effect), a new id resets the state.
        initial_state: state of the tokens before the first; belongs to the first segment. None: nothing seen.
        implementation: "serial", "scan", "pallas", or None for the fastest available.
        chunk_size: tokens per chunk of the scan form; 1 is the associative scan over single tokens.
        sequence_axis: shard_map axis over which T is split ("scan" only).

    Returns:
        out [B, T, H, E] in v's dtype, and the final state, with Hs = H if log_decay has H heads, else G. The state
        depends on `mask`.

    Raises:
        ValueError: for wrong shapes, dtypes, head counts, states or options.
        NotImplementedError: for mask="printed" with a decay, and when `implementation` cannot serve the call.

    Source: Zhang et al., "Higher-order Linear Attention", arXiv 2510.27258, section 7; the errata page says how its
    Theorem 7.1 differs from the masked product.
    """
    if mask not in ("exact", "printed"):
        fail("mask", "'exact' or 'printed'", repr(mask))
    if mask == "printed" and log_decay is not None:
        raise NotImplementedError(
            "hla3: mask='printed' is consistent without decay only; pass log_decay=None, or mask='exact' with a decay"
        )
    return run(
        _HLA3() if mask == "exact" else _HLA3Printed(),
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
