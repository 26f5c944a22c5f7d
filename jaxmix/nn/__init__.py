"""Mixer layers for Flax NNX: parameters and projections around the functions of `jaxmix.mixers`."""

from jaxmix.nn.base import LayerState, TokenMixer
from jaxmix.nn.config import MixerConfig
from jaxmix.nn.convolution import ShortConvolution, short_convolution
from jaxmix.nn.decay import DataDecay, HeadDecay
from jaxmix.nn.hla import HLA, HLAConfig
from jaxmix.nn.linear_attention import LinearAttention, LinearAttentionConfig
from jaxmix.nn.mlp import SwiGLU
from jaxmix.nn.norms import RMSNorm, l2_normalize
from jaxmix.nn.registry import MIXER_CONFIGS, mixer_from_dict
from jaxmix.nn.rope import rotate
from jaxmix.nn.softmax_attention import SoftmaxAttention, SoftmaxAttentionConfig

__all__ = [
    "HLA",
    "MIXER_CONFIGS",
    "DataDecay",
    "HLAConfig",
    "HeadDecay",
    "LayerState",
    "LinearAttention",
    "LinearAttentionConfig",
    "MixerConfig",
    "RMSNorm",
    "ShortConvolution",
    "SoftmaxAttention",
    "SoftmaxAttentionConfig",
    "SwiGLU",
    "TokenMixer",
    "l2_normalize",
    "mixer_from_dict",
    "rotate",
    "short_convolution",
]
