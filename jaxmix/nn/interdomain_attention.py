"""Interdomain attention as a layer."""

import dataclasses
from typing import Any, ClassVar

from jaxmix.arrays import Array, check_flag, check_positive
from jaxmix.mixers.interdomain import InterdomainAttentionState, interdomain_attention
from jaxmix.nn.layer import MixerLayer
from jaxmix.nn.modal import ModalConfig, ModalLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterdomainAttentionConfig(ModalConfig):
    """Configuration of `InterdomainAttention`; the defaults are the paper's layer.

    Attributes:
        rope: on by default.
        conjugate: read conj(q . U) instead of q . U.
        normalize: divide by what the constant 1 gives, plus `eps`; see `jaxmix.interdomain_attention`.
        eps: added to the denominator.
    """

    name: ClassVar[str] = "interdomain_attention"
    rope: bool = True
    conjugate: bool = False
    normalize: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("conjugate", self.conjugate)
        check_flag("normalize", self.normalize)
        check_positive("eps", self.eps)

    def mixer_products(self, d_model: int, length: int) -> int:
        """Two linear attentions with 2 M real numbers in place of a key, around the mixing of the modes."""
        keys, values = self.head_sizes(d_model)
        reals, chunk = 2 * self.modes, self.chunk_size
        mixing = reals * reals if self.mixing == "full" else 2 * reals
        inside = chunk * (keys + 2 * reals + values)
        return self.heads * (inside + 2 * reals * (keys + values) + mixing)

    @property
    def layer(self) -> type[MixerLayer]:
        """`InterdomainAttention`."""
        return InterdomainAttention


class InterdomainAttention(ModalLayer):
    """Interdomain attention, `InterdomainAttention(d_model, heads=H, ..., rngs=rngs)`.

        q, k, v = x Wq, x Wk, x Wv        short convolution with bias on q and k, then rotation
        z       = [xi(k); v]              normalised, scaled, shifted; xi(x) = SiLU(x) / ||SiLU(x)||
        y       = concat_h(interdomain_attention(xi(q), z)) Wo

    See `MixerLayer` for the arguments and `InterdomainAttentionConfig` for the options.

    Source: Kiyohara et al., "Interdomain Attention: Beyond Token-Level Key-Value Memory", arXiv 2605.24330.
    """

    config_class = InterdomainAttentionConfig
    has_queries = True

    def mix(
        self, streams: tuple[Array, ...], x: Array, segment_ids: Array | None, state: Any
    ) -> tuple[Array, InterdomainAttentionState]:
        """Attends within every segment."""
        config, ssm = self.config, self.ssm
        q, k, v = streams
        return interdomain_attention(
            q,
            k,
            v,
            ssm.poles(),
            ssm.step(),
            ssm.mixing[...],
            conjugate=config.conjugate,
            normalize=config.normalize,
            eps=config.eps,
            discretization=config.discretization,
            segment_ids=segment_ids,
            initial_state=state,
            implementation=config.implementation,
            chunk_size=config.chunk_size,
        )

    def init_mixer(self, batch_size: int) -> InterdomainAttentionState:
        """The mixer's state of streams that have seen nothing."""
        config = self.config
        return InterdomainAttentionState.init(
            batch_size,
            config.heads,
            self.key_size,
            self.value_size,
            modes=config.modes,
            shared_heads=config.groups,
            dtype=self.state_dtype,
        )
