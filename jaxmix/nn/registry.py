"""Every mixer layer by name."""

from typing import Any

from jaxmix.arrays import fail
from jaxmix.nn.config import MixerConfig
from jaxmix.nn.delta import DeltaNetConfig, GatedDeltaNetConfig
from jaxmix.nn.hla import HLAConfig
from jaxmix.nn.interdomain_attention import InterdomainAttentionConfig
from jaxmix.nn.linear_attention import LinearAttentionConfig
from jaxmix.nn.mamba2 import Mamba2Config
from jaxmix.nn.natsl import NAtSLConfig
from jaxmix.nn.s4d import S4DConfig
from jaxmix.nn.softmax_attention import SoftmaxAttentionConfig

MIXER_CONFIGS: dict[str, type[MixerConfig]] = {
    config.name: config
    for config in (
        DeltaNetConfig,
        GatedDeltaNetConfig,
        HLAConfig,
        InterdomainAttentionConfig,
        LinearAttentionConfig,
        Mamba2Config,
        NAtSLConfig,
        S4DConfig,
        SoftmaxAttentionConfig,
    )
}


def mixer_from_dict(fields: dict[str, Any]) -> MixerConfig:
    """The mixer configuration that `MixerConfig.to_dict` wrote.

    Raises:
        ValueError: for an unknown mixer, an unknown or missing field, or a bad value.
    """
    if not isinstance(fields, dict):
        fail("mixer", "a dict", type(fields).__name__)
    name = fields.get("mixer")
    if name not in MIXER_CONFIGS:
        fail("mixer", f"one of {', '.join(MIXER_CONFIGS)}", repr(name))
    return MIXER_CONFIGS[name].from_fields({key: value for key, value in fields.items() if key != "mixer"})
