"""Chains of decayed linear attentions on a TPU, fused in one kernel: what one gives, the next takes as keys or values.

The links of a chain share the queries. A grid step computes its tiles link after link, with the states of all links in
VMEM, which what one link hands to the next never leaves either. Where gradients need it, states before all tiles and
results of links are written as well.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jaxmix_kernels import tpu_tiles
from jaxmix_kernels.decays import CHUNK, Array, ChunkDecays
from jaxmix_kernels.links import Links
from jaxmix_kernels.tpu_tiles import TILE, Decays, Walk


def chain_forward(
    name: str,
    links: Links,
    q: Array,
    k: Array,
    v: Array,
    decays: dict[int, ChunkDecays | None],
    initials: tuple[Array | None, ...],
    *,
    keep: bool = False,
    interpret: Any = False,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """The output of the last link, the final states of all, and what their gradients need.

    Args:
        name: the operator, for errors and profiles.
        links: the chain; all but the last give tiles to later ones, rounded to the dtype of v.
        q: queries, [B, T, H, D], bfloat16 or float32; all of one dtype. T is a multiple of the chunk length.
        k: keys, [B, T, Hk, D]; head h reads head h // (H / Hk), and so on for all head counts, which divide H.
        v: values, [B, T, Hv, E].
        decays: by their power; None for no decay and no segments.
        initials: states before the first chunk, one a link, [B, Hs, D, D or E], float32; None for zeros.
        keep: asks for what the gradients need.
        interpret: as of `pl.pallas_call`.

    Returns:
        out [B, T, H, E] in the dtype of v; final states [B, H, D, D or E], float32; with `keep` the states before every
        tile of all links, [B, H, N', D, D or E], and then the results of all but the last, [B, T, H, D or E].

    Raises:
        NotImplementedError: for dtypes, head sizes or lengths without a kernel.
    """
    tpu_tiles.check_arrays(name, q, k, v)
    batch, length, heads, key_size = q.shape
    walk = Walk(batch, heads, length // CHUNK, v.dtype, segments=tpu_tiles.segmented(*decays.values()))
    inputs = {"q": walk.tokens(q), "k": walk.tokens(k), "v": walk.tokens(v)}
    inputs |= {f"rows {power}": walk.rows(x) for power, x in decays.items()}
    inputs |= {f"initial {i}": walk.state(x) for i, x in enumerate(initials)}
    sizes = {"k": key_size, "v": v.shape[3]}
    for link in links:
        sizes[link.result] = sizes[link.values]
    widths = [sizes[link.result] for link in links]
    outputs = {"out": walk.token_output(widths[-1], v.dtype)}
    outputs |= {f"final {i}": walk.state_output(key_size, width) for i, width in enumerate(widths)}
    if keep:
        outputs |= {f"states {i}": walk.states_output(key_size, width, v.dtype) for i, width in enumerate(widths)}
        outputs |= {link.result: walk.token_output(sizes[link.result], v.dtype) for link in links[:-1]}
    weighted = {(link.keys, link.power) for link in links}
    result = walk.call(
        functools.partial(_kernel, walk, links),
        inputs,
        outputs,
        [pltpu.VMEM((key_size, width), jnp.float32) for width in widths],
        products=TILE * (TILE * key_size * len(weighted) + (TILE + 2 * key_size) * sum(widths)),
        interpret=interpret,
        name=name,
    )
    numbers = range(len(links))
    kept = ()
    if keep:
        kept = *(result[f"states {i}"] for i in numbers), *(walk.join(result[link.result]) for link in links[:-1])
    return walk.join(result["out"]), tuple(result[f"final {i}"] for i in numbers), kept


def _kernel(walk: Walk, links: Links, inputs: dict[str, Any], outputs: dict[str, Any], *carried: Any) -> None:
    for i, x in enumerate(carried):
        tpu_tiles.start(x, inputs[f"initial {i}"])
    tiles = {name: tpu_tiles.tokens(walk, inputs[name]) for name in "qkv"}
    decays = {power: Decays.unpack(walk, inputs[f"rows {power}"]) for power in {link.power for link in links}}
    weights: dict[Any, list[Array]] = {}
    results = []
    for link, state in zip(links, [x[...] for x in carried], strict=True):
        q, k, v, by_tile = tiles["q"], tiles[link.keys], tiles[link.values], decays[link.power]
        shared = link.keys, link.power
        if shared not in weights:
            weights[shared] = tpu_tiles.scores(q, k, by_tile)
        results.append(tpu_tiles.attend(q, k, v, by_tile, state, weights[shared]))
        tiles[link.result] = [out.astype(q[0].dtype) for out in results[-1].out]
    # The compiler moves nothing past what is written or asked: all is computed first, and the last step asked for last.
    for i, (link, result) in enumerate(zip(links, results, strict=True)):
        if link.result in outputs:
            tpu_tiles.write(walk, outputs[link.result], result.out)
        if f"states {i}" in outputs:
            tpu_tiles.write_each(walk, outputs[f"states {i}"], result.states)
    for i, (result, x) in enumerate(zip(results, carried, strict=True)):
        x[...] = result.final
        tpu_tiles.finish(x, outputs[f"final {i}"])
