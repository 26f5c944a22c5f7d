"""Named model configurations."""

from jaxmix.arrays import fail
from jaxmix.models.config import DecoderConfig
from jaxmix.nn import HLAConfig, LinearAttentionConfig, MixerConfig, SoftmaxAttentionConfig

BYTES = 256
"""Vocabulary of the byte-level presets."""


def _mixers(heads: int, capacity: int) -> dict[str, MixerConfig]:
    return {
        "hla2": HLAConfig(heads=heads, order=2),
        "ahla": HLAConfig(heads=heads, order="asymmetric"),
        "hla3": HLAConfig(heads=heads, order=3),
        "linear": LinearAttentionConfig(heads=heads),
        "softmax": SoftmaxAttentionConfig(heads=heads, capacity=capacity),
    }


def _tiny(*layers: MixerConfig) -> DecoderConfig:
    """For tests and demonstrations: compiles and runs in seconds anywhere."""
    return DecoderConfig(vocab_size=BYTES, d_model=64, layers=layers, hidden=128, tie_embeddings=True)


def _quickstart(*layers: MixerConfig) -> DecoderConfig:
    """For minutes of training on a laptop."""
    return DecoderConfig(vocab_size=BYTES, d_model=128, layers=layers, hidden=256, tie_embeddings=True)


def _small(mixer: MixerConfig) -> DecoderConfig:
    """The 125M scale: the backbone of the softmax baseline of arXiv 2605.24330."""
    return DecoderConfig(
        vocab_size=32000, d_model=768, layers=(mixer,) * 12, hidden=2048, dtype="bfloat16", remat="full"
    )


def _presets() -> dict[str, DecoderConfig]:
    tiny, quickstart = _mixers(heads=2, capacity=512), _mixers(heads=4, capacity=4096)
    presets = {f"{name}-tiny": _tiny(mixer, mixer) for name, mixer in tiny.items()}
    presets["hybrid-tiny"] = _tiny(tiny["hla2"], tiny["hla2"], tiny["hla2"], tiny["softmax"])
    presets |= {f"{name}-quickstart": _quickstart(*(mixer,) * 4) for name, mixer in quickstart.items()}
    presets |= {f"{name}-125m": _small(mixer) for name, mixer in _mixers(heads=12, capacity=4096).items()}
    return presets


PRESETS = _presets()
"""Configurations by name."""


def get_preset(name: str) -> DecoderConfig:
    """The named configuration.

    Raises:
        ValueError: lists the names when `name` is none of them.
    """
    if name not in PRESETS:
        fail("preset", f"one of {', '.join(PRESETS)}", repr(name))
    return PRESETS[name]
