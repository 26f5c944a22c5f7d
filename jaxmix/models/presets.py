"""Named model configurations."""

import dataclasses
from typing import Any

from jaxmix.arrays import fail
from jaxmix.models.config import DecoderConfig
from jaxmix.nn import (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    HLAConfig,
    InterdomainAttentionConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MixerConfig,
    NAtSLConfig,
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
        "deltanet": DeltaNetConfig(heads=heads),
        "gdn": GatedDeltaNetConfig(heads=heads),
        "interdomain": InterdomainAttentionConfig(heads=heads),
        "mamba2": Mamba2Config(heads=heads, key_size=32),
        "linear": LinearAttentionConfig(heads=heads),
        "s4d": S4DConfig(heads=heads),
        "natsl": NAtSLConfig(heads=heads, chunk_size=16, capacity=heads * capacity // 16),
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


# Width, layers, heads of Gated DeltaNet with their key and value sizes, heads of softmax attention, and SwiGLU size of
# the models of arXiv 2602.03681; Mamba-2 has no SwiGLU and as many blocks of twice the width as arXiv 2405.21060.
_PEERS = {"380m": (1024, 21, 6, 128, 256, 16, 2816), "800m": (1536, 21, 6, 192, 384, 24, 4096)}


def _peers(scale: str) -> dict[str, DecoderConfig]:
    """NAtS-L, Gated DeltaNet, its hybrids with softmax attention in every fourth layer, the Transformer and Mamba-2."""
    width, layers, heads, keys, values, softmax_heads, hidden = _PEERS[scale]
    delta = GatedDeltaNetConfig(heads=heads, key_size=keys, value_size=values)
    softmax = SoftmaxAttentionConfig(heads=softmax_heads, capacity=4096)
    # Softmax heads of 64 channels; room for every chunk of 4096 tokens.
    routed = NAtSLConfig(heads=heads, group=keys // 64, key_size=keys, value_size=values, capacity=heads * 64)
    shared: dict[str, Any] = {"vocab_size": 32000, "d_model": width, "dtype": "bfloat16", "remat": "full"}

    def hybrid(attention: MixerConfig) -> DecoderConfig:
        mixers = tuple(attention if i % 4 == 3 else delta for i in range(layers))
        return DecoderConfig(layers=mixers, hidden=hidden, **shared)

    pure = dataclasses.replace(routed, rope=True)
    places = (3, 7, 11, 15, 19, 20)
    return {
        f"natsl-{scale}": DecoderConfig(
            layers=tuple(routed if i in places else delta for i in range(layers)), hidden=hidden, **shared
        ),
        f"natsl-pure-{scale}": DecoderConfig(layers=(pure,) * layers, hidden=hidden, **shared),
        f"gdn-{scale}": DecoderConfig(layers=(delta,) * layers, hidden=hidden, **shared),
        f"gdn-hybrid-{scale}": hybrid(softmax),
        f"gdn-hybrid-no-rope-{scale}": hybrid(dataclasses.replace(softmax, rope=False)),
        f"transformer-{scale}": DecoderConfig(layers=(softmax,) * (layers + 3), hidden=hidden, **shared),
        f"mamba2-{scale}": DecoderConfig(layers=(Mamba2Config(heads=width // 32),) * 48, hidden=0, **shared),
    }


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
    for scale in _PEERS:
        presets |= _peers(scale)
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
