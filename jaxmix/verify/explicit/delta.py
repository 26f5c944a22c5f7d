"""The delta rules as explicit sums: every written value, and what all later keys took from it.

Shapes: q [B, T, Hq, D], k [B, T, Hk, D], v [B, T, Hv, E], beta [B, T, H], log_decay None, [H] or [B, T, H]; outputs
[B, T, H, E]. Head h reads head h // (H / its number) of q, k and v. Source: arXiv 2412.06464.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]


def delta_rule(q: ArrayLike, k: ArrayLike, v: ArrayLike, beta: ArrayLike, *, scale: float | None = None) -> Float64:
    """`gated_delta_rule` with a = 1."""
    return gated_delta_rule(q, k, v, None, beta, scale=scale)


def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike | None,
    beta: ArrayLike,
    *,
    scale: float | None = None,
) -> Float64:
    """o_t = scale sum_{j <= t} beta_j (q_t . M_t ... M_{j+1} k_j) v_j with M_i = a_i (I - beta_i k_i k_i^T)."""
    strengths = np.asarray(beta, np.float64)
    heads = strengths.shape[2]
    queries, keys, values = (_spread(x, heads) for x in (q, k, v))
    gate = np.zeros(heads) if log_decay is None else np.asarray(log_decay, np.float64)
    decay = np.exp(np.broadcast_to(gate, strengths.shape))
    size = keys.shape[-1]
    taken = strengths[..., None, None] * keys[..., :, None] * keys[..., None, :]
    forget = decay[..., None, None] * (np.eye(size) - taken)
    out = np.zeros((*strengths.shape, values.shape[-1]))
    for t in range(strengths.shape[1]):
        row = queries[:, t]
        for j in range(t, -1, -1):
            weight = strengths[:, j] * np.einsum("bhd,bhd->bh", row, keys[:, j])
            out[:, t] += weight[..., None] * values[:, j]
            row = np.einsum("bhd,bhde->bhe", row, forget[:, j])
    return out * (size**-0.5 if scale is None else scale)


def _spread(x: ArrayLike, heads: int) -> Float64:
    x = np.asarray(x, np.float64)
    return np.repeat(x, heads // x.shape[2], axis=2)
