"""How the NAtS-L layers of a decoder route a text: which chunks softmax attention keeps, and what that costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmix.models import Decoder
from jaxmix.models.routing import natsl_layers, pass_fractions, routed_states
from jaxmix.nn import NAtSLConfig, RoutedState, SoftmaxAttentionConfig

# Fields of a state that grow with what is kept; all else of it has one size.
_PAGES = ("page_k", "page_v")
_BOOKS = ("weight", "table")


@dataclass(frozen=True)
class LayerRoutes:
    """The choices of one layer.

    Attributes:
        layer: its number in the decoder, from 0.
        chunk_size: tokens that are routed together.
        softmax: for every head and chunk whether softmax attention keeps it, bool [H, N]; else the linear state does.
        page_bytes: keys and values of one chunk of one head.
        fixed_bytes: the rest of the layer's state of one stream but for its page tables: linear states, open chunk,
            router.
        capacity: pages that a stream has room for.
    """

    layer: int
    chunk_size: int
    softmax: np.ndarray
    page_bytes: int
    fixed_bytes: int
    capacity: int

    @property
    def fractions(self) -> np.ndarray:
        """Fraction of the chunks that softmax attention keeps, by head [H]."""
        return self.softmax.mean(axis=1)

    def pages(self, tokens: np.ndarray) -> np.ndarray:
        """Pages kept after each of these numbers of tokens."""
        kept = np.concatenate([[0], np.cumsum(self.softmax.sum(axis=0))])
        return kept[tokens // self.chunk_size]

    def all_pages(self, tokens: np.ndarray) -> np.ndarray:
        """Pages of a layer that keeps every chunk in every head: those of full softmax attention."""
        return tokens // self.chunk_size * self.softmax.shape[0]


@dataclass(frozen=True)
class RouterMap:
    """How a text was routed.

    Attributes:
        layers: the NAtS-L layers in order.
        step: tokens of a call, the greatest common divisor of the chunk sizes.
        tokens: how many tokens of the text were read, a multiple of `step`.
    """

    layers: tuple[LayerRoutes, ...]
    step: int
    tokens: int

    @property
    def positions(self) -> np.ndarray:
        """Numbers of tokens from 0 to the whole text, a step apart."""
        return np.arange(0, self.tokens + 1, self.step)

    @property
    def kept_bytes(self) -> np.ndarray:
        """Bytes of the pages of all layers at each of `positions`."""
        return sum((x.page_bytes * x.pages(self.positions) for x in self.layers), np.zeros(1, np.int64))

    @property
    def full_bytes(self) -> np.ndarray:
        """What full softmax attention in these layers would hold at each of `positions`."""
        return sum((x.page_bytes * x.all_pages(self.positions) for x in self.layers), np.zeros(1, np.int64))

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all layers that do not depend on the text."""
        return sum(x.fixed_bytes for x in self.layers)


def router_map(model: Decoder, tokens: Sequence[int] | np.ndarray) -> RouterMap:
    """Reads a text chunk by chunk and looks how many pages every head has kept after each.

    The decoder's state is handed on from call to call, as in decoding, so that memory does not grow with the text.

    Args:
        model: a decoder with NAtS-L layers.
        tokens: ids of one document, [T]; what follows the last whole chunk is not routed and left out.

    Returns:
        The choices, and the sizes that follow from them.

    Raises:
        ValueError: if no layer is NAtS-L, the text has no whole chunk, or it needs more than a layer's capacity.
    """
    tokens, layers = _checked(model, tokens)
    step = math.gcd(*(layer.chunk_size for layer in layers.values()))
    for number, layer in enumerate(model.config.layers):
        if isinstance(layer, SoftmaxAttentionConfig) and layer.capacity < len(tokens):
            raise ValueError(
                f"capacity: expected a text of at most the {layer.capacity} tokens that the cache of layer {number}, "
                f"softmax attention, has room for, got {len(tokens)} tokens; read fewer, or configure a larger capacity"
            )
    steps = len(tokens) // step
    structure, variables = nnx.split(model)
    state, counts = model.init_state(1), []
    sizes = {layer: _sizes(routed) for layer, routed in routed_states(model.config, state).items()}
    for index in range(steps):
        call = tokens[None, index * step : (index + 1) * step]
        count, state = _read(variables, call, state, structure=structure)
        counts.append(jax.device_get(count))
        for number, layer in layers.items():
            needed = int(counts[-1][number].sum())
            if needed > layer.capacity:
                raise ValueError(
                    f"capacity: expected layer {number} to keep at most its {layer.capacity} pages, got {needed} after "
                    f"{(index + 1) * step} of {len(tokens)} tokens; read fewer tokens, or configure a larger capacity"
                )
    routes = []
    for number, layer in layers.items():
        every = layer.chunk_size // step
        after = np.stack([count[number] for count in counts[every - 1 :: every]])
        softmax = np.diff(after, axis=0, prepend=0).T.astype(bool)
        routes.append(LayerRoutes(number, layer.chunk_size, softmax, *sizes[number], layer.capacity))
    return RouterMap(tuple(routes), step, steps * step)


def softmax_fractions(model: Decoder, tokens: Sequence[int] | np.ndarray) -> dict[int, np.ndarray]:
    """How much of a text every layer routes to softmax attention, in one pass over all of it.

    Args:
        model: a decoder with NAtS-L layers.
        tokens: ids of one document, [T].

    Returns:
        For every NAtS-L layer, by its number from 0, the fraction of the whole chunks by head, [H].

    Raises:
        ValueError: if no layer is NAtS-L or the text has no whole chunk.
    """
    tokens, _ = _checked(model, tokens)
    structure, variables = nnx.split(model)
    found = jax.device_get(_fractions(variables, tokens[None], structure=structure))
    return {layer: rows[0] for layer, rows in found.items()}


def _checked(model: Decoder, tokens: Sequence[int] | np.ndarray) -> tuple[np.ndarray, dict[int, NAtSLConfig]]:
    layers = natsl_layers(model.config)
    if not layers:
        mixers = ", ".join(dict.fromkeys(layer.name for layer in model.config.layers))
        raise ValueError(f"model: expected a decoder with NAtS-L layers, which have a router, got layers of {mixers}")
    tokens = np.asarray(tokens, np.int32)
    largest = max(layer.chunk_size for layer in layers.values())
    if tokens.ndim != 1 or len(tokens) < largest:
        raise ValueError(f"tokens: expected ids [T] of at least one chunk of {largest}, got {list(tokens.shape)}")
    return tokens, layers


def _sizes(routed: RoutedState) -> tuple[int, int]:
    """Bytes of a page, and of what has one size, of a state of one stream."""
    attention = routed.attention
    pages = sum(getattr(attention, name).nbytes for name in _PAGES)
    books = sum(getattr(attention, name).nbytes for name in _BOOKS)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(routed))
    return pages // attention.capacity, whole - pages - books


@partial(jax.jit, static_argnames="structure", donate_argnames="state")
def _read(variables: Any, tokens: Any, state: Any, *, structure: Any) -> tuple[dict[int, jax.Array], Any]:
    model = nnx.merge(structure, variables)
    _, state = model(jnp.asarray(tokens), state=state)
    return {layer: routed.attention.count[0] for layer, routed in routed_states(model.config, state).items()}, state


@partial(jax.jit, static_argnames="structure")
def _fractions(variables: Any, tokens: Any, *, structure: Any) -> dict[int, jax.Array]:
    return pass_fractions(nnx.merge(structure, variables), tokens)
