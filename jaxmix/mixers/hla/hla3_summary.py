"""State and associative operators of HLA3."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, einsum, fail
from jaxmix.mixers.linear_attention import outer, read_rows, token_decay
from jaxmix.mixers.recurrence import Output
from jaxmix.mixers.state import KeyValueState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HLA3State(KeyValueState):
    """The moments S = sum c k k^T, Q = sum c q q^T, P = sum c k v^T and m = sum c k, and what a query reads, F and f.

    F = sum c^3 (S q)(q^T P) and f = sum c^3 (S q)(q^T m). Shapes: S [B, Hs, D, D], Q [B, H, D, D], P [B, Hs, D, E],
    m [B, Hs, D], F [B, H, D, E], f [B, H, D].
    """

    shared = ("S", "P", "m")
    axes = ("DD", "DD", "DE", "D", "DE", "D")
    S: Array
    Q: Array
    P: Array
    m: Array
    F: Array
    f: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HLA3Summary:
    """What a segment does to an HLA3 state: the state's fields over leading axes [...], X, x, Y and decay product rho.

    Single tokens have X = q q^T k v^T [..., D, E], x = q q^T k [..., D], Y = k k^T q q^T [..., D, D]. A then B,
    r = rho_B: S, Q, P, m as r A + B; X = r^2 X_A + X_B + r Q_B P_A; Y = r^2 Y_A + Y_B + r S_A Q_B;
    F = r^3 F_A + F_B + r S_A X_B + r Y_B P_A + r^2 S_A Q_B P_A; x and f as X and F with v = 1.
    """

    S: Array
    Q: Array
    P: Array
    m: Array
    X: Array
    x: Array
    Y: Array
    F: Array
    f: Array
    rho: Array

    @classmethod
    def token_summary(cls, q: Array, k: Array, v: Array, log_decay: Array | None = None) -> Self:
        """The summary of single tokens: q, k [..., D], v [..., E], log_decay [...]."""
        qk = einsum("...d,...d->...", q, k)[..., None]
        return cls(
            S=outer(k, k),
            Q=outer(q, q),
            P=outer(k, v),
            m=k,
            X=outer(qk * q, v),
            x=qk * q,
            Y=outer(qk * k, q),
            F=outer(qk * qk * k, v),
            f=qk * qk * k,
            rho=token_decay(k, log_decay),
        )

    @classmethod
    def identity(cls, shape: tuple[int, ...], key_size: int, value_size: int, dtype: Dtype = jnp.float32) -> Self:
        """The summary of an empty segment with leading axes `shape`."""
        square, matrix, vector = _zeros(shape, key_size, value_size, dtype)
        return cls(square, square, matrix, vector, matrix, vector, square, matrix, vector, rho=jnp.ones(shape, dtype))

    @staticmethod
    def combine(a: "HLA3Summary", b: "HLA3Summary") -> "HLA3Summary":
        """The summary of a's segment followed by b's."""
        r = b.rho[..., None]
        r2 = r[..., None]
        qp, qm = r2 * _matmul(b.Q, a.P), r * _matvec(b.Q, a.m)
        return HLA3Summary(
            S=r2 * a.S + b.S,
            Q=r2 * a.Q + b.Q,
            P=r2 * a.P + b.P,
            m=r * a.m + b.m,
            X=r2 * r2 * a.X + b.X + qp,
            x=r * r * a.x + b.x + qm,
            Y=r2 * r2 * a.Y + b.Y + r2 * _matmul(a.S, b.Q),
            F=r2 * (r2 * r2 * a.F + _matmul(a.S, b.X + qp) + _matmul(b.Y, a.P)) + b.F,
            f=r * (r * r * a.f + _matvec(a.S, b.x + qm) + _matvec(b.Y, a.m)) + b.f,
            rho=a.rho * b.rho,
        )

    def read(self, q: Array) -> Output:
        """q^T F [..., E] and the denominator q . f [...]."""
        return read_rows(q, self.F, self.f)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HLA3PrintedSummary:
    """What a segment does under the paper's Algorithm 3, with its segment maps; without decay.

    R = sum q q^T k v^T [..., D, E], r = sum q q^T k [..., D], U = sum k k^T q q^T [..., D, D]; the maps
    M [..., D, D, D, E] and N [..., D, D, D] give M[Z] = sum k (k^T Z k) v^T and N[Z] = sum k (k^T Z k). A then B:
    F = F_A + F_B + S_A R_B + M_B[Q_A] + U_B P_A, f likewise with v = 1, all else A + B.
    """

    S: Array
    Q: Array
    P: Array
    m: Array
    R: Array
    r: Array
    U: Array
    M: Array
    N: Array
    F: Array
    f: Array

    @classmethod
    def token_summary(cls, q: Array, k: Array, v: Array, log_decay: Array | None = None) -> Self:
        """The summary of single tokens: q, k [..., D], v [..., E].

        Raises:
            ValueError: when `log_decay` is given.
        """
        if log_decay is not None:
            fail("log_decay", "None (the printed third order is consistent without decay only)", "an array")
        qk = einsum("...d,...d->...", q, k)[..., None]
        cube = outer(outer(k, k), k[..., None, :])
        return cls(
            S=outer(k, k),
            Q=outer(q, q),
            P=outer(k, v),
            m=k,
            R=outer(qk * q, v),
            r=qk * q,
            U=outer(qk * k, q),
            M=outer(cube, v[..., None, None, :]),
            N=cube,
            F=outer(qk * qk * k, v),
            f=qk * qk * k,
        )

    @classmethod
    def identity(cls, shape: tuple[int, ...], key_size: int, value_size: int, dtype: Dtype = jnp.float32) -> Self:
        """The summary of an empty segment with leading axes `shape`."""
        square, matrix, vector = _zeros(shape, key_size, value_size, dtype)
        maps = jnp.zeros((*shape, key_size, key_size, key_size, value_size), dtype)
        return cls(square, square, matrix, vector, matrix, vector, square, maps, maps[..., 0], matrix, vector)

    @staticmethod
    def combine(a: "HLA3PrintedSummary", b: "HLA3PrintedSummary") -> "HLA3PrintedSummary":
        """The summary of a's segment followed by b's."""
        summed = jax.tree.map(jnp.add, a, b)
        f = _matmul(a.S, b.R) + einsum("...dije,...ij->...de", b.M, a.Q) + _matmul(b.U, a.P)
        f1 = _matvec(a.S, b.r) + einsum("...dij,...ij->...d", b.N, a.Q) + _matvec(b.U, a.m)
        return dataclasses.replace(summed, F=summed.F + f, f=summed.f + f1)

    def read(self, q: Array) -> Output:
        """q^T F [..., E] and the denominator q . f [...]."""
        return read_rows(q, self.F, self.f)


def _zeros(shape: tuple[int, ...], key_size: int, value_size: int, dtype: Dtype) -> tuple[Array, Array, Array]:
    return (
        jnp.zeros((*shape, key_size, key_size), dtype),
        jnp.zeros((*shape, key_size, value_size), dtype),
        jnp.zeros((*shape, key_size), dtype),
    )


def _matmul(a: Array, b: Array) -> Array:
    return einsum("...df,...fe->...de", a, b)


def _matvec(a: Array, b: Array) -> Array:
    return einsum("...df,...f->...d", a, b)
