"""State and associative operators of HLA2."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, einsum
from jaxmix.mixers.linear_attention import outer, token_decay
from jaxmix.mixers.recurrence import Output
from jaxmix.mixers.state import KeyValueState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HLA2State(KeyValueState):
    """S = sum c k k^T [B, Hs, D, D], C = sum c q v^T [B, H, D, E], m = sum c q [B, H, D], and the pairs to leave out.

    G [B, H, D, E] and h [B, H, D] collect k (k^T C) and k (k^T m) over the pairs with i > j, so that the masked
    output is q^T (S C - G) and its denominator q^T (S m - h).
    """

    shared = ("S",)
    axes = ("DD", "DE", "D", "DE", "D")
    S: Array
    C: Array
    m: Array
    G: Array
    h: Array


def read_hla2(state: Any, q: Array, *, ridge: float = 0.0, masked: bool = True) -> Output:
    """q^T ((S + ridge I) C - G) and q^T ((S + ridge I) m - h); without G and h when not masked."""
    sq = einsum("...f,...fd->...d", q, state.S)
    if ridge:
        sq = sq + ridge * q
    num = einsum("...d,...de->...e", sq, state.C)
    den = einsum("...d,...d->...", sq, state.m)
    if masked:
        num = num - einsum("...d,...de->...e", q, state.G)
        den = den - einsum("...d,...d->...", q, state.h)
    return num, den


def _token_fields(q: Array, k: Array, v: Array) -> dict[str, Array]:
    c = outer(q, v)
    return {"S": outer(k, k), "C": c, "m": q, "G": jnp.zeros_like(c), "h": jnp.zeros_like(q)}


def _empty_fields(shape: tuple[int, ...], key_size: int, value_size: int, dtype: Dtype) -> dict[str, Array]:
    matrix = jnp.zeros((*shape, key_size, value_size), dtype)
    vector = jnp.zeros((*shape, key_size), dtype)
    return {"S": jnp.zeros((*shape, key_size, key_size), dtype), "C": matrix, "m": vector, "G": matrix, "h": vector}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HLA2Summary:
    """What a segment does to an HLA2 state: its fields over leading axes [...], and the decay product rho [...].

    A then B, r = rho_B: S = r S_A + S_B, C = r C_A + C_B, G = r^2 G_A + G_B + r S_B C_A; m and h likewise with v = 1.
    """

    S: Array
    C: Array
    m: Array
    G: Array
    h: Array
    rho: Array

    @classmethod
    def token_summary(cls, q: Array, k: Array, v: Array, log_decay: Array | None = None) -> Self:
        """The summary of single tokens: q, k [..., D], v [..., E], log_decay [...]."""
        return cls(**_token_fields(q, k, v), rho=token_decay(k, log_decay))

    @classmethod
    def identity(cls, shape: tuple[int, ...], key_size: int, value_size: int, dtype: Dtype = jnp.float32) -> Self:
        """The summary of an empty segment with leading axes `shape`."""
        return cls(**_empty_fields(shape, key_size, value_size, dtype), rho=jnp.ones(shape, dtype))

    @staticmethod
    def combine(a: "HLA2Summary", b: "HLA2Summary") -> "HLA2Summary":
        """The summary of a's segment followed by b's."""
        r = b.rho[..., None]
        r2 = r[..., None]
        return HLA2Summary(
            S=r2 * a.S + b.S,
            C=r2 * a.C + b.C,
            m=r * a.m + b.m,
            G=r2 * (r2 * a.G + einsum("...df,...fe->...de", b.S, a.C)) + b.G,
            h=r * (r * a.h + einsum("...df,...f->...d", b.S, a.m)) + b.h,
            rho=a.rho * b.rho,
        )

    def read(self, q: Array) -> Output:
        """q^T (S C - G) [..., E] and the denominator q^T (S m - h) [...]."""
        return read_hla2(self, q)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HLA2PrintedSummary:
    """What a segment does under the paper's decayed recurrence, with the matrix X that its concatenation lacks.

    The fields of HLA2Summary and X [..., D, D] = sum_i (rho / a_i) k_i k_i^T. A then B: S, C, m as there;
    X = rho_B X_A + rho_A X_B, G = rho_B G_A + G_B + X_B C_A, h = rho_B h_A + h_B + X_B m_A.
    """

    S: Array
    C: Array
    m: Array
    G: Array
    h: Array
    X: Array
    rho: Array

    @classmethod
    def token_summary(cls, q: Array, k: Array, v: Array, log_decay: Array | None = None) -> Self:
        """The summary of single tokens: q, k [..., D], v [..., E], log_decay [...]."""
        fields = _token_fields(q, k, v)
        return cls(**fields, X=fields["S"], rho=token_decay(k, log_decay))

    @classmethod
    def identity(cls, shape: tuple[int, ...], key_size: int, value_size: int, dtype: Dtype = jnp.float32) -> Self:
        """The summary of an empty segment with leading axes `shape`."""
        fields = _empty_fields(shape, key_size, value_size, dtype)
        return cls(**fields, X=fields["S"], rho=jnp.ones(shape, dtype))

    @staticmethod
    def combine(a: "HLA2PrintedSummary", b: "HLA2PrintedSummary") -> "HLA2PrintedSummary":
        """The summary of a's segment followed by b's."""
        r = b.rho[..., None]
        r2 = r[..., None]
        return HLA2PrintedSummary(
            S=r2 * a.S + b.S,
            C=r2 * a.C + b.C,
            m=r * a.m + b.m,
            G=r2 * a.G + b.G + einsum("...df,...fe->...de", b.X, a.C),
            h=r * a.h + b.h + einsum("...df,...f->...d", b.X, a.m),
            X=r2 * a.X + a.rho[..., None, None] * b.X,
            rho=a.rho * b.rho,
        )

    def read(self, q: Array) -> Output:
        """q^T (S C - G) [..., E] and the denominator q^T (S m - h) [...]."""
        return read_hla2(self, q)
