"""Linear attention as a layer."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jaxmix.arrays import Array
from jaxmix.mixers.linear_attention import LinearAttentionState, linear_attention
from jaxmix.nn.base import TokenMixer
from jaxmix.nn.recurrent import RecurrentConfig, RecurrentMixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(RecurrentConfig):
    """Configuration of `LinearAttention`: the options of every recurrent layer."""

    name: ClassVar[str] = "linear_attention"

    @property
    def layer(self) -> type[TokenMixer]:
        """`LinearAttention`."""
        return LinearAttention

    def mixer_products(self, d_model: int, length: int) -> int:
        """One linear attention."""
        keys, values = self.head_sizes(d_model)
        return self.heads * (self.chunk_size * keys + self.linear_products(keys, values))

    @property
    def mixer(self) -> Callable[..., tuple[Array, Any]]:
        """`linear_attention`."""
        return linear_attention

    @property
    def state(self) -> type[LinearAttentionState]:
        """`LinearAttentionState`."""
        return LinearAttentionState


class LinearAttention(RecurrentMixer):
    """Causal linear attention with decay; see `MixerLayer` for the arguments."""

    config_class = LinearAttentionConfig
