"""Linear attention, SSD and HLA as explicit sums, in numpy float64.

Each mixer is an explicit matrix A[t, j] (the weight of value j in output t), itself a sum over token pairs or triples,
and then

    o_t = sum_j A[t, j] v_j,        den_t = sum_j A[t, j],        normalised: o_t / (den_t + eps).

c(s, t) = a_{s+1} ... a_t is the decay from token s to token t, a_t = exp(log_decay_t). Source: Zhang, Qin, Wang, Gu,
"Higher-order Linear Attention", arXiv 2510.27258. Cost grows like T^3 (third order: T^4); use some tens of tokens.

Shapes: q [B, T, H, D], k [B, T, G, D], v [B, T, G, E] with H % G == 0; log_decay None, [H], [G], [B, T, H] or
[B, T, G]; outputs [B, T, H, E]. Query head h reads key/value head h // (H // G).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike | None = None,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
) -> Float64:
    """A[t, j] = c(j, t) (q_t . k_j), j <= t."""
    queries, keys, values, c = _by_head(q, k, v, log_decay)
    weights = c * _dots(queries, keys)
    return _read(weights, values, normalize=normalize, eps=eps)


def ssd(x: ArrayLike, dt: ArrayLike, A: ArrayLike, B: ArrayLike, C: ArrayLike, D: ArrayLike | None = None) -> Float64:
    """A[t, j] = c(j, t) dt_j (C_t . B_j), a_t = exp(dt_t A), values x [B, T, H, E], and D x_t beside the sum.

    dt is [B, T, H], A and D [H], B and C [B, T, G, N]. Source: arXiv 2405.21060.
    """
    step, values = np.asarray(dt, np.float64), np.asarray(x, np.float64)
    readouts, maps = (np.repeat(np.asarray(y), values.shape[2] // np.shape(y)[2], axis=2) for y in (C, B))
    y = linear_attention(readouts, maps, step[..., None] * values, step * np.asarray(A, np.float64))
    return y if D is None else y + np.asarray(D, np.float64)[:, None] * values


def hla2(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike | None = None,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
    ridge: float = 0.0,
    masked: bool = True,
    decay_form: Literal["masked", "printed"] = "masked",
) -> Float64:
    """Second order, symmetric: a sum over token pairs (i, j) for every t.

    masked:    A[t, j] = sum_{i <= j} c(i, t) c(j, t) (q_t . k_i) (q_j . k_i), j <= t
    unmasked:  the same over all i <= t
    printed:   unmasked minus sum_{j < i <= t} c(i, t) c(j, i - 1) (q_t . k_i) (q_j . k_i), the paper's recurrence
    ridge:     adds ridge * c(j, t) (q_t . q_j)
    """
    queries, keys, values, c = _by_head(q, k, v, log_decay)
    qk = _dots(queries, keys)
    length = qk.shape[-1]
    weights = np.zeros_like(qk)
    for t in range(length):
        for j in range(t + 1):
            for i in range(t + 1):
                pair = qk[..., t, i] * qk[..., j, i]
                if i <= j or not masked:
                    weights[..., t, j] += c[..., t, i] * c[..., t, j] * pair
                elif decay_form == "printed":
                    weights[..., t, j] += (c[..., t, i] * c[..., t, j] - c[..., t, i] * c[..., i - 1, j]) * pair
    weights += ridge * c * _dots(queries, queries)
    return _read(weights, values, normalize=normalize, eps=eps)


def ahla(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike | None = None,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
) -> Float64:
    """Second order, asymmetric: A[t, j] = sum_{j <= i <= t} c(j, t) (q_t . k_i) (q_i . k_j)."""
    queries, keys, values, c = _by_head(q, k, v, log_decay)
    qk = _dots(queries, keys)
    length = qk.shape[-1]
    weights = np.zeros_like(qk)
    for t in range(length):
        for j in range(t + 1):
            for i in range(j, t + 1):
                weights[..., t, j] += c[..., t, j] * qk[..., t, i] * qk[..., i, j]
    return _read(weights, values, normalize=normalize, eps=eps)


def hla3(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    log_decay: ArrayLike | None = None,
    *,
    mask: Literal["exact", "printed"] = "exact",
    normalize: bool = False,
    eps: float = 1e-6,
) -> Float64:
    """Third order: a sum over token triples (i, u, j) for every t.

    A[t, j] = sum_{i, u <= t, kept} c(i, t) c(u, t) c(j, t) (q_t . k_i) (q_u . k_i) (q_u . k_j)

    exact keeps i <= u and j <= u (the masked product); printed keeps the triples whose maximum is reached at least
    twice (what Algorithm 3 of the paper computes, without decay).
    """
    queries, keys, values, c = _by_head(q, k, v, log_decay)
    qk = _dots(queries, keys)
    length = qk.shape[-1]
    weights = np.zeros_like(qk)
    for t in range(length):
        i, u, j = np.ogrid[: t + 1, : t + 1, : t + 1]
        if mask == "exact":
            kept = (i <= u) & (j <= u)
        else:
            top = np.maximum(np.maximum(i, u), j)
            kept = (i == top).astype(int) + (u == top) + (j == top) >= 2
        past = slice(0, t + 1)
        first = c[..., t, past] * qk[..., t, past]
        second = c[..., t, past, None] * qk[..., past, past]
        third = qk[..., past, past] * c[..., t, None, past]
        weights[..., t, past] = np.einsum("iuj,...i,...ui,...uj->...j", kept.astype(float), first, second, third)
    return _read(weights, values, normalize=normalize, eps=eps)


def decay_matrix(log_decay: Float64) -> Float64:
    """c[..., t, s] = a_{s+1} ... a_t for s <= t, else 0, by products; log_decay [..., T]."""
    a = np.exp(log_decay)
    length = a.shape[-1]
    c = np.zeros((*a.shape, length))
    for t in range(length):
        c[..., t, t] = 1.0
        if t:
            c[..., t, :t] = a[..., t, None] * c[..., t - 1, :t]
    return c


def _by_head(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, log_decay: ArrayLike | None
) -> tuple[Float64, Float64, Float64, Float64]:
    """Returns q, k, v as [B, H, T, .], with keys and values repeated for grouped heads, and c as [B, H, T, T]."""
    queries, keys, values = (np.moveaxis(np.asarray(x, np.float64), 2, 1) for x in (q, k, v))
    batch, heads, length, _ = queries.shape
    group = heads // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    gate = np.zeros(heads) if log_decay is None else np.asarray(log_decay, np.float64)
    gate = np.repeat(gate, heads // gate.shape[-1], axis=-1)
    gate = np.broadcast_to(gate, (batch, length, heads))
    return queries, keys, values, decay_matrix(np.moveaxis(gate, 2, 1))


def _dots(left: Float64, right: Float64) -> Float64:
    return np.einsum("...td,...sd->...ts", left, right)


def _read(weights: Float64, values: Float64, *, normalize: bool, eps: float) -> Float64:
    out = np.einsum("...tj,...je->...te", np.tril(weights), values)
    if normalize:
        out = out / (np.tril(weights).sum(axis=-1)[..., None] + eps)
    return np.moveaxis(out, 1, 2)
