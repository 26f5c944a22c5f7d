"""Cumulative log decays inside chunks, accurate after any drop.

An ordinary float32 prefix sum that has passed -500 has a spacing of 3e-5, and every later difference inherits that as
a relative error of the decay. Here each prefix is a pair (high, low) whose sum carries twice the precision, so that a
difference is as accurate as its own size allows.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogDecay:
    """Prefix sums of log decays along the last axis, [..., C]: `high + low`."""

    high: Array
    low: Array

    @classmethod
    def accumulate(cls, log_decay: Array) -> "LogDecay":
        """Inclusive prefix sums of `log_decay` [..., C]."""
        high, low = jax.lax.associative_scan(_add, (log_decay, jnp.zeros_like(log_decay)), axis=-1)
        return cls(high, jax.lax.stop_gradient(low))

    def before(self) -> "LogDecay":
        """Exclusive prefix sums: what had accumulated before each token."""
        shift = [(0, 0)] * (self.high.ndim - 1) + [(1, 0)]
        return LogDecay(jnp.pad(self.high, shift)[..., :-1], jnp.pad(self.low, shift)[..., :-1])

    def from_start(self) -> Array:
        """Log decay from the chunk's start to each token, [..., C]."""
        return self.high + self.low

    def to_end(self) -> Array:
        """Log decay from each token to the chunk's end, [..., C]."""
        return (self.high[..., -1:] - self.high) + (self.low[..., -1:] - self.low)

    def since(self, earlier: "LogDecay") -> Array:
        """Log decay from token s of `earlier` to token t of this, [..., C (t), C (s)]; positive where s > t."""
        high = self.high[..., :, None] - earlier.high[..., None, :]
        return high + (self.low[..., :, None] - earlier.low[..., None, :])


def _add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Knuth's exact sum of the high parts; the rounding error, whose derivative is zero, joins the low parts."""
    total = a[0] + b[0]
    x, y, s = (jax.lax.stop_gradient(z) for z in (a[0], b[0], total))
    y_rounded = s - x
    error = (x - (s - y_rounded)) + (y - y_rounded)
    return total, a[1] + b[1] + error
