"""All gradients of decayed linear attention by its forward kernel, for targets without a kernel of gradients.

With c(s, t) the decay from token s to t of one segment and X_0 the initial state,

    o_t = sum_{s<=t} c(s, t) (q_t . k_s) v_s + c(0, t) X_0^T q_t,      X_T = c(0, T) X_0 + sum_s c(s, T) k_s v_s^T

and each gradient is another decayed attention, forward or reversed in time, of do and dX (that of X_T):

    dq = attention(do, v, k; X_0^T),   dk = reversed(v, do, q; dX^T),   dv = reversed(k, q, do; dX), which ends in dX_0

The log decay g_r is in every pair s < r <= t, so within a segment

    dg_r = sum_{t>=r} (q_t . dq_t - k_t . dk_t) + <dX, X_T>

where pairs on the same side of r cancel, and the last term belongs to the last segment.
"""

import jax

from jaxmix_kernels.decays import BackwardResult, ChunkDecays
from jaxmix_kernels.linear_attention.pieces import join_pieces, last_piece, split_decays, split_tokens
from jaxmix_kernels.linear_attention.primitive import attend, piece_ends, piece_starts
from jaxmix_kernels.linear_attention.steps import steps_gradient
from jaxmix_kernels.target import Target

Array = jax.Array


def composed_gradients(
    target: Target,
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    decays: ChunkDecays | None,
    initial: Array,
    final: Array,
    d_final: Array,
    *,
    pieces: int,
    starts: Array | None,
    sums: bool,
) -> BackwardResult:
    """Gradients for each of H heads; that of the log decays, summed over heads that share them.

    Args:
        target: what the kernels are made for.
        q: queries [B, T, H, D].
        k: keys [B, T, Hk, D].
        v: values [B, T, Hv, E].
        d_out: gradients of outputs, [B, T, H, E].
        decays: of the whole sequences; None for neither decay nor segments.
        initial: the state before the first token, [B, Hs, D, E].
        final: the state after the last one, [B, Hf, D, E].
        d_final: gradient of `final` for every head that shares it.
        pieces: P, into which sequences are cut.
        starts: state at the start of every piece, as `piece_starts` gives it; None to compute it.
        sums: the gradient of the log decays is wanted.
    """
    qs, ks, vs, ds = (split_tokens(x, pieces) for x in (q, k, v, d_out))
    cut = split_decays(decays, pieces)
    if starts is None:
        starts = piece_starts(target, ks, vs, decays, initial, q.shape[2], pieces)
    ends = piece_ends(target, qs, ds, decays, d_final, pieces)
    q_weights, k_weights = (qs, ks) if sums else (None, None)
    by_query = attend(target, ds, vs, ks, cut, starts.mT, weights=q_weights)
    by_key = attend(target, vs, ds, qs, cut, ends.mT, weights=k_weights, reverse=True)
    by_value = attend(target, ks, qs, ds, cut, ends, reverse=True)
    assert by_query.out is not None
    assert by_key.out is not None
    assert by_value.out is not None
    d_steps = None
    if sums:
        assert decays is not None
        assert by_query.dots is not None
        assert by_key.dots is not None
        d_steps = steps_gradient(decays, pieces, by_query.dots, by_key.dots, starts, ends, final)
    return BackwardResult(
        join_pieces(by_query.out, pieces),
        join_pieces(by_key.out, pieces),
        join_pieces(by_value.out, pieces),
        last_piece(by_value.final, pieces, reverse=True),
        d_steps,
    )
