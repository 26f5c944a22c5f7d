"""Decayed linear attention on Hopper with Pallas Mosaic GPU: tensor-core products (wgmma) fed by asynchronous copies.

One program owns one head of one sequence and one block of value columns, so its state X [D, columns] stays in the
registers of one warpgroup while the chunks stream through shared memory. Programs of one head repeat the products of
queries and keys; that is cheaper than sharing them. For a chunk, with rows t and columns s of M and P:

    out = enter * (a X) + P c,   P = M * (a b^T)
    X   = kept X + b^T (leave * c)

Operands are bfloat16, or float32 in two halves (`gpu_operands`); every sum is float32. The interpreter of Mosaic GPU
takes the left operand of a product from shared memory only, and accumulators one at a time, from zero. `Products`
follows it there; on a device P stays in registers and products accumulate in place.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmix_kernels.decays import CHUNK, DTYPES, ChunkDecays, Result
from jaxmix_kernels.gpu_chunks import (
    COLUMNS,
    LARGEST_GRID,
    WGMMA_ROWS,
    Products,
    decay_arrays,
    decayed,
    group_of_head,
    interpreter,
    layout_of_tiles,
    masked,
    reached,
    refuse,
    rows,
    split_index,
)
from jaxmix_kernels.gpu_operands import LOW, Operand, halve, halves, join, parts

Array = jax.Array

_SLOTS = 2
_STAGES = 2
"""Chunks in flight between global and shared memory."""
LONG = 256
"""Chunks beyond which it is worth the while to find out where a final state begins to hold anything."""


def decayed_attention(
    a: Array | None,
    b: Array,
    c: Array,
    decays: ChunkDecays | None,
    initial: Array | None,
    *,
    reverse: bool = False,
    outputs: bool = True,
    states: bool = False,
    interpret: Any = False,
) -> Result:
    """out_t = enter_t (a_t^T X) + sum_s M_ts (a_t . b_s) c_s, X = kept X + sum_s leave_s b_s c_s^T, chunk after chunk.

    M_ts is the decay from token s to token t >= s of one segment, else 0. Every head count divides H, the
    largest of them; head h reads head h // (H / Hx).

    Args:
        a: queries [B, T, Ha, D], bfloat16 or float32, as b and c are; T is a multiple of `CHUNK`. Not read without
            outputs, and may be None then.
        b: keys [B, T, Hb, D].
        c: values [B, T, Hc, E].
        decays: decays and segments, of Hd heads; None for neither.
        initial: state before the first chunk walked, [B, Hs, D, E], float32; None for zeros.
        reverse: walk from the last chunk to the first with enter and leave exchanged; without outputs only.
        outputs: False computes no outputs. If nothing but the final state is left to compute, from zeros, more than
            `LONG` chunks are walked from where decays leave something of them.
        states: asks for the state before every chunk.
        interpret: True, or `plgpu.InterpretGPUParams(...)`, runs on a CPU, for tests.

    Returns:
        out [B, T, H, E], final [B, H, D, E], states [B, H, N, D, E].

    Raises:
        NotImplementedError: the kernel does not take these dtypes or sizes, or outputs are asked for in reverse.
        ValueError: the tokens do not fill chunks, or a head count does not divide another.
    """
    if reverse and outputs:
        raise NotImplementedError("the Hopper kernel walks in reverse without outputs only")
    arrays = [x for x in (a, b, c) if x is not None]
    key_size, value_size = b.shape[3], c.shape[3]
    refuse(arrays, key_size, value_size, DTYPES)
    heads = max(x.shape[2] for x in arrays)
    heads = max(heads, 1 if decays is None else decays.enter.shape[1], 1 if initial is None else initial.shape[1])
    for x, axis in [(x, 2) for x in arrays] + ([] if initial is None else [(initial, 1)]):
        if heads % x.shape[axis]:
            raise ValueError(f"every head count must divide the largest, {heads}; got {x.shape[axis]}")
    a = a if outputs else None
    # The products of the state have D rows, and a wgmma at least 64.
    padding = max(0, WGMMA_ROWS - key_size)
    if padding:
        a = None if a is None else jnp.pad(a, [(0, 0)] * 3 + [(0, padding)])
        b = jnp.pad(b, [(0, 0)] * 3 + [(0, padding)])
        initial = None if initial is None else jnp.pad(initial, [(0, 0)] * 2 + [(0, padding), (0, 0)])
    inputs: dict[str, Array | None] = {}
    for name, x in {"a": a, "b": b, "c": c}.items():
        inputs |= {} if x is None else halve(name, x)
    inputs["initial"] = initial
    if decays is not None and outputs:
        inputs |= decay_arrays(decays, b.dtype)
    elif decays is not None:
        inputs |= {"leave": decays.enter if reverse else decays.leave, "kept": decays.kept}
        if initial is None and not states and b.shape[1] > LONG * CHUNK:
            # Seen from the end of the walk: chunks before these leave nothing in the final state.
            inputs["first"] = decays.kept.shape[2] - reached(decays.kept if reverse else decays.kept[:, :, ::-1])
    given = {name: x for name, x in inputs.items() if x is not None}
    segments = decays is not None and decays.run is not None
    results = _call(given, heads, reverse, outputs, states, segments, interpret)
    starts = join(results, "states")[:, :, :, :key_size] if states else None
    return Result(results.get("out"), results["final"][:, :, :key_size], starts)


def _call(
    given: dict[str, Array], heads: int, reverse: bool, outputs: bool, states: bool, segments: bool, interpret: Any
) -> dict[str, Array]:
    """Lays out the grid and the shared memory: final, out and states."""
    batch, tokens, _, key_size = given["b"].shape
    value_size, dtype = given["c"].shape[3], given["c"].dtype
    columns = min(value_size, COLUMNS)
    blocks, count = value_size // columns, tokens // CHUNK
    programs = batch * heads * blocks
    if programs > LARGEST_GRID:
        raise NotImplementedError(f"B * H * E / {columns} must be at most {LARGEST_GRID}, got {programs}")
    results = {"final": jax.ShapeDtypeStruct((batch, heads, key_size, value_size), jnp.float32)}
    is_wide = "c" + LOW in given
    if outputs:
        out_dtype = jnp.float32 if is_wide else dtype
        results["out"] = jax.ShapeDtypeStruct((batch, tokens, heads, value_size), out_dtype)
    if states:
        shape = jax.ShapeDtypeStruct((batch, heads, count, key_size, value_size), dtype)
        results |= dict.fromkeys(halves("states", is_wide), shape)
    transforms = layout_of_tiles(min(key_size, columns), dtype)

    def shared(rows: int, width: int) -> Any:
        return plgpu.SMEM((rows, width), dtype, transforms=transforms)

    scratch = {}
    if outputs or states:
        scratch |= {half: shared(key_size, columns) for half in halves("state", is_wide)}
    if "leave" in given:
        scratch |= {half: shared(CHUNK, columns) for half in halves("scaled", is_wide)}
    # In float32 there is no room for it at D = 128: outputs go from registers to global memory.
    if outputs and not is_wide:
        scratch["out_tile"] = plgpu.SMEM((_SLOTS, CHUNK, columns), dtype, transforms=transforms)
    if interpret:
        scratch |= {half: shared(CHUNK, CHUNK) for half in halves("scores", is_wide)}
    body = functools.partial(
        _program,
        names=(*given, *results, *scratch),
        heads=heads,
        columns=columns,
        reverse=reverse,
        segments=segments,
        stages=_STAGES,
        transforms=transforms,
    )
    kernel = plgpu.kernel(
        lambda *refs: body(refs),
        out_type=tuple(results.values()),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(interpret),
    )
    return dict(zip(results, kernel(*given.values()), strict=True))


def _program(
    refs: tuple[Any, ...],
    *,
    names: tuple[str, ...],
    heads: int,
    columns: int,
    reverse: bool,
    segments: bool,
    stages: int,
    transforms: tuple[Any, ...],
) -> None:
    """One head and one block of columns, all chunks."""
    ref = dict(zip(names, refs, strict=True))
    batch, head, block = split_index(lax.axis_index("program"), heads, ref["final"].shape[3] // columns)
    key_size = ref["b"].shape[3]
    count = ref["c"].shape[1] // CHUNK
    block_columns = pl.ds(block * columns, columns)
    products = Products.named(ref, "scores")
    rounded, staged = Operand.named(ref, "state"), "out_tile" in ref

    def of_head(name: str, axis: int) -> Any:
        return group_of_head(head, heads, ref[name].shape[axis])

    first = ref["first"][batch, of_head("first", 1)] if "first" in ref else jnp.int32(0)

    def chunk_index(n: Any) -> Any:
        return count - 1 - first - n if reverse else first + n

    block_spec = functools.partial(plgpu.BlockSpec, index_map=lambda n: (chunk_index(n), 0), transforms=transforms)
    keys, values = block_spec((CHUNK, key_size)), block_spec((CHUNK, columns))
    vector = plgpu.BlockSpec((None, CHUNK), lambda n: (chunk_index(n), 0))
    sources: dict[str, tuple[Any, Any]] = {}
    for name in parts(ref, "a", "b"):
        sources[name] = keys, ref[name].at[batch, :, of_head(name, 2)]
    for name in parts(ref, "c"):
        sources[name] = values, ref[name].at[batch, :, of_head("c", 2), block_columns]
    for name in ("enter", "leave", "high", "low"):
        if name in ref:
            sources[name] = vector, ref[name].at[batch, of_head(name, 1)]
    if "run" in ref:
        sources["run"] = vector, ref["run"].at[batch]

    def step(indices: tuple[Any, ...], *tiles: Any) -> Array:
        chunk, state = dict(zip(sources, tiles[:-1], strict=True)), tiles[-1]
        a, b, c = (Operand.named(chunk, name) for name in "abc")
        n = chunk_index(indices[0])
        kept = ref["kept"][batch, of_head("kept", 1), n] if "kept" in ref else None
        for source, target in zip(rounded.parts, parts(ref, "states"), strict=False):
            plgpu.copy_smem_to_gmem(source, ref[target].at[batch, head, n, :, block_columns])
        added = c
        if "leave" in chunk:
            added = Operand.named(ref, "scaled")
            added.store(decayed(c.load(), rows(chunk["leave"], columns), segments=segments))
            plgpu.commit_smem()
        if "out" in ref:
            out = products.new((CHUNK, columns), a, rounded)
            scores = products.new((CHUNK, CHUNK), a, b.transposed)
            if "enter" in chunk:
                out = decayed(out, rows(chunk["enter"], columns), segments=segments)
            out = products.add(out, a.like(masked(scores, chunk)), c)
            write(n, out)
        state = state if kept is None else decayed(state, kept, segments=segments)
        state = products.add(state, b.transposed, added, carried=True)
        if "state" in ref:
            if "states" in ref:
                plgpu.wait_smem_to_gmem(int(staged), wait_read_only=True)
            rounded.store(state)
            plgpu.commit_smem()
        return state

    def write(n: Any, out: Array) -> None:
        if not staged:
            ref["out"].at[batch, pl.ds(n * CHUNK, CHUNK), head, block_columns][...] = out
            return
        plgpu.wait_smem_to_gmem(_SLOTS - 1 + ("states" in ref), wait_read_only=True)
        slot = lax.rem(n, jnp.int32(_SLOTS))
        ref["out_tile"].at[slot][...] = out.astype(ref["out"].dtype)
        plgpu.commit_smem()
        tokens = pl.ds(n * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(ref["out_tile"].at[slot], ref["out"].at[batch, tokens, head, block_columns])

    if "initial" in ref:
        source = ref["initial"].at[batch, of_head("initial", 1), :, block_columns]
        state = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
    else:
        state = plgpu.layout_cast(jnp.zeros((key_size, columns), jnp.float32), plgpu.Layout.WGMMA)
    if "state" in ref:
        rounded.store(state)
        plgpu.commit_smem()
    pipeline = plgpu.emit_pipeline(
        step,
        grid=(count - first if "first" in ref else count,),
        in_specs=[spec for spec, _ in sources.values()],
        max_concurrent_steps=stages,
        init_carry=state,
    )
    state = pipeline(*(source for _, source in sources.values()))
    plgpu.wait_smem_to_gmem(0)
    ref["final"][batch, head, :, block_columns] = state
