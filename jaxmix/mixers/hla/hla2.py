"""Symmetric second-order linear attention (HLA2), ((W W^T) o L) V with W = L o (Q K^T)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, check_flag, einsum, fail
from jaxmix.mixers.chunking import Chunks
from jaxmix.mixers.dispatch import Implementation
from jaxmix.mixers.hla.hla2_summary import HLA2PrintedSummary, HLA2State, HLA2Summary, read_hla2
from jaxmix.mixers.linear_attention import outer
from jaxmix.mixers.recurrence import Output, Recurrence, run
from jaxmix_kernels.links import HLA2

DecayForm = Literal["masked", "printed"]


@dataclasses.dataclass(frozen=True)
class _HLA2(Recurrence):
    name = "hla2"
    state = HLA2State
    summary = HLA2Summary
    decay_form: ClassVar[DecayForm] = "masked"
    ridge: float
    masked: bool

    def step(self, state: Any, q: Array, k: Array, v: Array, a: Array) -> tuple[Any, Output]:
        kc = einsum("bgd,bgrde->bgre", k, state.C)
        km = einsum("bgd,bgrd->bgr", k, state.m)
        k = k[:, :, None]
        a = a[:, :, None]
        if self.decay_form == "masked":
            kept, kc, km = a * a, a[..., None] * kc, a * km
        else:
            kept = a
        state = HLA2State(
            S=a[..., None] * state.S + outer(k[:, :, 0], k[:, :, 0]),
            C=a[..., None, None] * state.C + outer(q, v[:, :, None]),
            m=a[..., None] * state.m + q,
            G=kept[..., None, None] * state.G + outer(k, kc),
            h=kept[..., None] * state.h + k * km[..., None],
        )
        return state, self.read(dataclasses.replace(state, S=state.S[:, :, None]), q)

    def chunked(self, chunks: Chunks, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        """Masked, LA(q, kt, v; a^2) with kt = LA(q, k, k; a), that is S_t q_t."""
        c, g = chunks.beside(state.C, state.m), chunks.beside(state.G, state.h)
        c_final = chunks.final(q, v, c)

        def all_pairs() -> Any:
            # q^T S here and S q above differ when a caller's initial S is not symmetric.
            return chunks.linear(chunks.linear(q, k, k, state.S)[0], q, v, c)[0]

        if self.decay_form == "printed":
            s = chunks.final(k, k, state.S.mT)
            values, _ = chunks.linear(k, q, v, c, strict=True)
            subtracted, g = chunks.linear(q, k, values, g)
            out = _minus(all_pairs(), subtracted)
        else:
            # F = S C - G, the part of S C with i <= j, streams without cancellation; G follows from it.
            f = g if chunks.fresh else _minus(_apply(state.S, c), g)
            if self.masked:
                out, (s, f) = chunks.chain(HLA2, q, k, v, (state.S.mT, f))
            else:
                kt, s = chunks.linear(q, k, k, state.S.mT)
                out, f = all_pairs(), chunks.final(kt, v, f, power=2)
            g = _minus(_apply(s.mT, c_final), f)
        if self.ridge:
            out = jax.tree.map(lambda x, y: x + self.ridge * y, out, chunks.linear(q, q, v, c)[0])
        return out, HLA2State(s.mT, *chunks.apart(c_final), *chunks.apart(g))

    def read(self, state: Any, q: Array) -> Output:
        return read_hla2(state, q, ridge=self.ridge, masked=self.masked)


class _HLA2Printed(_HLA2):
    """The paper's decayed recurrence."""

    name = "hla2_printed"
    summary = HLA2PrintedSummary
    decay_form = "printed"


def _apply(s: Array, moments: Any) -> Any:
    """S C with S [B, G, D, D] shared by the R query heads of every C [B, G, R, D, E]."""
    return jax.tree.map(lambda c: einsum("bgdf,bgrfe->bgrde", s, c), moments)


def _minus(a: Any, b: Any) -> Any:
    """The difference of values, or of moments, and of those of their normaliser."""
    return jax.tree.map(jnp.subtract, a, b)


def hla2(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
    ridge: float = 0.0,
    masked: bool = True,
    decay_form: DecayForm = "masked",
    segment_ids: Array | None = None,
    initial_state: HLA2State | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, HLA2State]:
    """Symmetric second-order linear attention, strictly causal.

    o_t = sum_{j<=t} sum_{i<=j} c(i, t) c(j, t) (q_t . k_i) (q_j . k_i) v_j with c(s, t) = a_{s+1} ... a_t; without
    decay ((W W^T) o L) V, W = L o (Q K^T), L lower triangular with its diagonal. It equals two chained linear
    attentions, LA(q, kt, v; a^2) with kt = LA(q, k, k; a). Neither q nor k is normalised or scaled.

    Args:
        q: queries, [B, T, H, D], bfloat16, float32 or float64.
        k: keys, [B, T, G, D]; G divides H and query head h reads head h // (H / G).
        v: values, [B, T, G, E].
        log_decay: g_t = log a_t <= 0, natural log per token, float32, [B, T, H] or [B, T, G]; [H] or [G] for a
            constant per head; None for no decay.
        normalize: divide by the same sum over v = 1 plus `eps`. The denominator can change sign; it is neither
            clamped nor made positive.
        eps: added to the denominator, > 0.
        ridge: lam >= 0; S + lam I in place of S in the read-out, which adds lam LA(q, q, v; a) and, as in the paper,
            leaves the exact masked form.
        masked: False reads q_t^T S_t C_t, all pairs (i, j) of earlier tokens, still causal.
        decay_form: "masked" is the exact masked product above; "printed" is the paper's decayed recurrence
            G_t = a_t G_{t-1} + k_t (k_t^T C_{t-1}), which is not (see the errata page); equal without decay.
        segment_ids: int32 [B, T]; 0 is padding (output 0, no effect), a new id resets the state.
        initial_state: state of the tokens before the first; belongs to the first segment. None: nothing seen.
        implementation: "serial", "scan", "pallas", or None for the fastest available.
        chunk_size: tokens per chunk of the scan form; 1 is the associative scan over single tokens.
        sequence_axis: shard_map axis over which T is split ("scan" only).

    Returns:
        out [B, T, H, E] in v's dtype, and the final state, with Hs = H if log_decay has H heads, else G. The state
        depends on `decay_form`, not on the other options.

    Raises:
        ValueError: for wrong shapes, dtypes, head counts, states or options.
        NotImplementedError: when `implementation` cannot serve the call.

    Source: Zhang et al., "Higher-order Linear Attention", arXiv 2510.27258, sections 3 and 4.
    """
    if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not ridge >= 0:
        fail("ridge", "a number >= 0", repr(ridge))
    check_flag("masked", masked)
    if decay_form not in ("masked", "printed"):
        fail("decay_form", "'masked' or 'printed'", repr(decay_form))
    if decay_form == "printed" and not masked:
        fail("decay_form", "'masked' with masked=False (the unmasked read-out has no G)", repr(decay_form))
    return run(
        (_HLA2 if decay_form == "masked" else _HLA2Printed)(float(ridge), masked),
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
