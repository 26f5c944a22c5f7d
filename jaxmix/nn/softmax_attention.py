"""Softmax attention as a layer."""

import dataclasses
from typing import ClassVar

from jaxmix.arrays import Array, check_count, fail
from jaxmix.mixers.softmax_attention import SoftmaxAttentionState, softmax_attention
from jaxmix.nn.base import TokenMixer
from jaxmix.nn.config import QueryKeyConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxAttentionConfig(QueryKeyConfig):
    """Configuration of `SoftmaxAttention`: the attention of Llama by default, and the options of every mixer.

    Attributes:
        rope: on by default.
        scale: D^-1/2 by default, D^1/2 with `qk_norm`, which makes unit vectors.
        capacity: slots of the key/value cache, the longest segment that the layer can serve. Calls may not have more
            tokens; in compiled code the outputs of tokens that do not fit are NaN.
    """

    name: ClassVar[str] = "softmax_attention"
    has_cache: ClassVar[bool] = True
    rope: bool = True
    capacity: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("capacity", self.capacity)

    def mixer_products(self, d_model: int, length: int) -> int:
        """Scores and values of all earlier tokens: those of the mean token."""
        return self.heads * sum(self.head_sizes(d_model)) * (length + 1) // 2

    @property
    def layer(self) -> type[TokenMixer]:
        """`SoftmaxAttention`."""
        return SoftmaxAttention


class SoftmaxAttention(TokenMixer):
    """Causal softmax attention with rotary positions and grouped heads; see `MixerLayer` for the arguments."""

    config_class = SoftmaxAttentionConfig

    def mix(
        self, streams: tuple[Array, ...], x: Array, segment_ids: Array | None, state: SoftmaxAttentionState | None
    ) -> tuple[Array, SoftmaxAttentionState]:
        """Attends within every segment."""
        q, k, v = streams
        config = self.config
        if q.shape[1] > config.capacity:
            fail("x", f"at most capacity={config.capacity} tokens in a call (see SoftmaxAttentionConfig)", q.shape[1])
        scale = config.scale
        if scale is None:
            scale = self.key_size ** (-0.5 if config.qk_norm is None else 0.5)
        return softmax_attention(
            q,
            k,
            v,
            scale=scale,
            segment_ids=segment_ids,
            initial_state=state,
            implementation=config.implementation,
            capacity=config.capacity,
        )

    def init_mixer(self, batch_size: int) -> SoftmaxAttentionState:
        """An empty cache in the compute dtype."""
        return SoftmaxAttentionState.init(
            batch_size,
            self.config.groups,
            self.key_size,
            self.value_size,
            capacity=self.config.capacity,
            dtype=self.dtype,
        )
