"""Every mixer as the suites of named shapes call it: arguments, the call, and the heads that can be checked alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmix.arrays import Array
from jaxmix.bench.shapes import Shape
from jaxmix.mixers import (
    AHLAState,
    DeltaState,
    HLA2State,
    HLA3State,
    LinearAttentionState,
    SoftmaxAttentionState,
    SSDState,
    ahla,
    gated_delta_rule,
    hla2,
    hla3,
    linear_attention,
    softmax_attention,
    ssd,
)

Arrays = tuple[Array, ...]
QUERY_BLOCK = 1024
"""Queries that the float32 reference of softmax attention serves at once."""


@dataclasses.dataclass(frozen=True)
class BenchMixer:
    """What a mixer is given and how it is called.

    Attributes:
        arguments: the names of its arrays, in the order of the call.
        call: (*arrays, **options) -> (output, state).
        state: class of its state.
        unit_scale: q and k have entries of unit variance, not vectors of about unit length.
        per_head: arguments and outputs of a group of heads depend on nothing else.
    """

    arguments: tuple[str, ...]
    call: Callable[..., tuple[Array, Any]]
    state: Any
    unit_scale: bool = False
    per_head: bool = True

    def heads(self, shape: Shape) -> dict[str, int]:
        """The number of heads of every argument, and of "out"."""
        full, shared = shape.heads, shape.shared_heads
        if self.call is _ssd:
            return {"x": full, "dt": full, "B": 1, "C": 1, "out": full}
        queries = shared if self.call is gated_delta_rule else full
        values = full if self.call is gated_delta_rule else shared
        counts = {"q": queries, "k": shared, "v": values, "log_decay": full, "beta": full, "out": full}
        return {name: counts[name] for name in (*self.arguments, "out")}

    def draw(self, shape: Shape, seed: int, *, length: int | None = None, dtype: Any = jnp.bfloat16) -> Arrays:
        """Random arguments: decays that remember 20 to 1000 tokens, write strengths from 0 to 1."""
        return jax.jit(self._draw, static_argnums=(0, 1, 3))(shape, length or shape.length, jax.random.key(seed), dtype)

    def _draw(self, shape: Shape, length: int, key: Array, dtype: Any) -> Arrays:
        drawn = []
        for (name, heads), own in zip(self.heads(shape).items(), jax.random.split(key, 6), strict=False):
            rows = (shape.batch, length, heads)
            if name == "out":
                continue
            if name in ("log_decay", "dt"):
                decay = jax.random.uniform(own, rows, minval=1e-3, maxval=5e-2)
                drawn.append(-decay if name == "log_decay" else decay)
            elif name == "beta":
                drawn.append(jax.random.uniform(own, rows))
            else:
                size = shape.value_size if name in ("v", "x") else shape.key_size
                x = jax.random.normal(own, (*rows, size), dtype)
                drawn.append(x if self.unit_scale else (x / jnp.asarray(size**0.5, dtype)))
        return tuple(drawn)

    def draw_state(self, shape: Shape, seed: int) -> Any:
        """A random state, as decoding meets it; a cache of softmax attention is full but for one slot."""
        sizes: dict[str, Any] = {}
        if self.state is SoftmaxAttentionState:
            sizes = {"shared_heads": shape.shared_heads, "capacity": shape.length, "dtype": jnp.bfloat16}

        def make(key: Array) -> Any:
            empty = self.state.init(shape.batch, shape.heads, shape.key_size, shape.value_size, **sizes)
            leaves, tree = jax.tree.flatten(empty)
            keys = jax.random.split(key, len(leaves))
            drawn = [
                jax.random.normal(own, x.shape, x.dtype)
                if jnp.issubdtype(x.dtype, jnp.floating)
                else jnp.full(x.shape, shape.length - 1, x.dtype)
                for own, x in zip(keys, leaves, strict=True)
            ]
            return jax.tree.unflatten(tree, drawn)

        return jax.jit(make)(jax.random.key(seed))


def _ssd(x: Array, dt: Array, B: Array, C: Array, **options: Any) -> tuple[Array, Any]:
    """`ssd` with rates of one and B and C shared by all heads."""
    return ssd(x, dt, -jnp.ones(x.shape[2]), B, C, **options)


_DECAYED = ("q", "k", "v", "log_decay")
MIXERS: dict[str, BenchMixer] = {
    "linear_attention": BenchMixer(_DECAYED, linear_attention, LinearAttentionState),
    "hla2": BenchMixer(_DECAYED, hla2, HLA2State),
    "ahla": BenchMixer(_DECAYED, ahla, AHLAState),
    "hla3": BenchMixer(_DECAYED, hla3, HLA3State),
    "gated_delta_rule": BenchMixer((*_DECAYED, "beta"), gated_delta_rule, DeltaState),
    "ssd": BenchMixer(("x", "dt", "B", "C"), _ssd, SSDState, per_head=False),
    "softmax_attention": BenchMixer(("q", "k", "v"), softmax_attention, SoftmaxAttentionState, unit_scale=True),
}
"""Mixers by name."""


def reference(mixer: str) -> Callable[..., Array]:
    """The output in float32: by the chunked scan, by the serial form for one token, by plain sums for softmax."""
    if mixer == "softmax_attention":
        return blockwise_softmax
    call = MIXERS[mixer].call
    return lambda *arrays: call(*arrays, implementation="scan")[0]


def blockwise_softmax(q: Array, k: Array, v: Array) -> Array:
    """Causal softmax attention of full precision, a block of queries at a time so that any length fits."""
    length = q.shape[1]
    size = min(QUERY_BLOCK, length)
    blocks = -(-length // size)
    padded = jnp.pad(q, [(0, 0), (0, blocks * size - length), (0, 0), (0, 0)])
    padded = padded.reshape(q.shape[0], blocks, size, k.shape[2], -1, q.shape[3])

    @jax.checkpoint
    def one(block: tuple[Array, Array]) -> Array:
        queries, start = block
        logits = jnp.einsum("btgrd,bsgd->bgrts", queries, k, precision="highest") * q.shape[3] ** -0.5
        seen = start + jnp.arange(size)[:, None] >= jnp.arange(length)
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        return jnp.einsum("bgrts,bsge->btgre", weights, v, precision="highest")

    out = lax.map(one, (jnp.moveaxis(padded, 1, 0), jnp.arange(blocks) * size))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], blocks * size, q.shape[2], -1)[:, :length]


@functools.cache
def checked_part(mixer: str, shape: Shape) -> dict[str, slice]:
    """Which heads of every argument and of "out" belong to the first group, which depends on nothing else."""
    bench = MIXERS[mixer]
    counts = bench.heads(shape)
    if not bench.per_head:
        return {name: slice(count) for name, count in counts.items()}
    return {name: slice(max(1, count // shape.shared_heads)) for name, count in counts.items()}
