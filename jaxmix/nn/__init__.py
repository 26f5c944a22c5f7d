"""Mixer layers for Flax NNX: parameters and projections around the functions of `jaxmix.mixers`."""

from jaxmix.mixers.s4d import s4d_poles
from jaxmix.nn.base import TokenMixer
from jaxmix.nn.config import MixerConfig
from jaxmix.nn.convolution import ShortConvolution, short_convolution
from jaxmix.nn.decay import DataDecay, HeadDecay, StepSize
from jaxmix.nn.delta import DeltaNet, DeltaNetConfig, GatedDeltaNet, GatedDeltaNetConfig
from jaxmix.nn.hla import HLA, HLAConfig
from jaxmix.nn.interdomain_attention import InterdomainAttention, InterdomainAttentionConfig
from jaxmix.nn.layer import LayerState, MixerLayer
from jaxmix.nn.linear_attention import LinearAttention, LinearAttentionConfig
from jaxmix.nn.mamba2 import Mamba2, Mamba2Config
from jaxmix.nn.mlp import SwiGLU
from jaxmix.nn.natsl import NAtSL, NAtSLConfig, RoutedState
from jaxmix.nn.norms import RMSNorm, l2_normalize
from jaxmix.nn.parameters import parameter_label
from jaxmix.nn.registry import MIXER_CONFIGS, mixer_from_dict
from jaxmix.nn.rope import rotate
from jaxmix.nn.s4d import S4D, S4DConfig
from jaxmix.nn.softmax_attention import SoftmaxAttention, SoftmaxAttentionConfig

__all__ = [
    "HLA",
    "MIXER_CONFIGS",
    "S4D",
    "DataDecay",
    "DeltaNet",
    "DeltaNetConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "HLAConfig",
    "HeadDecay",
    "InterdomainAttention",
    "InterdomainAttentionConfig",
    "LayerState",
    "LinearAttention",
    "LinearAttentionConfig",
    "Mamba2",
    "Mamba2Config",
    "MixerConfig",
    "MixerLayer",
    "NAtSL",
    "NAtSLConfig",
    "RMSNorm",
    "RoutedState",
    "S4DConfig",
    "ShortConvolution",
    "SoftmaxAttention",
    "SoftmaxAttentionConfig",
    "StepSize",
    "SwiGLU",
    "TokenMixer",
    "l2_normalize",
    "mixer_from_dict",
    "parameter_label",
    "rotate",
    "s4d_poles",
    "short_convolution",
]
