"""The models that are compared: one line each in `MIXERS`, `ABLATIONS` or `CONTROLS`, a mixer or one per layer."""

import dataclasses

from jaxmix.models import DecoderConfig, parameter_count
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

LAYERS, STEP = 4, 4
"""Layers of every model, and what SwiGLU sizes are multiples of."""
H = 2
"""Heads, unless the size says otherwise."""
SHORT = (1.0, 32.0)
"""Initial time scales of controls, tokens; by default 8 to 1024."""

GDN = GatedDeltaNetConfig(heads=H)
SOFTMAX = SoftmaxAttentionConfig(heads=H)
NO_ROPE = dataclasses.replace(SOFTMAX, rope=False)
NATSL = NAtSLConfig(heads=H, group=1, chunk_size=16)
PURE = dataclasses.replace(NATSL, rope=True)

Layers = MixerConfig | tuple[MixerConfig, ...]
MIXERS: dict[str, Layers] = {
    "linear": LinearAttentionConfig(heads=H),
    "deltanet": DeltaNetConfig(heads=H),
    "gdn": GDN,
    "mamba2": Mamba2Config(heads=H, key_size=32),
    "hla2": HLAConfig(heads=H),
    "ahla": HLAConfig(heads=H, order="asymmetric"),
    "hla3": HLAConfig(heads=H, order=3),
    "interdomain": InterdomainAttentionConfig(heads=H),
    "s4d": S4DConfig(heads=H),
    "softmax": SOFTMAX,
    "gdn-hybrid": (GDN, GDN, GDN, SOFTMAX),
    "gdn-hybrid-no-rope": (GDN, GDN, GDN, NO_ROPE),
    "natsl": PURE,
    "natsl-hybrid": (GDN, GDN, GDN, NATSL),
}
ABLATIONS: dict[str, Layers] = {
    "natsl-counterfactual": dataclasses.replace(PURE, counterfactual_router_grad=True),
    "natsl-hybrid-counterfactual": (GDN, GDN, GDN, dataclasses.replace(NATSL, counterfactual_router_grad=True)),
    "natsl-own-softmax": dataclasses.replace(PURE, own_chunk="softmax"),
    "natsl-own-linear": dataclasses.replace(PURE, own_chunk="linear"),
    "natsl-no-softmax-decay": dataclasses.replace(PURE, decay_through_softmax=False),
    "natsl-no-branch-norm": dataclasses.replace(PURE, branch_norm=False),
    "natsl-no-fusion": dataclasses.replace(PURE, fusion=None),
    "natsl-input-fusion": dataclasses.replace(PURE, fusion="input"),
}
"""What NAtS-L's paper takes away, and routers that learn from the branch not taken as well."""
CONTROLS: dict[str, Layers] = {
    "softmax-conv": dataclasses.replace(SOFTMAX, conv_width=4),
    "softmax-no-rope-conv": dataclasses.replace(NO_ROPE, conv_width=4),
    "linear-no-decay": LinearAttentionConfig(heads=H, decay=None),
    "linear-data": LinearAttentionConfig(heads=H, decay="data"),
    "hla2-no-decay": HLAConfig(heads=H, decay=None),
    "hla2-data": HLAConfig(heads=H, decay="data"),
    "ahla-no-decay": HLAConfig(heads=H, order="asymmetric", decay=None),
    "ahla-data": HLAConfig(heads=H, order="asymmetric", decay="data"),
    "hla3-no-decay": HLAConfig(heads=H, order=3, decay=None),
    "hla3-data": HLAConfig(heads=H, order=3, decay="data"),
    "linear-short": LinearAttentionConfig(heads=H, time_scales=SHORT),
    "hla2-short": HLAConfig(heads=H, time_scales=SHORT),
    "ahla-short": HLAConfig(heads=H, order="asymmetric", time_scales=SHORT),
    "hla3-short": HLAConfig(heads=H, order=3, time_scales=SHORT),
    "mamba2-state-128": Mamba2Config(heads=H),
    "interdomain-gate": InterdomainAttentionConfig(heads=H, gate=True),
}
ALL = MIXERS | ABLATIONS | CONTROLS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Width, heads and the number of parameters that SwiGLU sizes are chosen for."""

    width: int = 64
    heads: int = H
    parameters: int = 210_000


def model(name: str, size: Size, *, vocabulary: int, length: int) -> DecoderConfig:
    """The decoder with these mixers, and caches for `length` tokens, whose size is nearest to `size.parameters`.

    Raises:
        ValueError: if it is not within 3 %.
    """
    mixers = ALL[name]
    layers = mixers if isinstance(mixers, tuple) else (mixers,) * LAYERS
    if len(layers) != LAYERS:
        raise ValueError(f"{name}: expected {LAYERS} layers, got {len(layers)}")
    layers = tuple(_fitted(mixer, size.heads, length) for mixer in layers)

    def sized(hidden: int) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=vocabulary, d_model=size.width, layers=layers, hidden=hidden, tie_embeddings=True
        )

    first = parameter_count(sized(STEP))
    per_hidden = (parameter_count(sized(2 * STEP)) - first) / STEP
    hidden = STEP * max(1, round(1 + (size.parameters - first) / per_hidden / STEP))
    found = parameter_count(sized(hidden))
    if abs(found / size.parameters - 1) > 0.03:
        raise ValueError(f"{name}: expected about {size.parameters:,} parameters, got {found:,}; see --parameters")
    return sized(hidden)


def _fitted(mixer: MixerConfig, heads: int, length: int) -> MixerConfig:
    """The mixer with so many heads, and a cache with room for `length` tokens if it has one."""
    mixer = dataclasses.replace(mixer, heads=heads)
    if isinstance(mixer, NAtSLConfig):
        return dataclasses.replace(mixer, capacity=heads * -(-length // mixer.chunk_size))
    return dataclasses.replace(mixer, capacity=length) if isinstance(mixer, SoftmaxAttentionConfig) else mixer
