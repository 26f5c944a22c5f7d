"""jaxmix: fixed-state token mixers for JAX."""

from jaxmix.mixers import (
    AHLAState,
    HLA2State,
    HLA3State,
    InterdomainAttentionState,
    InterdomainState,
    LinearAttentionState,
    S4DState,
    SoftmaxAttentionState,
    ahla,
    hla2,
    hla3,
    interdomain_attention,
    interdomain_ideal,
    linear_attention,
    s4d,
    softmax_attention,
)

__version__ = "0.1.0"

__all__ = [
    "AHLAState",
    "HLA2State",
    "HLA3State",
    "InterdomainAttentionState",
    "InterdomainState",
    "LinearAttentionState",
    "S4DState",
    "SoftmaxAttentionState",
    "__version__",
    "ahla",
    "hla2",
    "hla3",
    "interdomain_attention",
    "interdomain_ideal",
    "linear_attention",
    "s4d",
    "softmax_attention",
]
