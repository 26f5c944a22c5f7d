"""S4D and interdomain attention as explicit sums over tokens, in complex float64.

Lam = exp(Delta A), Bbar = (Lam - 1) / A for "zoh"; Lam = (1 + Delta A / 2) / (1 - Delta A / 2),
Bbar = Delta / (1 - Delta A / 2) for "bilinear". K_s[m] = Bbar_m Lam_m^s is what mode m keeps of a token s later.
Sources: arXiv 2206.11893 (S4D), arXiv 2605.24330 (interdomain attention).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
Complex128 = NDArray[np.complex128]


def s4d(
    x: ArrayLike,
    A: ArrayLike,
    delta: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    *,
    discretization: str = "zoh",
) -> Float64:
    """y_t = sum_{j <= t} Re(sum_m C_m K_{t-j}[m]) x_j + D x_t.

    Args:
        x: inputs [B, T, H, E].
        A: poles [H, 2, M], real and imaginary parts.
        delta: step sizes [H].
        C: readout [H, 2, M].
        D: direct path [H], or None.
        discretization: "zoh" or "bilinear".

    Returns:
        y [B, T, H, E].
    """
    x = np.asarray(x, np.float64)
    kept = responses(A, delta, x.shape[1], discretization)
    y = np.einsum("hm,htjm,bjhe->bthe", as_complex(C), kept, x).real
    return y if D is None else y + np.asarray(D, np.float64)[:, None] * x


def interdomain_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    A: ArrayLike,
    delta: ArrayLike,
    C: ArrayLike,
    *,
    conjugate: bool = False,
    normalize: bool = False,
    eps: float = 1e-6,
    discretization: str = "zoh",
) -> Float64:
    """o_t = Re sum_m (q_t . U_t[m]) Gamma_t[m] with U_t = C sum_j K_{t-j} k_j^T, Gamma_t = C sum_j K_{t-j} v_j^T.

    Args:
        q: features of queries [B, T, H, D].
        k: features of keys [B, T, G, D].
        v: values [B, T, G, E].
        A: poles [Hs, 2, M]; Hs divides H.
        delta: step sizes [Hs].
        C: mixing [Hs, 2, M, M], or [Hs, 2, M] for a diagonal.
        conjugate: the conjugate of q_t . U_t[m] instead.
        normalize: divide by the same sum over v = 1, plus eps.
        eps: see `normalize`.
        discretization: "zoh" or "bilinear".

    Returns:
        Out [B, T, H, E].
    """
    queries = np.asarray(q, np.float64)
    heads = queries.shape[2]
    keys, values = (_repeat(np.asarray(x, np.float64), heads, 2) for x in (k, v))
    kept = _repeat(responses(A, delta, queries.shape[1], discretization), heads, 0)
    mixing = _repeat(as_complex(C), heads, 0)
    if mixing.ndim == 2:
        mixing = mixing[:, :, None] * np.eye(mixing.shape[-1])
    signals = np.concatenate([keys, values, np.ones_like(values[..., :1])], axis=-1)
    mixed = np.einsum("hnm,htjm,bjhf->bthnf", mixing, kept, signals, optimize=True)
    size = keys.shape[-1]
    weights = np.einsum("bthd,bthnd->bthn", queries, mixed[..., :size])
    read = np.einsum("bthn,bthnf->bthf", weights.conj() if conjugate else weights, mixed[..., size:]).real
    return read[..., :-1] / (read[..., -1:] + eps) if normalize else read[..., :-1]


def discrete_modes(A: ArrayLike, delta: ArrayLike, discretization: str = "zoh") -> tuple[Complex128, Complex128]:
    """Lam and Bbar, [H, M] each, of poles [H, 2, M] and step sizes [H]."""
    poles, step = as_complex(A), np.asarray(delta, np.float64)[:, None]
    if discretization == "zoh":
        lam = np.exp(step * poles)
        return lam, (lam - 1) / poles
    return (1 + step * poles / 2) / (1 - step * poles / 2), step / (1 - step * poles / 2)


def responses(A: ArrayLike, delta: ArrayLike, length: int, discretization: str) -> Complex128:
    """K_{t-j} for j <= t, else 0: [H, T (t), T (j), M]."""
    lam, gain = discrete_modes(A, delta, discretization)
    t = np.arange(length)
    age = t[:, None] - t
    powers = lam[:, None, None, :] ** np.maximum(age, 0)[..., None]
    return np.where((age >= 0)[..., None], gain[:, None, None, :] * powers, 0)


def as_complex(pairs: ArrayLike) -> Complex128:
    """Pairs [H, 2, ...] as complex numbers [H, ...]."""
    x = np.asarray(pairs, np.float64)
    return x[:, 0] + 1j * x[:, 1]


def _repeat(x: NDArray[Any], heads: int, axis: int) -> NDArray[Any]:
    return np.repeat(x, heads // x.shape[axis], axis=axis)
