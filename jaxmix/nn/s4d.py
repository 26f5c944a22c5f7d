"""S4D as a layer: the state space of interdomain attention with a linear readout."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Array, einsum, fail
from jaxmix.mixers.dispatch import IMPLEMENTATIONS
from jaxmix.mixers.s4d import S4DState, s4d
from jaxmix.nn.layer import MixerLayer
from jaxmix.nn.modal import ModalConfig, ModalLayer
from jaxmix.nn.parameters import partitioned


@dataclasses.dataclass(frozen=True, kw_only=True)
class S4DConfig(ModalConfig):
    """Configuration of `S4D`; the defaults are the S4D-only baseline of the interdomain attention paper.

    Attributes:
        streams: "single" by default. With "keys and values" it is the paper's ablation without queries.
    """

    name: ClassVar[str] = "s4d"
    implementations: ClassVar[tuple[str, ...]] = (*IMPLEMENTATIONS, "fft")
    streams: Literal["keys and values", "single"] = "single"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups != self.heads:
            fail("kv_heads", f"None or heads={self.heads} (there are no queries)", self.kv_heads)

    def mixer_products(self, d_model: int, length: int) -> int:
        """A Toeplitz product inside the chunk, and 2 M real numbers in and out of the state."""
        return self.heads * sum(self.head_sizes(d_model)) * (self.chunk_size + 4 * self.modes)

    @property
    def layer(self) -> type[MixerLayer]:
        """`S4D`."""
        return S4D


class S4D(ModalLayer):
    """A diagonal state-space layer, `S4D(d_model, heads=H, ..., rngs=rngs)`.

        z = [x Wa; x Wb]                                short convolution with bias, normalised, scaled, shifted
        y = concat_h(sum_m c_h[m] Re((C_h X_t)[m])) Wo   X the modes of z; 2 d channels enter Wo

    See `MixerLayer` for the arguments and `S4DConfig` for the options.

    Source: Gu et al., arXiv 2206.11893, in the form of the baseline of Kiyohara et al., arXiv 2605.24330.
    """

    config_class = S4DConfig

    def __init__(self, d_model: int, config: Any = None, *, rngs: nnx.Rngs, **arguments: Any):
        super().__init__(d_model, config, rngs=rngs, **arguments)
        shape, dtype = (self.config.heads, self.config.modes), self.state_dtype
        readout = jax.random.normal(rngs.params(), shape, dtype) * self.config.modes**-0.5
        self.readout = nnx.Param(readout, **partitioned("heads", None))

    @property
    def output_size(self) -> int:
        """Channels of both streams."""
        return self.key_size + self.value_size

    def mix(
        self, streams: tuple[Array, ...], x: Array, segment_ids: Array | None, state: Any
    ) -> tuple[Array, S4DState]:
        """Convolves every segment."""
        config, ssm = self.config, self.ssm
        mixing, readout = ssm.mixing[...], self.readout[...]
        return s4d(
            jnp.concatenate(streams, axis=-1),
            ssm.poles(),
            ssm.step(),
            readout[:, None] * mixing if mixing.ndim == 3 else einsum("hm,hpmn->hpn", readout, mixing),
            discretization=config.discretization,
            segment_ids=segment_ids,
            initial_state=state,
            implementation=config.implementation,
            chunk_size=config.chunk_size,
        )

    def init_mixer(self, batch_size: int) -> S4DState:
        """The mixer's state of streams that have seen nothing."""
        return S4DState.init(batch_size, self.config.heads, self.config.modes, self.output_size, dtype=self.state_dtype)
