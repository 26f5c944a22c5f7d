"""Token mixers as pure functions with explicit states."""

from jaxmix.mixers.delta import DeltaState, delta_rule, gated_delta_rule
from jaxmix.mixers.hla import AHLAState, HLA2State, HLA3State, ahla, hla2, hla3
from jaxmix.mixers.interdomain import (
    InterdomainAttentionState,
    InterdomainState,
    interdomain_attention,
    interdomain_ideal,
)
from jaxmix.mixers.linear_attention import LinearAttentionState, linear_attention
from jaxmix.mixers.natsl import NAtSLState, block_softmax_attention, natsl_attention
from jaxmix.mixers.s4d import S4DState, s4d
from jaxmix.mixers.softmax_attention import SoftmaxAttentionState, softmax_attention
from jaxmix.mixers.ssd import SSDState, ssd

__all__ = [
    "AHLAState",
    "DeltaState",
    "HLA2State",
    "HLA3State",
    "InterdomainAttentionState",
    "InterdomainState",
    "LinearAttentionState",
    "NAtSLState",
    "S4DState",
    "SSDState",
    "SoftmaxAttentionState",
    "ahla",
    "block_softmax_attention",
    "delta_rule",
    "gated_delta_rule",
    "hla2",
    "hla3",
    "interdomain_attention",
    "interdomain_ideal",
    "linear_attention",
    "natsl_attention",
    "s4d",
    "softmax_attention",
    "ssd",
]
