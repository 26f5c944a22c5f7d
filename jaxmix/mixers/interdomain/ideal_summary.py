"""State and associative operator of `interdomain_ideal`."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, einsum
from jaxmix.mixers.linear_attention import outer
from jaxmix.mixers.state import State


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InterdomainState(State):
    """HiPPO coefficients of the keys, the values and the constant 1 of a stream, for each of G key/value heads.

    U [B, G, M, R], Gamma [B, G, M, E], eta [B, G, M] and count [B, G], the number of tokens of the current segment so
    far: LegS needs it, because its transition varies with time. It is a whole number in a float array, equal for all
    heads (one per head, so that a state can be split over heads), exact up to 2^24 tokens in float32, and no output
    has a gradient in it.
    """

    U: Array
    Gamma: Array
    eta: Array
    count: Array

    @classmethod
    def init(
        cls, batch: int, heads: int, modes: int, key_size: int, value_size: int, *, dtype: Dtype = jnp.float32
    ) -> Self:
        """The state of streams that have seen nothing; `heads` is G, the number of key/value heads."""
        shape = (batch, heads, modes)
        return cls(
            jnp.zeros((*shape, key_size), dtype),
            jnp.zeros((*shape, value_size), dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros(shape[:2], dtype),
        )

    def pack(self) -> Array:
        """[U, Gamma, eta] as one array X [B, G, M, R + E + 1]."""
        return jnp.concatenate([self.U, self.Gamma, self.eta[..., None]], axis=-1)

    @classmethod
    def unpack(cls, x: Array, key_size: int, count: Array) -> Self:
        """The inverse of `pack`."""
        return cls(x[..., :key_size], x[..., key_size:-1], x[..., -1], count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransitionSummary:
    """What a segment does to the coefficients X = [U, Gamma, eta]: it makes them Phi X plus what it leaves itself.

    Phi [..., M, M], X [..., M, R + E + 1]. A then B: Phi = Phi_B Phi_A, X = Phi_B X_A + X_B. The leading axes of Phi
    may be 1 where it is shared.
    """

    Phi: Array
    X: Array

    @classmethod
    def token_summary(cls, k: Array, v: Array, phi: Array, b: Array) -> Self:
        """The summary of single tokens: k [..., R], v [..., E]; phi [..., M, M] and b [..., M] of `Hippo.transition`.

        The transition of a token depends on its place in the segment, so that it is an argument.
        """
        return cls(phi, outer(b, join_signals(k, v)))

    @classmethod
    def identity(
        cls, shape: tuple[int, ...], modes: int, key_size: int, value_size: int, dtype: Dtype = jnp.float32
    ) -> Self:
        """The summary of an empty segment with leading axes `shape`."""
        eye = jnp.broadcast_to(jnp.eye(modes, dtype=dtype), (*shape, modes, modes))
        return cls(eye, jnp.zeros((*shape, modes, key_size + value_size + 1), dtype))

    @staticmethod
    def combine(a: "TransitionSummary", b: "TransitionSummary") -> "TransitionSummary":
        """The summary of a's segment followed by b's."""
        return TransitionSummary(multiply(b.Phi, a.Phi), multiply(b.Phi, a.X) + b.X)

    def read(self, q: Array) -> tuple[Array, Array]:
        """The numerator (U q) Gamma [..., E] and the denominator (U q) . eta [...] of queries q [..., R]."""
        return read_modes(q, self.X)


def join_signals(k: Array, v: Array) -> Array:
    """What the recurrence projects: [k, v, 1], [..., R + E + 1]."""
    return jnp.concatenate([k, v, jnp.ones_like(v[..., :1])], axis=-1)


def multiply(phi: Array, x: Array) -> Array:
    """phi x, [..., M, M] and [..., M, P], leading axes broadcast."""
    return einsum("...mn,...np->...mp", phi, x)


def read_modes(q: Array, x: Array) -> tuple[Array, Array]:
    """sum_m (q . u_m) gamma_m [..., E] and sum_m (q . u_m) eta_m [...], x = [U, Gamma, eta]; leading axes broadcast."""
    size = q.shape[-1]
    weights = einsum("...mr,...r->...m", x[..., :size], q)
    out = einsum("...m,...me->...e", weights, x[..., size:])
    return out[..., :-1], out[..., -1]


def place_of(count: Array) -> Array:
    """Counts of tokens as whole numbers without a gradient, for `Hippo.transition`."""
    return jax.lax.stop_gradient(jnp.round(count))
