"""What the NAtS-L layers of a decoder have routed to softmax attention, read from its state."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array
from jaxmix.models.config import DecoderConfig, group_layers
from jaxmix.models.decoder import Decoder, DecoderState
from jaxmix.nn import NAtSLConfig, RoutedState


def natsl_layers(config: DecoderConfig) -> dict[int, NAtSLConfig]:
    """The NAtS-L layers of a decoder by their number, counted from 0."""
    return {i: layer for i, layer in enumerate(config.layers) if isinstance(layer, NAtSLConfig)}


def routed_states(config: DecoderConfig, state: DecoderState) -> dict[int, RoutedState]:
    """The states of the NAtS-L layers by the number of the layer."""
    found, first = {}, 0
    for (unit, repeats), states in zip(group_layers(config.layers), state.groups, strict=True):
        for place, stacked in enumerate(states):
            for turn in range(repeats) if isinstance(stacked.mixer, RoutedState) else ():
                found[first + turn * len(unit) + place] = _take(stacked.mixer, turn)
        first += repeats * len(unit)
    return dict(sorted(found.items()))


def _take(stacked: Any, turn: int) -> Any:
    return jax.tree.map(lambda x: x[turn], stacked)


def pass_fractions(model: Decoder, tokens: Array) -> dict[int, Array]:
    """How much of each row every NAtS-L layer routes to softmax attention, in one pass.

    Args:
        model: the decoder.
        tokens: int32 [B, T]; each row is read as one document from its start.

    Returns:
        For every layer, by its number, the fraction of the whole chunks, float32 [B, H]; NaN if T holds none.
    """
    _, state = model(tokens)
    layers = natsl_layers(model.config)
    return {
        layer: routed.attention.count / jnp.float32(tokens.shape[1] // layers[layer].chunk_size)
        for layer, routed in routed_states(model.config, state).items()
    }
