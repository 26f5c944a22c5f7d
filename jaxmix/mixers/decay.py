"""Cumulative log decays inside chunks, accurate after any drop.

An ordinary float32 prefix sum that has passed -500 has a spacing of 3e-5, and every later difference inherits that as
a relative error of the decay. Here each prefix is a pair (high, low) whose sum carries twice the precision, so that a
difference is as accurate as its own size allows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, einsum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogDecay:
    """Prefix sums of log decays inside each chunk and segment, [B, N, G, C]: `high + low`.

    Differences of prefix sums are differentiated as what they are, sums of the steps between two tokens. Through the
    prefix sums each step would get the difference of two sums over pairs of tokens, which keeps the rounding of all
    pairs where the step decays to nothing; and a rate that multiplies all steps weighs such steps most.

    Attributes:
        high: rounded prefix sums.
        low: what they miss; zeros where rounded sums are all that is kept.
        steps: the log decay of every token.
        exclusive: the sums end before each token.
    """

    high: Array
    low: Array
    steps: Array
    exclusive: bool = dataclasses.field(default=False, metadata={"static": True})

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
        return cls(high, einsum("...s,...st->...t", missed, upto), log_decay)

    def before(self) -> "LogDecay":
        """Exclusive prefix sums: what had accumulated before each token."""
        return LogDecay(_previous(self.high), _previous(self.low), self.steps, True)

    def times(self, power: int) -> "LogDecay":
        """The log decays of a^power; `high` of an odd power is rounded and `low` has what that misses."""
        if power == 1:
            return self
        high, rounding = _exact_difference((power - power % 2) * self.high, -(power % 2) * self.high)
        return LogDecay(high, power * self.low + rounding, power * self.steps, self.exclusive)

    def from_start(self) -> Array:
        """Log decay from the chunk's start to each token, [..., C]."""
        return self.high + self.low

    def to_end(self) -> Array:
        """Log decay from each token to the chunk's end, [..., C]; that of the last token is 0 and has no gradient."""
        high, low = jax.lax.stop_gradient((self.high, self.low))
        left = (high[..., -1:] - high) + (low[..., -1:] - low)
        return _sum_to_end(self.steps, jnp.where(jnp.arange(left.shape[-1]) < left.shape[-1] - 1, left, 0))

    def since(self, earlier: "LogDecay") -> Array:
        """Log decay from token s of `earlier` to token t of this, [..., C (t), C (s)]; positive where s > t."""
        high, low, old_high, old_low = jax.lax.stop_gradient((self.high, self.low, earlier.high, earlier.low))
        sums = high[..., :, None] - old_high[..., None, :]
        sums = sums + (low[..., :, None] - old_low[..., None, :])
        return _sum_between(self.exclusive, self.steps, sums)


@jax.custom_jvp
def _sum_to_end(steps: Array, sums: Array) -> Array:
    """`sums` [..., s] of the steps r > s."""
    return sums


@_sum_to_end.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    later = jnp.tri(primals[1].shape[-1], k=-1, dtype=primals[1].dtype)
    return primals[1], einsum("rs,...r->...s", later, tangents[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sum_between(exclusive: bool, steps: Array, sums: Array) -> Array:
    """`sums` [..., t, s] of the steps r with s < r <= t, or r < t."""
    return sums


@_sum_between.defjvp
def _(exclusive: bool, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    up_to = jnp.tri(primals[1].shape[-1], k=-int(exclusive), dtype=primals[1].dtype)
    later = jnp.tri(len(up_to), k=-1, dtype=jnp.bool_)
    return primals[1], einsum("tr,...rs->...ts", up_to, jnp.where(later, tangents[0][..., :, None], 0))


def _previous(x: Array) -> Array:
    return jnp.pad(x[..., :-1], [(0, 0)] * (x.ndim - 1) + [(1, 0)])


def _exact_difference(a: Array, b: Array) -> tuple[Array, Array]:
    """a - b as a rounded difference and its rounding error (Knuth's two-sum)."""
    difference = a - b
    b_rounded = difference - a
    return difference, (a - (difference - b_rounded)) + (-b - b_rounded)
