"""Decayed linear attention on a TPU."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jaxmix_kernels import tpu_tiles
from jaxmix_kernels.decays import CHUNK, Array, ChunkDecays, Result
from jaxmix_kernels.tpu_tiles import TILE, Decays, Walk


def decayed_attention(
    a: Array | None,
    b: Array,
    c: Array,
    decays: ChunkDecays | None,
    initial: Array | None,
    *,
    outputs: bool = True,
    states: bool = False,
    interpret: Any = False,
) -> Result:
    """Outputs and final state of decayed linear attention over whole chunks.

    Per head, X [D, E] is carried from chunk to chunk, first to last:
    out_t = enter_t (a_t^T X) + sum_s M_ts (a_t . b_s) c_s over the chunk, then X = kept X + sum_s leave_s b_s c_s^T,
    where M_ts is the decay from s to t for s <= t of one segment, else 0. Matrix products take operands of the dtype of
    the arrays and accumulate in float32; X stays float32.

    Args:
        a: readers, [B, T, H, D]; None if `outputs` is False. T is a multiple of the chunk length.
        b: what is read, [B, T, Hb, D]. Here and below fewer heads than H divide it, and head h reads h // (H / Hb).
        c: values, [B, T, Hc, E].
        decays: decays and segment borders, Hd heads; None for no decay and no segments.
        initial: state before the first chunk, [B, Hs, D, E], float32; None for zeros.
        outputs: False for states alone, whose H is then the largest number of heads given.
        states: asks for the state before every tile of two chunks.
        interpret: as of `pl.pallas_call`.

    Returns:
        out [B, T, H, E] in the dtype of c, the final state [B, H, D, E], float32, and the states [B, H, N', D, E] in
        the dtype of c, for N' of `Walk`; None for what was not asked for.

    Raises:
        NotImplementedError: for dtypes, head sizes or lengths without a kernel.
    """
    if outputs and a is None:
        raise ValueError("a: needed for outputs")
    if not outputs:
        a = None
    tpu_tiles.check_arrays("decayed_attention", *(x for x in (a, b, c) if x is not None))
    batch, length, _, key_size = b.shape
    value_size = c.shape[3]
    heads = [x.shape[2] for x in (a, b, c) if x is not None]
    heads += [] if decays is None else [decays.enter.shape[1]]
    heads += [] if initial is None else [initial.shape[1]]
    walk = Walk(batch, max(heads), length // CHUNK, c.dtype, segments=tpu_tiles.segmented(decays))
    products = TILE * value_size * (TILE + key_size) + TILE * TILE * key_size if outputs else 0
    result = walk.call(
        functools.partial(_kernel, walk),
        {
            "a": walk.tokens(a),
            "b": walk.tokens(b),
            "c": walk.tokens(c),
            "rows": walk.rows(decays),
            "initial": walk.state(initial),
        },
        {
            "out": walk.token_output(value_size, c.dtype) if outputs else None,
            "final": walk.state_output(key_size, value_size),
            "states": walk.states_output(key_size, value_size, c.dtype) if states else None,
        },
        [pltpu.VMEM((key_size, value_size), jnp.float32)],
        products=products + TILE * key_size * value_size,
        interpret=interpret,
        name="decayed_attention",
    )
    return Result(walk.join(result["out"]), result["final"], result["states"])


def _kernel(walk: Walk, inputs: dict[str, Any], outputs: dict[str, Any], carried: Any) -> None:
    tpu_tiles.start(carried, inputs["initial"])
    b, c = tpu_tiles.tokens(walk, inputs["b"]), tpu_tiles.tokens(walk, inputs["c"])
    a = None if inputs["a"] is None else tpu_tiles.tokens(walk, inputs["a"])
    result = tpu_tiles.attend(a, b, c, Decays.unpack(walk, inputs["rows"]), carried[...])
    if a is not None:
        tpu_tiles.write(walk, outputs["out"], result.out)
    if outputs["states"] is not None:
        tpu_tiles.write_each(walk, outputs["states"], result.states)
    carried[...] = result.final
    tpu_tiles.finish(carried, outputs["final"])
