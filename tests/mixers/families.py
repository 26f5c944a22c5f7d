"""Inputs, variants and specs that linear attention and the three HLA mixers share in their tests."""

import numpy as np

from tests.contract import MixerSpec, Shape, Variant
from tests.mixers.brute_force import by_document

GROUPED = Shape(heads=4, kv_heads=2)

PLAIN, NORMALISED = "decay per token", "one key head, normalised, decay per shared head"

COMMON = {
    PLAIN: Variant(gate="token"),
    "no decay": Variant(shape=Shape(key_size=4, value_size=4)),
    "decay per head": Variant(gate="head", shape=Shape(key_size=6, value_size=3)),
    "grouped heads, shared decay": Variant(shape=GROUPED, gate="shared token"),
    "grouped heads, own decay": Variant(shape=GROUPED, gate="token"),
    NORMALISED: Variant(
        {"normalize": True, "eps": 1e-3}, shape=Shape(heads=3, kv_heads=1), gate="shared head", positive=True
    ),
}


def draw(rng, batch, tokens, variant) -> dict[str, np.ndarray]:
    """Draws q, k, v of variance one and, if the variant asks for it, log_decay between -1 and -1e-3 a step."""
    shape = variant.shape
    inputs = {
        "q": rng.normal(size=(batch, tokens, shape.heads, shape.key_size)),
        "k": rng.normal(size=(batch, tokens, shape.kv_heads, shape.key_size)),
        "v": rng.normal(size=(batch, tokens, shape.kv_heads, shape.value_size)),
    }
    if variant.positive:
        inputs |= {name: np.abs(inputs[name]) + 0.1 for name in ("q", "k")}
    if variant.gate != "none":
        heads = shape.kv_heads if variant.gate.startswith("shared") else shape.heads
        size = (batch, tokens, heads) if variant.gate.endswith("token") else (heads,)
        inputs["log_decay"] = -np.exp(rng.uniform(np.log(1e-3), 0.0, size))
    return inputs


def shared_heads(variant) -> int:
    """Heads of the moments that do not depend on queries: G unless every query head has a decay of its own."""
    return variant.shape.heads if variant.gate in ("token", "head") else variant.shape.kv_heads


def make_spec(function, state, one_head, variants=None, representatives=(), **fields) -> MixerSpec:
    """Makes the spec of a mixer from its definition for one head, its own variants and who represents them."""

    def init_state(variant, batch, dtype):
        shape = variant.shape
        return state.init(
            batch, shape.heads, shape.key_size, shape.value_size, shared_heads=shared_heads(variant), dtype=dtype
        )

    return MixerSpec(
        function=function,
        state=state,
        draw=draw,
        init_state=init_state,
        brute_force=lambda inputs, segment_ids, variant: by_document(one_head, inputs, segment_ids, **variant.options),
        variants=COMMON | (variants or {}),
        representatives=(PLAIN, *representatives),
        **{"sharded_variants": (PLAIN,), **fields},
    )
