"""What the layers of queries, keys and values share: projections, short convolutions, normalisation, positions."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Array, Dtype
from jaxmix.mixers.segments import Segments
from jaxmix.nn.convolution import ShortConvolution, convolve_streams
from jaxmix.nn.layer import MixerLayer
from jaxmix.nn.norms import RMSNorm, l2_normalize
from jaxmix.nn.parameters import projection
from jaxmix.nn.rope import rotate


class TokenMixer(MixerLayer):
    """Base of the layers of queries, keys and values.

        q, k, v = x Wq, x Wk, x Wv            then, where configured, short convolution and SiLU on each
        q, k    = heads of q and k            then, where configured, normalised and rotated
        y       = (SiLU(x Wg) * RMSNorm(mixer(q, k, v))) Wo

    See `MixerLayer` for the arguments; a subclass sets `config_class` and defines `mix` and `init_mixer`.
    """

    convolution_bias: ClassVar[bool] = False

    def __init__(
        self,
        d_model: int,
        config: Any = None,
        *,
        rngs: nnx.Rngs,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        init_std: float = 0.02,
        **arguments: Any,
    ):
        shared: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(d_model, config, init_std=init_std, **shared, **arguments)
        config, shared["dtype"] = self.config, self.dtype
        sizes = (self.key_size, self.key_size, self.value_size)
        channels = [heads * size for heads, size in zip(config.stream_heads, sizes, strict=True)]
        self.query, self.key, self.value = (projection(d_model, size, std=init_std, **shared) for size in channels)
        convolution = {"param_dtype": param_dtype, "axis": "heads", "bias": self.convolution_bias}
        self.convolutions = nnx.List(
            ShortConvolution(size, config.conv_width, rngs=rngs, **convolution)
            for size in channels
            if config.conv_width
        )
        norm = {"eps": config.norm_eps, "dtype": self.dtype, "param_dtype": param_dtype}
        self.query_norm = RMSNorm(self.key_size, **norm) if config.qk_norm == "rms" else None
        self.key_norm = RMSNorm(self.key_size, **norm) if config.qk_norm == "rms" else None

    def project(
        self, x: Array, segments: Segments | None, tails: tuple[Array, ...], positions: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Queries, keys and values by head, and the convolutions' new states."""
        streams = [self.query(x), self.key(x), self.value(x)]
        if self.convolutions:
            kernels = [convolution.kernel[...] for convolution in self.convolutions]
            convolved = convolve_streams(streams, kernels, tails, segments)
            tails = tuple(tail for _, tail in convolved)
            streams = [
                jax.nn.silu(convolution.shift(y))
                for convolution, (y, _) in zip(self.convolutions, convolved, strict=True)
            ]
        q, k, v = (
            y.reshape(*y.shape[:2], -1, size)
            for y, size in zip(streams, (self.key_size, self.key_size, self.value_size), strict=True)
        )
        q, k = self._condition(q, self.query_norm, positions), self._condition(k, self.key_norm, positions)
        return (q, k, v), tails

    def _condition(self, x: Array, norm: RMSNorm | None, positions: Array) -> Array:
        """Normalises and rotates queries or keys, [B, T, H, D]."""
        if norm is not None:
            x = norm(x) * self.key_size**-0.5
        elif self.config.qk_norm == "l2":
            x = l2_normalize(x, self.config.norm_eps)
        if not self.config.rope:
            return x
        rotated = self.config.rotated_size(self.key_size)
        turned = rotate(x[..., :rotated], positions, self.config.rope_base)
        return turned if rotated == self.key_size else jnp.concatenate([turned, x[..., rotated:]], axis=-1)
