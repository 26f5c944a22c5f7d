"""Named model configurations."""

from jaxmix.arrays import fail
from jaxmix.models.config import DecoderConfig
from jaxmix.nn import (
    HLAConfig,
    InterdomainAttentionConfig,
    LinearAttentionConfig,
    MixerConfig,
    S4DConfig,
    SoftmaxAttentionConfig,
)

BYTES = 256
"""Vocabulary of the byte-level presets."""


def _mixers(heads: int, capacity: int) -> dict[str, MixerConfig]:
    return {
        "hla2": HLAConfig(heads=heads, order=2),
        "ahla": HLAConfig(heads=heads, order="asymmetric"),
        "hla3": HLAConfig(heads=heads, order=3),
        "interdomain": InterdomainAttentionConfig(heads=heads),
        "linear": LinearAttentionConfig(heads=heads),
        "s4d": S4DConfig(heads=heads),
        "softmax": SoftmaxAttentionConfig(heads=heads, capacity=capacity),
    }


def _tiny(*layers: MixerConfig) -> DecoderConfig:
    """For tests and demonstrations: compiles and runs in seconds anywhere."""
    return DecoderConfig(vocab_size=BYTES, d_model=64, layers=layers, hidden=128, tie_embeddings=True)


def _quickstart(*layers: MixerConfig) -> DecoderConfig:
    """For minutes of training on a laptop."""
    return DecoderConfig(vocab_size=BYTES, d_model=128, layers=layers, hidden=256, tie_embeddings=True)


# Width, layers, heads and SwiGLU size of the backbones of arXiv 2605.24330.
_SCALES = {
    "125m": (768, 12, 12, 2048),
    "350m": (1024, 24, 16, 2816),
    "760m": (1536, 24, 16, 4096),
    "1.3b": (2048, 24, 32, 5504),
}


def _scaled(scale: str, mixer: MixerConfig) -> DecoderConfig:
    width, layers, _, hidden = _SCALES[scale]
    return DecoderConfig(
        vocab_size=32000, d_model=width, layers=(mixer,) * layers, hidden=hidden, dtype="bfloat16", remat="full"
    )


def _ablations(heads: int) -> dict[str, MixerConfig]:
    """The ablations of arXiv 2605.24330 beside interdomain, s4d and softmax."""
    return {
        "interdomain-no-rope": InterdomainAttentionConfig(heads=heads, rope=False),
        "interdomain-single": InterdomainAttentionConfig(heads=heads, streams="single"),
        "s4d-rope": S4DConfig(heads=heads, rope=True),
        "s4d-keys-values": S4DConfig(heads=heads, streams="keys and values", rope=True),
    }


def _presets() -> dict[str, DecoderConfig]:
    tiny, quickstart = _mixers(heads=2, capacity=512), _mixers(heads=4, capacity=4096)
    presets = {f"{name}-tiny": _tiny(mixer, mixer) for name, mixer in tiny.items()}
    presets["hybrid-tiny"] = _tiny(tiny["hla2"], tiny["hla2"], tiny["hla2"], tiny["softmax"])
    presets |= {f"{name}-quickstart": _quickstart(*(mixer,) * 4) for name, mixer in quickstart.items()}
    small = _mixers(heads=12, capacity=4096) | _ablations(heads=12)
    presets |= {f"{name}-125m": _scaled("125m", mixer) for name, mixer in small.items()}
    for scale in ("350m", "760m", "1.3b"):
        mixers = _mixers(heads=_SCALES[scale][2], capacity=4096)
        presets |= {f"{name}-{scale}": _scaled(scale, mixers[name]) for name in ("interdomain", "s4d", "softmax")}
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
