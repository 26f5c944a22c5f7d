"""HiPPO from its integrals and from dense linear algebra, in float64 numpy and for few modes."""

import functools

import numpy as np
from numpy.polynomial import Legendre

NODES, WEIGHTS = np.polynomial.legendre.leggauss(80)
NODES, WEIGHTS = (1 + NODES) / 2, WEIGHTS / 2


def polynomial(mode) -> Legendre:
    """sqrt(2m + 1) P_m(2y - 1), orthonormal on [0, 1]."""
    return np.sqrt(2 * mode + 1) * Legendre.basis(mode, domain=[0, 1])


def generator(basis, modes) -> tuple[np.ndarray, np.ndarray]:
    """A and B of c' = -A c + B f in the basis' own time, by differentiating the integral that defines c_n.

    LegS: d/dt int f(ty) phi_n(y) dy = (f(t) phi_n(1) - int f(ty) (y phi_n)' dy) / t. LegT: the same with phi_n' and the
    value that leaves the window, which is read off the coefficients.
    """
    phi = [polynomial(n) for n in range(modes)]
    y = Legendre.fit([0, 1], [0, 1], 1, domain=[0, 1])
    moving = [(y * p).deriv() if basis == "legs" else p.deriv() for p in phi]
    a = np.array([[np.sum(WEIGHTS * p(NODES) * m(NODES)) for p in phi] for m in moving])
    if basis == "legt":
        a += np.outer([p(0) for p in phi], [p(0) for p in phi])
    return a, np.array([p(1) for p in phi])


@functools.cache
def impulses(tokens, modes, basis, window, discretization) -> list[np.ndarray]:
    """For every t, the coefficients that a unit impulse at each token j <= t has left: [M, t]."""
    if (basis, discretization) == ("legs", "zoh"):
        return [projected_steps(t, modes) for t in range(1, tokens + 1)]
    found, w = [], np.zeros((modes, 0))
    for t in range(1, tokens + 1):
        a, b = transition(t, modes, basis, window, discretization)
        w = np.concatenate([a @ w, b[:, None]], axis=1)
        found.append(w)
    return found


def projected_steps(t, modes) -> np.ndarray:
    """sqrt(t) times the integrals of phi_m over the t equal pieces of [0, 1]."""
    edges = np.arange(t + 1) / t
    return np.sqrt(t) * np.array([np.diff(polynomial(m).integ()(edges)) for m in range(modes)])


def transition(t, modes, basis, window, discretization) -> tuple[np.ndarray, np.ndarray]:
    """A and b of the step to token t, of coefficients orthonormal with one token as the unit of time."""
    a, b = generator(basis, modes)
    eye = np.eye(modes)
    if basis == "legs" and t == 1:
        return 0 * eye, eye[0]
    step = np.log(t / (t - 1)) if basis == "legs" else 1 / window
    if basis == "legs":
        a = a - eye / 2
    if discretization == "bilinear":
        left = eye + step / 2 * a
        return np.linalg.solve(left, eye - step / 2 * a), np.sqrt(step) * np.linalg.solve(left, b)
    values, vectors = np.linalg.eig(-step * a)
    power = (vectors @ np.diag(np.exp(values)) @ np.linalg.inv(vectors)).real
    return power, np.linalg.solve(a, (eye - power) @ b) / np.sqrt(step)


def readout(q, k, v, log_decay, *, modes, basis="legs", window=None, discretization="bilinear") -> np.ndarray:
    """sum_{i,j<=t} kappa_t(i, j) (q_t . k_i) v_j of one head and document, kappa_t = W^T W."""
    del log_decay
    out = np.zeros((len(q), v.shape[1]))
    for t, w in enumerate(impulses(len(q), modes, basis, window, discretization)):
        out[t] = (k[: t + 1] @ q[t]) @ (w.T @ w) @ v[: t + 1]
    return out
