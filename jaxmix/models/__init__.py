"""Decoder-only language models over the mixer layers."""

from jaxmix.models.config import DecoderConfig
from jaxmix.models.decoder import Decoder, DecoderState
from jaxmix.models.presets import PRESETS, get_preset
from jaxmix.models.sizes import flops_per_token, parameter_count, parameter_groups, state_bytes

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "flops_per_token",
    "get_preset",
    "parameter_count",
    "parameter_groups",
    "state_bytes",
]
