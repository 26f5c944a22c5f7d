"""Cumulative log decays inside chunks, accurate after any drop.

An ordinary float32 prefix sum that has passed -500 has a spacing of 3e-5, and every later difference inherits that as
a relative error of the decay. Here each prefix is a pair (high, low) whose sum carries twice the precision, so that a
difference is as accurate as its own size allows.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, einsum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogDecay:
    """Prefix sums of log decays inside each chunk and segment, [B, N, G, C]: `high + low`."""

    high: Array
    low: Array

    @classmethod
    def accumulate(cls, log_decay: Array, run: Array | None) -> "LogDecay":
        """Inclusive prefix sums of finite `log_decay` [B, N, G, C], starting anew where `run` [B, N, C] steps up."""
        upto = jnp.triu(jnp.ones((log_decay.shape[-1],) * 2, log_decay.dtype))
        if run is not None:
            upto = jnp.where(run[:, :, None, :, None] == run[:, :, None, None, :], upto, 0)
        high = einsum("...s,...st->...t", log_decay, upto)
        previous = _previous(high)
        if run is not None:
            previous = jnp.where((run == _previous(run))[:, :, None], previous, 0)
        steps, rounding = _exact_difference(high, previous)
        # Each step of the rounded sum misses what the true step holds by this much; no derivative is lost with it.
        missed = jax.lax.stop_gradient((log_decay - steps) - rounding)
        return cls(high, einsum("...s,...st->...t", missed, upto))

    def before(self) -> "LogDecay":
        """Exclusive prefix sums: what had accumulated before each token."""
        return LogDecay(_previous(self.high), _previous(self.low))

    def from_start(self) -> Array:
        """Log decay from the chunk's start to each token, [..., C]."""
        return self.high + self.low

    def to_end(self) -> Array:
        """Log decay from each token to the chunk's end, [..., C]; that of the last token is 0 and has no gradient."""
        left = (self.high[..., -1:] - self.high) + (self.low[..., -1:] - self.low)
        return jnp.where(jnp.arange(left.shape[-1]) < left.shape[-1] - 1, left, 0)

    def since(self, earlier: "LogDecay") -> Array:
        """Log decay from token s of `earlier` to token t of this, [..., C (t), C (s)]; positive where s > t."""
        high = self.high[..., :, None] - earlier.high[..., None, :]
        return high + (self.low[..., :, None] - earlier.low[..., None, :])


def _previous(x: Array) -> Array:
    return jnp.pad(x[..., :-1], [(0, 0)] * (x.ndim - 1) + [(1, 0)])


def _exact_difference(a: Array, b: Array) -> tuple[Array, Array]:
    """a - b as a rounded difference and its rounding error (Knuth's two-sum)."""
    difference = a - b
    b_rounded = difference - a
    return difference, (a - (difference - b_rounded)) + (-b - b_rounded)
