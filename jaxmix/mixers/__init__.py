"""Token mixers as pure functions with explicit states."""

from jaxmix.mixers.hla import AHLAState, HLA2State, HLA3State, ahla, hla2, hla3
from jaxmix.mixers.linear_attention import LinearAttentionState, linear_attention
from jaxmix.mixers.softmax_attention import SoftmaxAttentionState, softmax_attention

__all__ = [
    "AHLAState",
    "HLA2State",
    "HLA3State",
    "LinearAttentionState",
    "SoftmaxAttentionState",
    "ahla",
    "hla2",
    "hla3",
    "linear_attention",
    "softmax_attention",
]
