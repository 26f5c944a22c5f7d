"""The associative operator of the delta rule: what a segment does to its state is an affine map."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, einsum
from jaxmix.mixers.linear_attention import outer, token_decay


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaSummary:
    """What a segment does to a delta rule state S: S becomes Phi S + W, Phi [..., D, D] and W [..., D, E].

    A then B: Phi = Phi_B Phi_A, W = Phi_B W_A + W_B.
    """

    Phi: Array
    W: Array

    @classmethod
    def token_summary(cls, q: Array, k: Array, v: Array, log_decay: Array | None, beta: Array) -> Self:
        """The summary of single tokens, k [..., D], v [..., E], log_decay and beta [...]; q is not needed."""
        write = beta[..., None] * k
        forget = jnp.eye(k.shape[-1], dtype=k.dtype) - outer(write, k)
        return cls(token_decay(k, log_decay)[..., None, None] * forget, outer(write, v))

    @classmethod
    def identity(cls, shape: tuple[int, ...], key_size: int, value_size: int, dtype: Dtype = jnp.float32) -> Self:
        """The summary of an empty segment with leading axes `shape`."""
        one = jnp.broadcast_to(jnp.eye(key_size, dtype=dtype), (*shape, key_size, key_size))
        return cls(one, jnp.zeros((*shape, key_size, value_size), dtype))

    @classmethod
    def of_state(cls, S: Array) -> Self:
        """The summary of all that came before a state S [..., D, E]."""
        nothing = cls.identity(S.shape[:-2], S.shape[-2], S.shape[-1], S.dtype)
        return dataclasses.replace(nothing, W=S)

    @staticmethod
    def combine(a: "DeltaSummary", b: "DeltaSummary") -> "DeltaSummary":
        """The summary of a's segment followed by b's."""
        return DeltaSummary(einsum("...de,...ef->...df", b.Phi, a.Phi), einsum("...de,...ef->...df", b.Phi, a.W) + b.W)

    def read(self, q: Array) -> tuple[Array, None]:
        """q^T W [..., E], and no denominator."""
        return einsum("...d,...de->...e", q, self.W), None
