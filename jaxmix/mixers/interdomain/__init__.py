"""Interdomain attention: keys and values projected on the basis functions of a state space model."""

from jaxmix.mixers.interdomain.attention import interdomain_attention
from jaxmix.mixers.interdomain.attention_state import InterdomainAttentionState
from jaxmix.mixers.interdomain.features import (
    gaussian_frequencies,
    positive_softmax_features,
    random_fourier_features,
    silu_features,
    trigonometric_softmax_features,
)
from jaxmix.mixers.interdomain.hippo import Hippo
from jaxmix.mixers.interdomain.ideal import interdomain_ideal
from jaxmix.mixers.interdomain.ideal_summary import InterdomainState, TransitionSummary

__all__ = [
    "Hippo",
    "InterdomainAttentionState",
    "InterdomainState",
    "TransitionSummary",
    "gaussian_frequencies",
    "interdomain_attention",
    "interdomain_ideal",
    "positive_softmax_features",
    "random_fourier_features",
    "silu_features",
    "trigonometric_softmax_features",
]
