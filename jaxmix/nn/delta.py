"""DeltaNet and Gated DeltaNet as layers."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from jaxmix.arrays import Array, check_flag
from jaxmix.mixers.delta import DeltaState, delta_rule, gated_delta_rule
from jaxmix.nn.base import TokenMixer
from jaxmix.nn.config import ValueHeadConfig
from jaxmix.nn.decay import StepSize
from jaxmix.nn.parameters import projection


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(ValueHeadConfig):
    """Configuration of `DeltaNet`; the defaults are the paper's layer.

    Attributes:
        qk_norm: "l2" by default; without unit keys the state may grow without bound.
        scale: factor on the outputs; D^-1/2 by default.
        negative_eigenvalues: write strengths between 0 and 2 instead of 0 and 1, so that a token can turn the sign of
            what a key has stored.
    """

    name: ClassVar[str] = "delta_net"
    qk_norm: Literal["l2", "rms"] | None = "l2"
    conv_width: int = 4
    output_norm: bool = True
    negative_eigenvalues: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("negative_eigenvalues", self.negative_eigenvalues)

    @property
    def layer(self) -> type[TokenMixer]:
        """`DeltaNet`."""
        return DeltaNet

    def mixer_products(self, d_model: int, length: int) -> int:
        """Scores of keys and of queries, the triangular solve, the affine maps and their scan, and the outputs."""
        return self.heads * delta_products(*self.head_sizes(d_model), self.chunk_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(DeltaNetConfig):
    """Configuration of `GatedDeltaNet`; the defaults are the paper's layer.

    Attributes:
        gate: on by default.
    """

    name: ClassVar[str] = "gated_delta_net"
    gate: bool = True

    @property
    def layer(self) -> type[TokenMixer]:
        """`GatedDeltaNet`."""
        return GatedDeltaNet


def delta_products(keys: int, values: int, chunk: int) -> int:
    """Multiply-adds of the delta rule for one token and head, in chunks."""
    both = keys + values
    inside = 2 * chunk * keys + chunk * both + chunk * values
    scan = -(-2 * keys * keys * both // chunk)
    return inside + keys * both + scan + 2 * keys * values


class DeltaNet(TokenMixer):
    """The delta rule as a layer, `DeltaNet(d_model, heads=H, ..., rngs=rngs)`.

        q, k, v = SiLU(conv(x Wq)), SiLU(conv(x Wk)), SiLU(conv(x Wv))        q and k then unit vectors
        beta    = sigmoid(x Wb)                                               float32
        y       = RMSNorm(delta_rule(q, k, v, beta)) Wo

    See `MixerLayer` for the arguments and `DeltaNetConfig` for the options.

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
    arXiv 2406.06484.
    """

    config_class = DeltaNetConfig

    def __init__(self, d_model: int, config: Any = None, *, rngs: nnx.Rngs, init_std: float = 0.02, **arguments: Any):
        super().__init__(d_model, config, rngs=rngs, init_std=init_std, **arguments)
        dtype = self.state_dtype
        self.beta = projection(d_model, self.config.heads, std=init_std, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def mix(self, streams: tuple[Array, ...], x: Array, segment_ids: Array | None, state: Any) -> tuple[Array, Any]:
        """Runs the delta rule over every segment."""
        q, k, v = streams
        return delta_rule(q, k, v, self.strengths(x), **self.options(segment_ids, state))

    def strengths(self, x: Array) -> Array:
        """beta, [B, T, H]."""
        beta = jax.nn.sigmoid(self.beta(x))
        return 2 * beta if self.config.negative_eigenvalues else beta

    def options(self, segment_ids: Array | None, state: Any) -> dict[str, Any]:
        """The options of the mixer function."""
        config = self.config
        return {
            "scale": config.scale,
            "segment_ids": segment_ids,
            "initial_state": state,
            "implementation": config.implementation,
            "chunk_size": config.chunk_size,
        }

    def init_mixer(self, batch_size: int) -> DeltaState:
        """The mixer's state of streams that have seen nothing."""
        sizes = batch_size, self.config.heads, self.key_size, self.value_size
        return DeltaState.init(*sizes, dtype=self.state_dtype)


class GatedDeltaNet(DeltaNet):
    """The gated delta rule as a layer, `GatedDeltaNet(d_model, heads=H, ..., rngs=rngs)`.

        q, k, v = SiLU(conv(x Wq)), SiLU(conv(x Wk)), SiLU(conv(x Wv))        q and k then unit vectors
        beta    = sigmoid(x Wb)                                               float32
        log a   = -exp(A_log) softplus(x Wa + dt_bias)                        float32, see `StepSize`
        y       = (SiLU(x Wg) * RMSNorm(gated_delta_rule(q, k, v, log a, beta))) Wo

    See `MixerLayer` for the arguments and `GatedDeltaNetConfig` for the options.

    Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464.
    """

    config_class = GatedDeltaNetConfig

    def __init__(self, d_model: int, config: Any = None, *, rngs: nnx.Rngs, init_std: float = 0.02, **arguments: Any):
        super().__init__(d_model, config, rngs=rngs, init_std=init_std, **arguments)
        sizes = {"init_std": init_std, "dtype": self.state_dtype}
        self.decay = StepSize(d_model, self.config.heads, (0.0, 16.0), rngs=rngs, **sizes)

    def mix(self, streams: tuple[Array, ...], x: Array, segment_ids: Array | None, state: Any) -> tuple[Array, Any]:
        """Runs the gated delta rule over every segment."""
        q, k, v = streams
        log_decay = -self.decay.rates() * self.decay(x)
        return gated_delta_rule(q, k, v, log_decay, self.strengths(x), **self.options(segment_ids, state))
