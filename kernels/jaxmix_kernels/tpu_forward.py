"""One TPU kernel for a chain of decayed linear attentions over the same queries, keys and values."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jaxmix_kernels import tpu_tiles
from jaxmix_kernels.decays import CHUNK, Array, ChunkDecays
from jaxmix_kernels.tpu_tiles import Decays, Walk

States = tuple[Array, ...]

Tiles = list[Array]

Step = Callable[[Tiles, Tiles, Tiles, list[list[Decays]], States], tuple[Tiles, States]]
"""What one grid step does: tiles of q, k and v, decays of the tiles, and states, to tiles of out and states."""


def forward(
    name: str,
    step: Step,
    q: Array,
    k: Array,
    v: Array,
    decays: tuple[ChunkDecays | None, ...],
    initial: tuple[Array | None, ...],
    state_sizes: tuple[tuple[int, int], ...],
    *,
    products: int,
    interpret: Any,
) -> tuple[Array, States]:
    """Walks over the chunks with `step`, its states in VMEM.

    Args:
        name: the operator, for errors and profiles.
        step: what one grid step does.
        q: queries, [B, T, H, D], bfloat16 or float32, T a multiple of the chunk length.
        k: keys, [B, T, Hk, D]; Hk divides H and query head h reads head h // (H / Hk), as for all head counts.
        v: values, [B, T, Hv, E].
        decays: what `step` gets as its decays, one by one; None for no decay and no segments.
        initial: the states before the first chunk, [B, Hs, ...], float32; None for zeros.
        state_sizes: their last two axes.
        products: multiply-adds of a tile.
        interpret: as of `pl.pallas_call`.

    Returns:
        out [B, T, H, E] in the dtype of v, and the final states [B, H, ...], float32.

    Raises:
        NotImplementedError: for dtypes, head sizes or lengths without a kernel.
    """
    tpu_tiles.check_arrays(name, q, k, v)
    batch, length, heads, _ = q.shape
    walk = Walk(batch, heads, length // CHUNK, segments=tpu_tiles.segmented(*decays))
    inputs = {"q": walk.tokens(q), "k": walk.tokens(k), "v": walk.tokens(v)}
    inputs |= {f"rows {i}": walk.rows(x) for i, x in enumerate(decays)}
    inputs |= {f"initial {i}": walk.state(x) for i, x in enumerate(initial)}
    outputs = {"out": walk.token_output(v.shape[3], v.dtype)}
    outputs |= {f"final {i}": walk.state_output(*size) for i, size in enumerate(state_sizes)}
    result = walk.call(
        functools.partial(_kernel, walk, step, len(decays)),
        inputs,
        outputs,
        [pltpu.VMEM(size, jnp.float32) for size in state_sizes],
        products=products,
        interpret=interpret,
        name=name,
    )
    return walk.join(result["out"]), tuple(result[f"final {i}"] for i in range(len(state_sizes)))


def _kernel(
    walk: Walk, step: Step, decay_count: int, inputs: dict[str, Any], outputs: dict[str, Any], *carried: Any
) -> None:
    for i, x in enumerate(carried):
        tpu_tiles.start(x, inputs[f"initial {i}"])
    states = tuple(x[...] for x in carried)
    q, k, v = (tpu_tiles.tokens(walk, inputs[name]) for name in ("q", "k", "v"))
    decays = [Decays.unpack(walk, inputs[f"rows {i}"]) for i in range(decay_count)]
    out, states = step(q, k, v, decays, states)
    tpu_tiles.write(walk, outputs["out"], out)
    for i, (x, state) in enumerate(zip(carried, states, strict=True)):
        x[...] = state
        tpu_tiles.finish(x, outputs[f"final {i}"])
