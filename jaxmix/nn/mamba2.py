"""Mamba-2 as a layer."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Array, fail
from jaxmix.mixers.ssd import SSDState, ssd
from jaxmix.nn.base import TokenMixer
from jaxmix.nn.config import ValueHeadConfig
from jaxmix.nn.decay import StepSize
from jaxmix.nn.norms import rms_normalize
from jaxmix.nn.parameters import partitioned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(ValueHeadConfig):
    """Configuration of `Mamba2`; the defaults are the paper's layer.

    Attributes:
        key_heads: groups of B and C; 1 by default.
        key_size: state size N; 128 by default.
        value_size: head size; 2 d_model / heads by default, so that the inner width is twice d_model.
        output_norm: RMSNorm over the channels of each group of B and C, with a learned scale for every channel, after
            the gate. On by default.
        gate: SiLU(x Wg), before the norm. On by default.
        scale: must be None.
    """

    name: ClassVar[str] = "mamba2"
    key_heads: int | None = 1
    key_size: int | None = 128
    conv_width: int = 4
    output_norm: bool = True
    gate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None:
            fail("scale", "None, as C and B are not scaled", self.scale)

    def head_sizes(self, d_model: int) -> tuple[int, int]:
        """State size and head size."""
        if self.value_size is None:
            if 2 * d_model % self.heads:
                fail("heads", f"a divisor of 2 d_model={2 * d_model}, or value_size given", self.heads)
            return dataclasses.replace(self, value_size=2 * d_model // self.heads).head_sizes(d_model)
        return super().head_sizes(d_model)

    @property
    def layer(self) -> type[TokenMixer]:
        """`Mamba2`."""
        return Mamba2

    def mixer_products(self, d_model: int, length: int) -> int:
        """Products of C and B per group, and per head those with the inputs and with the state."""
        keys, values = self.head_sizes(d_model)
        groups = self.stream_heads[0]
        return groups * self.chunk_size * keys + self.heads * values * (self.chunk_size + 2 * keys)


class Mamba2(TokenMixer):
    """Mamba-2, `Mamba2(d_model, heads=H, ..., rngs=rngs)`.

        C, B, u = SiLU(conv(x Wc)), SiLU(conv(x Wb)), SiLU(conv(x Wu))        the convolution has a bias
        dt      = softplus(x Wd + dt_bias)                                    float32, see `StepSize`
        y       = RMSNorm(SiLU(x Wg) * ssd(u, dt, -exp(A_log), B, C, D)) Wo

    C, B and u are projected by `query`, `key` and `value`, as in the other layers. See `MixerLayer` for the arguments
    and `Mamba2Config` for the options.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060.
    """

    config_class = Mamba2Config
    convolution_bias = True

    def __init__(self, d_model: int, config: Any = None, *, rngs: nnx.Rngs, init_std: float = 0.02, **arguments: Any):
        super().__init__(d_model, config, rngs=rngs, init_std=init_std, **arguments)
        heads, dtype = self.config.heads, self.state_dtype
        self.decay = StepSize(d_model, heads, (1.0, 16.0), rngs=rngs, init_std=init_std, dtype=dtype)
        self.direct = nnx.Param(jnp.ones((heads,), dtype), **partitioned("heads"))

    def make_norm(self, options: dict[str, Any]) -> Any:
        """The scale of every channel."""
        channels = self.config.heads * self.value_size
        return nnx.Param(jnp.ones((channels,), options["param_dtype"]), **partitioned("heads"))

    def mix(
        self, streams: tuple[Array, ...], x: Array, segment_ids: Array | None, state: Any
    ) -> tuple[Array, SSDState]:
        """Runs the state space over every segment."""
        C, B, u = streams
        return ssd(
            u,
            self.decay(x),
            -self.decay.rates(),
            B,
            C,
            self.direct[...],
            segment_ids=segment_ids,
            initial_state=state,
            implementation=self.config.implementation,
            chunk_size=self.config.chunk_size,
        )

    def finish(self, out: Array, x: Array) -> Array:
        """Gates, normalises and maps to the model's width."""
        out = out.reshape(*out.shape[:2], -1)
        if self.gate is not None:
            out = out * self.gates(self.gate(x))
        if self.out_norm is not None:
            groups = out.reshape(*out.shape[:2], self.config.stream_heads[0], -1)
            out = rms_normalize(groups, self.config.norm_eps).reshape(out.shape) * self.out_norm[...]
        return self.out(out.astype(self.dtype))

    def init_mixer(self, batch_size: int) -> SSDState:
        """The mixer's state of streams that have seen nothing."""
        sizes = batch_size, self.config.heads, self.key_size, self.value_size
        return SSDState.init(*sizes, dtype=self.state_dtype)
