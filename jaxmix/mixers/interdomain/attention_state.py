"""State of the scalable interdomain attention."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype
from jaxmix.mixers import pairs
from jaxmix.mixers.state import RecurrentState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InterdomainAttentionState(RecurrentState):
    """The diagonal recurrence of keys, values and the constant 1, real and imaginary parts.

    Xk = sum Bbar Lam^(t-j) k_j^T [B, Hs, 2, M, D], Xv likewise of values [B, Hs, 2, M, E], X1 of ones [B, Hs, 2, M].
    What a query reads are the mixtures U = C Xk, Gamma = C Xv and eta = C X1, as the methods of these names give them.
    """

    shared = ("Xk", "Xv", "X1")
    axes = ("2MD", "2ME", "2M")
    Xk: Array
    Xv: Array
    X1: Array

    @classmethod
    def init(
        cls,
        batch: int,
        heads: int,
        key_size: int,
        value_size: int,
        *,
        modes: int = 64,
        shared_heads: int | None = None,
        dtype: Dtype = jnp.float32,
    ) -> Self:
        """The state of streams that have seen nothing; `shared_heads` (Hs) defaults to `heads`."""
        extents = {"M": modes, "D": key_size, "E": value_size}
        return cls.zeros(batch, heads, shared_heads, extents, dtype)

    def U(self, C: Array) -> Array:
        """Inducing keys C Xk, [B, Hs, 2, M, D], for C [Hs, 2, M, M], or [Hs, 2, M] if it is diagonal."""
        return _mix(C, self.Xk)

    def Gamma(self, C: Array) -> Array:
        """Inducing values C Xv, [B, Hs, 2, M, E]."""
        return _mix(C, self.Xv)

    def eta(self, C: Array) -> Array:
        """What the constant 1 projects to, C X1, [B, Hs, 2, M]."""
        return _mix(C, self.X1[..., None])[..., 0]


def _mix(C: Array, x: Array) -> Array:
    """C x for x [B, Hs, 2, M, F]."""
    if C.ndim == 3:
        return pairs.scale_rows(C, x)
    mixed = jnp.matmul(pairs.real_matrix(C), pairs.flatten_rows(x), precision=jax.lax.Precision.HIGHEST)
    return mixed.reshape(x.shape)
