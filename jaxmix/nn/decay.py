"""Learned decays of recurrent layers, in log space and float32 whatever the layer's dtypes."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Array, Dtype
from jaxmix.nn.parameters import partitioned, projection


class HeadDecay(nnx.Module):
    r"""One decay per head: log_decay_h = -exp(r_h), r_h learned.

    A head forgets by 1/e in exp(-r_h) tokens. Initially these time scales are spread over the heads evenly in the
    logarithm: (longest/shortest)^((h + 1/2) / H) * shortest.

    Args:
        heads: number of heads H.
        time_scales: shortest and longest, in tokens.
        dtype: dtype of parameters and decays, float32 or float64.
    """

    def __init__(self, heads: int, time_scales: tuple[float, float], *, dtype: Dtype = jnp.float32):
        low, high = (math.log(scale) for scale in time_scales)
        spread = low + (high - low) * (jnp.arange(heads, dtype=dtype) + 0.5) / heads
        self.log_rate = nnx.Param(-spread, **partitioned("heads"))

    def __call__(self, x: Array) -> Array:
        """The log decays, [H]; `x` is not used."""
        return -jnp.exp(self.log_rate[...])


class DataDecay(nnx.Module):
    r"""A decay per token and head: log_decay_th = -exp(r_h) softplus(x_t W + b)_h, with r, W, b learned.

    The form of the decay of Gated DeltaNet and Mamba-2. Initially softplus(b) = 1, so that the decay starts as that
    of `HeadDecay` does.

    Args:
        d_model: width d of the layer's input.
        heads: number of heads H.
        time_scales: shortest and longest initial time scale, in tokens.
        rngs: source of the initial values.
        init_std: standard deviation of the initial W.
        dtype: dtype of parameters and decays, float32 or float64.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060; Yang et al., "Gated Delta Networks",
    arXiv 2412.06464.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        time_scales: tuple[float, float],
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        dtype: Dtype = jnp.float32,
    ):
        self.rate = HeadDecay(heads, time_scales, dtype=dtype)
        self.projection = projection(d_model, heads, std=init_std, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.full((heads,), math.log(math.e - 1), dtype), **partitioned("heads"))

    def __call__(self, x: Array) -> Array:
        """The log decays, [B, T, H], of the layer's input [B, T, d]."""
        return self.rate(x) * jax.nn.softplus(self.projection(x) + self.bias[...])


class StepSize(nnx.Module):
    r"""A step size per token and head and the decay that it gives, as in Mamba-2 and Gated DeltaNet.

        dt = softplus(x W + dt_bias)        log_decay = -exp(A_log) dt

    Initially exp(A_log) is uniform between two rates and softplus(dt_bias) log-uniform in [1e-3, 1e-1].

    Args:
        d_model: width d of the layer's input.
        heads: number of heads H.
        rates: smallest and largest initial exp(A_log).
        rngs: source of the initial values.
        init_std: standard deviation of the initial W.
        dtype: dtype of parameters and results, float32 or float64.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060; Yang et al., "Gated Delta Networks",
    arXiv 2412.06464.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        rates: tuple[float, float],
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        dtype: Dtype = jnp.float32,
    ):
        rate = jax.random.uniform(rngs.params(), (heads,), dtype, *rates)
        # A rate of exactly 0 can be drawn, and would never move.
        self.A_log = nnx.Param(jnp.log(jnp.maximum(rate, 1e-4)), **partitioned("heads"))
        low, high = math.log(1e-3), math.log(1e-1)
        step = jnp.exp(jax.random.uniform(rngs.params(), (heads,), dtype, low, high))
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)), **partitioned("heads"))
        self.projection = projection(d_model, heads, std=init_std, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """The step sizes [B, T, H] of the layer's input [B, T, d]."""
        return jax.nn.softplus(self.projection(x) + self.dt_bias[...])

    def rates(self) -> Array:
        """exp(A_log), [H]: log_decay is its negative times dt."""
        return jnp.exp(self.A_log[...])
