"""Sizes of a model, found without making it."""

import math
from typing import Any

import jax
from flax import nnx

from jaxmix.models.config import DecoderConfig
from jaxmix.models.decoder import Decoder

GROUPS = ("embedding", "mixer", "mlp", "norm", "head")
"""Parts that `parameter_groups` counts."""


def abstract_decoder(config: DecoderConfig) -> Decoder:
    """The decoder with shapes and dtypes in place of arrays."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def abstract_parameters(config: DecoderConfig) -> dict[tuple[Any, ...], jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by its path in the decoder; those of equal layers are stacked."""
    return nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.state(abstract_decoder(config), nnx.Param)))


def parameter_groups(config: DecoderConfig) -> dict[str, int]:
    """The number of parameters of each part: embedding, mixers, SwiGLUs, norms of the residual stream, output map."""
    counts: dict[str, int] = dict.fromkeys(GROUPS, 0)
    for path, leaf in nnx.to_flat_state(nnx.state(abstract_decoder(config), nnx.Param)):
        names = [str(key) for key in path]
        part = "norm" if names[-2:] in (["norm", "scale"], ["mixer_norm", "scale"], ["mlp_norm", "scale"]) else None
        part = part or next(name for name in GROUPS if name in names)
        counts[part] += math.prod(leaf.shape)
    return counts


def parameter_count(config: DecoderConfig) -> int:
    """The number of parameters."""
    return sum(parameter_groups(config).values())


def flops_per_token(config: DecoderConfig, length: int) -> dict[str, int]:
    """Floating point operations for one token of a sequence of `length` tokens, a multiply-add being two.

    "forward" counts two per parameter (the embedding is looked up and does not count, the output map does) and the
    mixers' matrix products; "backward" is twice that, without what remat computes again.
    """
    groups = parameter_groups(config)
    multiplied = sum(groups.values()) - (0 if config.tie_embeddings else groups["embedding"])
    products = sum(layer.mixer_products(config.d_model, length) for layer in config.layers)
    forward = 2 * (multiplied + products)
    return {"forward": forward, "backward": 2 * forward}


def state_bytes(config: DecoderConfig) -> int:
    """Bytes of the state of one stream, at every length."""
    decoder: Any = abstract_decoder(config)
    state = jax.eval_shape(lambda: decoder.init_state(1))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
