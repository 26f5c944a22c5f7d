"""The theory form of interdomain attention, with HiPPO from its integrals and dense linear algebra; for few modes.

phi_m(y) = sqrt(2m + 1) P_m(2y - 1), orthonormal on [0, 1]. Coefficients are orthonormal with one token as the unit of
time. Source: Gu et al., arXiv 2008.07669; the scaling is derived in docs/mixers/interdomain_ideal.md.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.polynomial import Legendre
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
QUADRATURE = 80


def interdomain_ideal(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    modes: int,
    basis: str = "legs",
    window: float | None = None,
    discretization: str = "bilinear",
    eps: float = 1e-6,
) -> Float64:
    """o_t = sum_{i,j <= t} kappa_t(i, j) (q_t . k_i) v_j / (the same over v = 1, plus eps), kappa_t = W_t^T W_t.

    Args:
        q: features [B, T, H, R].
        k: features [B, T, G, R].
        v: values [B, T, G, E].
        modes: number of basis functions.
        basis: "legs" or "legt".
        window: tokens of the "legt" window.
        discretization: "bilinear" or "zoh".
        eps: added to the denominator.

    Returns:
        Out [B, T, H, E].
    """
    queries = np.asarray(q, np.float64)
    keys, values = (np.repeat(x, queries.shape[2] // x.shape[2], axis=2) for x in map(np.asarray, (k, v)))
    values = np.concatenate([values, np.ones_like(values[..., :1])], axis=-1)
    out = np.zeros((*queries.shape[:3], values.shape[-1]))
    for t, w in enumerate(impulses(queries.shape[1], modes, basis, window, discretization)):
        scores = np.einsum("bhr,bihr->bhi", queries[:, t], keys[:, : t + 1])
        out[:, t] = np.einsum("bhi,ij,bjhe->bhe", scores, w.T @ w, values[:, : t + 1])
    return out[..., :-1] / (out[..., -1:] + eps)


@functools.cache
def impulses(length: int, modes: int, basis: str, window: float | None, discretization: str) -> list[Float64]:
    """W_t for t = 1 ... `length`: column j has the coefficients that a unit impulse at token j has left, [M, t]."""
    if (basis, discretization) == ("legs", "zoh"):
        return [_projected_steps(t, modes) for t in range(1, length + 1)]
    found, w = [], np.zeros((modes, 0))
    for t in range(1, length + 1):
        a, b = transition(t, modes, basis, window, discretization)
        w = np.concatenate([a @ w, b[:, None]], axis=1)
        found.append(w)
    return found


def transition(t: int, modes: int, basis: str, window: float | None, discretization: str) -> tuple[Float64, Float64]:
    """A [M, M] and b [M] of x_t = A x_{t-1} + b f_t, the step to the t-th token."""
    matrix, b = generator(basis, modes)
    eye = np.eye(modes)
    if basis == "legs" and t == 1:
        return 0 * eye, eye[0]
    if (basis, discretization) == ("legs", "zoh"):
        return _stretched(t, modes), _projected_steps(t, modes)[:, -1]
    if basis == "legs":
        step, matrix = np.log(t / (t - 1)), matrix - eye / 2
    else:
        assert window is not None
        step = 1 / window
    if discretization == "bilinear":
        left = eye + step / 2 * matrix
        return np.linalg.solve(left, eye - step / 2 * matrix), np.sqrt(step) * np.linalg.solve(left, b)
    values, vectors = np.linalg.eig(-step * matrix)
    power = (vectors @ np.diag(np.exp(values)) @ np.linalg.inv(vectors)).real
    return power, np.linalg.solve(matrix, (eye - power) @ b) / np.sqrt(step)


def generator(basis: str, modes: int) -> tuple[Float64, Float64]:
    """A and B of c' = -A c + B f in the time of the basis, by differentiating the integral that defines c_n.

    legs: d/dt int f(ty) phi_n(y) dy = (f(t) phi_n(1) - int f(ty) (y phi_n)' dy) / t. legt: the same with phi_n', and
    the value that leaves the window is read off the coefficients.
    """
    phi = [_polynomial(n) for n in range(modes)]
    y = Legendre.fit([0, 1], [0, 1], 1, domain=[0, 1])
    nodes, weights = _quadrature()
    moving = [(y * p).deriv() if basis == "legs" else p.deriv() for p in phi]
    a = np.array([[np.sum(weights * p(nodes) * m(nodes)) for p in phi] for m in moving])
    if basis == "legt":
        a += np.outer([p(0) for p in phi], [p(0) for p in phi])
    return a, np.array([p(1) for p in phi])


def _polynomial(mode: int) -> Legendre:
    return np.sqrt(2 * mode + 1) * Legendre.basis(mode, domain=[0, 1])


def _quadrature() -> tuple[Float64, Float64]:
    nodes, weights = np.polynomial.legendre.leggauss(QUADRATURE)
    return (1 + nodes) / 2, weights / 2


def _projected_steps(t: int, modes: int) -> Float64:
    """sqrt(t) times the integrals of phi_m over the t equal pieces of [0, 1], [M, t]."""
    edges = np.arange(t + 1) / t
    return np.sqrt(t) * np.array([np.diff(_polynomial(m).integ()(edges)) for m in range(modes)])


def _stretched(t: int, modes: int) -> Float64:
    """The polynomials of t - 1 tokens projected on those of t: sqrt(r) int phi_n(r y) phi_k(y) dy, r = (t - 1) / t."""
    ratio = (t - 1) / t
    nodes, weights = _quadrature()
    phi = [_polynomial(n) for n in range(modes)]
    return np.sqrt(ratio) * np.array([[np.sum(weights * n(ratio * nodes) * k(nodes)) for k in phi] for n in phi])
