"""jaxmix: fixed-state token mixers for JAX."""

from jaxmix.mixers import (
    AHLAState,
    HLA2State,
    HLA3State,
    LinearAttentionState,
    SoftmaxAttentionState,
    ahla,
    hla2,
    hla3,
    linear_attention,
    softmax_attention,
)

__version__ = "0.1.0"

__all__ = [
    "AHLAState",
    "HLA2State",
    "HLA3State",
    "LinearAttentionState",
    "SoftmaxAttentionState",
    "__version__",
    "ahla",
    "hla2",
    "hla3",
    "linear_attention",
    "softmax_attention",
]
