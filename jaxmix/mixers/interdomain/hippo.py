"""HiPPO: one linear recurrence per token that keeps the Legendre coefficients of everything seen so far.

A signal f is read as a function of time that is constant on each token, f(s) = f_t for t - 1 < s <= t. Its coefficients

    x_m(t) = int f(s) phi_m(s) ds        phi_m(s) = sqrt(2m + 1) P_m(2y - 1) / sqrt(length),  m = 0 ... M-1

belong to Legendre polynomials P_m that are orthonormal on the history: y = s / t and length t for "legs" (all of the
past), y = (s - t + window) / window and length `window` for "legt" (the newest tokens). A complete basis would give
sum_m x_m(f) x_m(g) = int f g ds = sum_j f_j g_j. Every discretisation is a pair (A, b) in x_t = A x_{t-1} + b f_t.

Source: Gu, Dao, Ermon, Rudra, Re, "HiPPO: Recurrent Memory with Optimal Polynomial Projections", arXiv 2008.07669,
for the continuous systems. Scaling and discretisations are derived in docs/mixers/interdomain_ideal.md.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np

from jaxmix.arrays import Array, check_choice, check_count, check_positive, einsum, fail

BASES = ("legs", "legt")
DISCRETIZATIONS = ("bilinear", "zoh")


@dataclasses.dataclass(frozen=True)
class Hippo:
    """A HiPPO recurrence with its options fixed; hashable, so that compiled code is reused.

    Attributes:
        basis: "legs" for the whole history, "legt" for a sliding window.
        modes: number of coefficients M.
        window: length of the "legt" window in tokens, > 0; None for "legs".
        discretization: "bilinear" or "zoh".

    Raises:
        ValueError: for an unknown basis or discretisation, a bad number of modes, or a window where there is none.
    """

    basis: str
    modes: int
    window: float | None
    discretization: str

    def __post_init__(self):
        check_choice("basis", self.basis, BASES)
        check_choice("discretization", self.discretization, DISCRETIZATIONS)
        check_count("modes", self.modes)
        if self.basis == "legt":
            check_positive("window", self.window)
        elif self.window is not None:
            fail("window", "None with basis='legs', which keeps the whole history", repr(self.window))

    @property
    def varies(self) -> bool:
        """Whether the transition depends on the number of tokens seen."""
        return self.basis == "legs"

    def transition(self, count: Array) -> tuple[Array, Array]:
        """(A, b) of the token that is the `count`-th of its history, count a float array [...].

        Returns:
            A [..., M, M] and b [..., M] in count's dtype; without the leading axes where the basis does not vary.
        """
        if self.basis == "legs":
            return legs_transition(count, self.modes, self.discretization)
        assert self.window is not None
        a, b = legt_transition(self.modes, float(self.window), self.discretization)
        return jnp.asarray(a, count.dtype), jnp.asarray(b, count.dtype)


def legendre(modes: int, y: np.ndarray) -> np.ndarray:
    """sqrt(2m + 1) P_m(2y - 1), orthonormal on [0, 1], at the points y [...]: [M, ...] float64."""
    x = 2 * np.asarray(y, np.float64) - 1
    p = [np.ones_like(x), x]
    for m in range(1, modes):
        p.append(((2 * m + 1) * x * p[m] - m * p[m - 1]) / (m + 1))
    return np.stack([math.sqrt(2 * m + 1) * p[m] for m in range(modes)])


@functools.cache
def hippo_matrices(basis: str, modes: int) -> tuple[np.ndarray, np.ndarray]:
    """A [M, M] and B [M], float64, of the continuous system for coefficients averaged over the history.

    With c = x / sqrt(length): "legs" is c' = (-A c + B f) / t and "legt" is c' = (-A c + B f) / window. B_n is
    sqrt(2n + 1), A_nk is B_n B_k below the diagonal; "legs" has n + 1 on it and zeros above, "legt" has
    B_n B_k (-1)^(n-k) on and above it.
    """
    check_choice("basis", basis, BASES)
    check_count("modes", modes)
    n = np.arange(modes)
    b = np.sqrt(2 * n + 1.0)
    below = np.tril(np.outer(b, b), -1)
    if basis == "legs":
        return _frozen(below + np.diag(n + 1.0), b)
    sign = (-1.0) ** (n[:, None] - n)
    return _frozen(below + np.triu(np.outer(b, b) * sign), b)


@functools.cache
def legt_transition(modes: int, window: float, discretization: str) -> tuple[np.ndarray, np.ndarray]:
    """The discrete LegT system A [M, M], b [M] in float64, the same at every token.

    With the continuous A and B and L = I + A / (2 window), "bilinear" is 2 L^-1 - I and L^-1 B / sqrt(window). "zoh" is
    exact for a signal that is constant on each token: exp(-A / window), and sqrt(window) (I - exp(-A / window)) e_0,
    since A e_0 = B.
    """
    a, b = hippo_matrices("legt", modes)
    if discretization == "zoh":
        power = matrix_exponential(-a / window)
        return _frozen(power, math.sqrt(window) * (np.eye(modes) - power)[:, 0])
    inverse = np.linalg.inv(np.eye(modes) + a / (2 * window))
    return _frozen(2 * inverse - np.eye(modes), inverse @ b / math.sqrt(window))


def legs_transition(count: Array, modes: int, discretization: str) -> tuple[Array, Array]:
    """The LegS system A [..., M, M], b [..., M] that leads to the `count`-th token, count [...] float, at least 1."""
    count = jnp.maximum(count, 1)
    return (_legs_zoh if discretization == "zoh" else _legs_bilinear)(count, modes)


def _legs_bilinear(t: Array, modes: int) -> tuple[Array, Array]:
    """The trapezoidal rule in log time, where x' = -(A - I/2) x + B g is an isometry: A - I/2 + transpose = B B^T.

    With h = log(t / (t - 1)) / 2 and L = I + h (A - I/2) it is 2 L^-1 - I and sqrt(2h) L^-1 B. L is a diagonal d plus
    the lower triangle of a rank-one matrix, so that its inverse is products of p = (2 - d) / d. The first token, whose
    step in log time is infinite, is projected exactly: a constant has one coefficient.
    """
    n, k = np.arange(modes)[:, None], np.arange(-1, modes)
    s = jnp.asarray(np.sqrt(2 * n[:, 0] + 1.0), t.dtype)
    half = -0.5 * jnp.log1p(-1 / jnp.maximum(t, 2))[..., None]
    d = 1 + half * jnp.asarray(n[:, 0] + 0.5, t.dtype)
    # between[n, k] is the product of p over k < i < n; its first column is k = -1.
    factors = jnp.where(n > k, ((2 - d) / d)[..., :, None], 1)
    products = jnp.cumprod(factors, axis=-2)
    between = jnp.concatenate([jnp.ones_like(products[..., :1, :]), products[..., :-1, :]], axis=-2)
    scaled = s / d
    inverse = -half[..., None] * scaled[..., :, None] * scaled[..., None, :] * between[..., 1:]
    eye = jnp.eye(modes, dtype=t.dtype)
    inverse = jnp.where(n > k[1:], inverse, eye / d[..., None])
    first = (t < 1.5)[..., None]
    a = jnp.where(first[..., None], 0, 2 * inverse - eye)
    return a, jnp.where(first, eye[0], jnp.sqrt(2 * half) * scaled * between[..., 0])


def _legs_zoh(t: Array, modes: int) -> tuple[Array, Array]:
    """Exact for a signal that is constant on each token: the old coefficients on the longer history, plus one step.

    With rho = (t - 1) / t, A = rho^(A - 1/2) has the entries sqrt(rho) int_0^1 phi_n(rho y) phi_k(y) dy, and b_n is
    sqrt(t) int_rho^1 phi_n(y) dy. M Gauss nodes integrate both without error, and unlike eigenvectors they are stable.
    """
    y, weights = _gauss(modes)
    rest, weighted, weights = (
        jnp.asarray(x, t.dtype) for x in (_gauss_rest(modes), legendre(modes, y) * weights, weights)
    )
    y = jnp.asarray(y, t.dtype)
    share = (1 / t)[..., None]
    rho = (t - 1)[..., None] * share
    old = _legendre_by_cosines(rho * y, share + rho * rest, modes)
    new = _legendre_by_cosines(1 - share * rest, share * rest, modes)
    a = jnp.sqrt(rho)[..., None] * jnp.tril(einsum("...ni,ki->...nk", old, weighted))
    return a, jnp.sqrt(share) * einsum("...ni,i->...n", new, weights)


def _legendre_by_cosines(y: Array, rest: Array, modes: int) -> Array:
    """`legendre` at y [..., I] with rest = 1 - y given exactly: [..., M, I], without a loop over modes."""
    angle = 2 * jnp.arctan2(jnp.sqrt(rest), jnp.sqrt(y))
    cosines = jnp.cos(jnp.arange(modes, dtype=y.dtype)[:, None] * angle[..., None, :])
    return einsum("nk,...ki->...ni", jnp.asarray(_cosine_series(modes), y.dtype), cosines)


@functools.cache
def _cosine_series(modes: int) -> np.ndarray:
    """[n, k]: sqrt(2n + 1) P_n(cos a) = sum_k [n, k] cos(k a); the coefficients of P_n are positive and sum to one."""
    half = np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, modes)]))
    series = np.zeros((modes, modes))
    for n in range(modes):
        for k in range(n + 1):
            series[n, abs(n - 2 * k)] += math.sqrt(2 * n + 1) * half[k] * half[n - k]
    return series


def _gauss(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1]."""
    x, weights = np.polynomial.legendre.leggauss(nodes)
    return (1 + x) / 2, weights / 2


def _gauss_rest(nodes: int) -> np.ndarray:
    """1 - y for the nodes y of `_gauss`, which lie symmetrically."""
    return _gauss(nodes)[0][::-1]


def matrix_exponential(x: np.ndarray, order: int = 8) -> np.ndarray:
    """exp(x) [M, M] in float64 by a diagonal Padé approximant of x / 2^k, squared k times."""
    squarings = max(0, math.ceil(math.log2(max(np.abs(x).sum(axis=1).max(), 1e-300))) + 2)
    x = x / 2.0**squarings
    numerator, denominator, power, coefficient = np.zeros_like(x), np.zeros_like(x), np.eye(len(x)), 1.0
    for j in range(order + 1):
        numerator = numerator + coefficient * power
        denominator = denominator + coefficient * (-1) ** j * power
        power = power @ x
        coefficient *= (order - j) / ((2 * order - j) * (j + 1))
    result = np.linalg.solve(denominator, numerator)
    for _ in range(squarings):
        result = result @ result
    return result


def _frozen(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both, read-only because they are cached."""
    a.setflags(write=False)
    b.setflags(write=False)
    return a, b
